"""The stages of replicas, and the wait for their endpoints: all else is left out."""

from gpufleet.fleet.run import refusals
from gpufleet.operations.wait_ready import wait_ready
from gpufleet.serving import vllm_node
from tests.lab.ground import stages_alone

with refusals():
    node, rendered, stages = stages_alone()
    stages.files(name="units")
    stages.units(name="stages")
    wait_ready(
        vllm_node.endpoints(rendered, node.settings),
        name="wait until every endpoint answers",
        _timeout=120,
    )
