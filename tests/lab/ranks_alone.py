"""The stages of the main deploy without what they are made of: no packages, release and model.

What the release's `vllm` is, a test has put there.
"""

from gpufleet.converge import Converge
from gpufleet.fleet import here, refusals, together
from gpufleet.release import release
from gpufleet.serving import answering
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
    rendered = role.unit_files(node, wanted, build, secrets)
    stages = Converge(role.services(node, rendered))
    stages.files(name="units")
    stages.units(name="stages")
    answering(
        role.endpoints(node, rendered), name="wait until every endpoint answers", _timeout=120
    )
