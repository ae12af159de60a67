"""A release and a model as the main deploy brings them, and nothing else of it."""

from gpufleet.artifacts.model_files import Checkpoint
from gpufleet.artifacts.operator_files import release_of
from gpufleet.converge.desired import DesiredState, Package
from gpufleet.fleet.run import node_plan, refusals
from gpufleet.operations.artifact import Artifact, model_artifact
from gpufleet.operations.build_release import provide_release
from gpufleet.operations.converge import Converge
from gpufleet.operations.stage_model import chown_models, provide_model
from gpufleet.serving import vllm_node

MODEL = Checkpoint("lab/odd", "0" * 40, "/var/lib/vllm/models/lab--odd")

with refusals():
    node = node_plan()
    wanted = node.settings.vllm
    build = release_of(wanted)
    values = vllm_node.required_state(wanted, [build], {}, apart=True)
    ground = Converge(
        DesiredState(*(each for each in values if not isinstance(each, Package))),
        watch=(build.mark, MODEL.mark),
    )
    ground.accounts(name="service account")
    chown_models(ground, wanted, name="models belong to root")
    ground.files(name="directories and locks")
    provide_release(ground, build)
    # Planned for no node, for its config is on no hub: every node is to have it.
    nobody = model_artifact(MODEL, ())
    everyone = tuple(sorted(nobody.sharing))
    artifact = Artifact(**{**vars(nobody), "wanting": everyone})
    provide_model(ground, MODEL, wanted, artifact)
