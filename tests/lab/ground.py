"""The stages of the main deploy without what they are made of: no packages, release and model.

What the release's `vllm` is, and the model's files, a test has put there.
"""

from __future__ import annotations

from gpufleet.artifacts.operator_files import release_of
from gpufleet.converge.desired import DesiredState, Package
from gpufleet.fleet.run import NodePlan, node_plan, refuse_partial_restarts
from gpufleet.operations.converge import Converge
from gpufleet.planning.stage import Stage
from gpufleet.serving import vllm_node
from gpufleet.serving.unit import UnitFile


def stages_alone() -> tuple[NodePlan, dict[Stage, UnitFile], Converge]:
    """Converge the ground that stages stand on; return the node, its units and their services."""
    node = node_plan()
    refuse_partial_restarts()
    wanted = node.settings.servers
    assert wanted
    builds = {each.engine: release_of(each) for each in node.settings.used_engines}
    secrets = vllm_node.credentials(node.stages, node.settings)
    ground = vllm_node.required_state(wanted, builds.values(), secrets)
    ground = Converge(DesiredState(*(each for each in ground if not isinstance(each, Package))))
    ground.accounts(name="service account")
    ground.files(name="directories, locks and credentials")
    rendered = vllm_node.unit_files(node.stages, node.settings, builds, secrets)
    return node, rendered, Converge(vllm_node.services(rendered, node.settings))
