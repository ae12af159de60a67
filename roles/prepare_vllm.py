"""Copy release, model files and accepted flags to a node without changing running units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyinfra import host
from pyinfra.api import deploy

from gpufleet.artifacts import model_files
from gpufleet.artifacts.operator_files import release_of
from gpufleet.fleet.run import NodePlan
from gpufleet.operations.accept_flags import Proof, accept_flags, require_all_accepted
from gpufleet.operations.artifact import model_artifact
from gpufleet.operations.build_release import provide_release
from gpufleet.operations.check_reachability import check_reachability
from gpufleet.operations.converge import Converge
from gpufleet.operations.stage_model import chown_models, copy_adapter, provide_model
from gpufleet.planning.stage import Stage
from gpufleet.serving import vllm_node
from gpufleet.serving.unit import UnitFile
from gpufleet.settings.serving_settings import EngineSettings
from gpufleet.upgrade.run.staged_units import next_files


@deploy("vLLM, prepared")
def prepare_vllm(here: NodePlan) -> None:
    """
    Copy everything that the planned stages need, and write their units beside the running ones.

    The running units, and the files that these units read at their start, are not changed. So a
    unit that restarts before the switch keeps its previous state. If the node must serve no model
    after the switch, this state is written too.
    """
    wanted = here.settings.servers
    found = None if wanted is None else prepare_node(here, wanted, apart=True)
    engines = [each.engine for each in here.settings.used_engines]
    planned = {stage.unit for stage in here.stages}
    running = (f"vllm-{each.id}.service" for each in here.running)
    there = Converge(
        next_files(
            found.rendered.values() if found else (),
            (unit for unit in running if unit not in planned),
            vllm_node.restart_files(found.secrets, engines) if found else (),
        )
    )
    there.files(name="new units, for the later switch")


@dataclass(frozen=True)
class Prepared:
    """A node's prepared release and models, and the files that start its stages."""

    stages: Converge
    """The planned stages' units and files, which are not yet converged."""
    rendered: Mapping[Stage, UnitFile]
    secrets: Mapping[str, bytes] = field(repr=False)


def prepare_node(here: NodePlan, wanted: EngineSettings, *, apart: bool = False) -> Prepared:
    """
    Copy packages, release and model files, and verify that stages can start.

    No unit is changed. With `apart`, the files that running units would read at their next start
    are not changed either.
    """
    builds = {each.engine: release_of(each) for each in here.settings.used_engines}
    secrets = vllm_node.credentials(here.stages, here.settings)
    serving = here.settings.serving
    files = {
        found for each in here.stages for found in model_files.checkpoints(serving[each.model])
    }
    copies = {
        found for each in here.stages for found in model_files.adapter_copies(serving[each.model])
    }

    ground = Converge(
        vllm_node.required_state(wanted, builds.values(), secrets, apart=apart),
        watch=(*(each.mark for each in builds.values()), *vllm_node.mark_files([*files, *copies])),
        probed=False,
    )
    ground.packages(name="packages")
    ground.accounts(name="service account")
    chown_models(ground, wanted, name="models belong to root")
    ground.files(name="directories, locks and credentials")
    for build in host.loop(list(builds.values())):
        provide_release(ground, build)
    # The Hub client of this release downloads the models.
    first = here.settings.used_engines[0]
    for found in host.loop(sorted(files, key=lambda each: each.directory)):
        provide_model(ground, found, first, model_artifact(found, here.everyone))
    for copied in host.loop(sorted(copies, key=lambda each: each.directory)):
        copy_adapter(ground, copied, name=f"copy the adapter {copied.source}")

    for build in host.loop(list(builds.values())):
        said = vllm_node.launch_commands(here.stages, here.settings, build)
        proof = Proof(build, said, here.origins)
        proofs = Converge(proof.desired_state, watch=(build.mark,))
        accept_flags(proofs, proof, name=f"ask release {build.id} whether it accepts its flags")
    require_all_accepted(name="no release has refused")

    rendered = vllm_node.unit_files(here.stages, here.settings, builds, secrets)
    stages = Converge(vllm_node.services(rendered, here.settings))
    check_reachability(stages, here.stages, name="nodes of a replica reach each other")
    return Prepared(stages, rendered, secrets)
