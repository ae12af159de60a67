"""Write on each node that its release accepts its stages' flags: server.py has none to read."""

from gpufleet.converge import Converge
from gpufleet.fleet import here, refusals
from gpufleet.named_files import release_of
from gpufleet.proof import Proof
from roles import vllm as role

with refusals():
    node = here()
    if node and node.settings.vllm:
        build = release_of(node.settings.vllm)
        proof = Proof(build, role.begun(node, node.settings.vllm, build), node.origins)
        Converge(proof.wanted).files(name="proof")
