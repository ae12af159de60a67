"""Run the planned stages of one node, one unit each, until they answer."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.fleet.run import NodePlan, refuse_partial_restarts
from gpufleet.operations.converge import Converge
from gpufleet.operations.wait_ready import wait_ready
from gpufleet.serving import vllm_node
from roles.prepare_vllm import prepare_node


@deploy("vLLM")
def vllm(here: NodePlan) -> None:
    """
    Converge this node to exactly its planned stages, which may be none.

    Before the first unit changes, packages, release and model files are copied, each node's release
    has accepted the flags of its stages, and the nodes of each multi-node replica have proven that
    they reach each other. So an outage lasts only for the model's load time. A stage restarts only
    if its process was started with a configuration other than the plan's.
    """
    if here.settings.servers is None:
        Converge(vllm_node.no_serving()).units(name="remove all stages")
        return
    refuse_partial_restarts()
    found = prepare_node(here, here.settings.servers)
    found.stages.files(name="units")
    found.stages.units(name="stages")
    # Only after no stage runs that was started with the old credentials.
    old = Converge(vllm_node.only_these_credentials(found.secrets), probed=False)
    old.files(name="no other credentials")
    wait_ready(
        vllm_node.endpoints(found.rendered, here.settings),
        name="wait until every endpoint answers",
        _timeout=vllm_node.wait_seconds(here.stages, here.settings),
    )
