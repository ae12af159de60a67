"""The proof that nodes reach each other, and the stages after it: all else of the main deploy is
left out. What the release's `vllm` is, and the model's files, a test has put there."""

from gpufleet.converge import Converge
from gpufleet.fleet import here, refusals, together
from gpufleet.reaching import reached
from gpufleet.release import release
from gpufleet.wanted import Package, Wanted
from roles import vllm as role

with refusals():
    node = here()
    together()
    wanted = node.settings.vllm
    build = release(wanted, role.read(wanted.lock), role.read(wanted.uv_lock))
    secrets = role.credentials(wanted, node)
    ground = role.foundation(wanted, build, secrets)
    ground = Converge(Wanted(*(each for each in ground if not isinstance(each, Package))))
    ground.accounts(name="service account")
    ground.files(name="directories, locks and credentials")
    stages = Converge(role.services(node, role.unit_files(node, wanted, build, secrets)))
    reached(stages, node.stages, name="nodes of a replica reach each other")
    stages.files(name="units")
    stages.units(name="stages")
