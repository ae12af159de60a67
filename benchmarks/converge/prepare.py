"""Write on each node that its release accepts its stages' flags: server.py has none to read."""

from gpufleet.artifacts.operator_files import release_of
from gpufleet.fleet.run import node_plan, refusals
from gpufleet.operations.accept_flags import Proof
from gpufleet.operations.converge import Converge
from gpufleet.serving import vllm_node

with refusals():
    node = node_plan()
    if node and node.settings.vllm:
        build = release_of(node.settings.vllm)
        proof = Proof(
            build, vllm_node.launch_commands(node.stages, node.settings, build), node.origins
        )
        Converge(proof.desired_state).files(name="proof")
