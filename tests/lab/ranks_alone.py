"""The stages of replicas, and the wait for their endpoints: all else is left out."""

from gpufleet.fleet.run import refusals
from gpufleet.operations.wait_ready import answering
from roles import vllm as role
from tests.lab.ground import stages_alone

with refusals():
    node, rendered, stages = stages_alone()
    stages.files(name="units")
    stages.units(name="stages")
    answering(
        role.endpoints(node, rendered), name="wait until every endpoint answers", _timeout=120
    )
