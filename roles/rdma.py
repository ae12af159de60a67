"""Let a node's GPUs and network adapters access each other's memory."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState, Listing
from gpufleet.gpu_software.rdma import desired_rdma
from gpufleet.operations.converge import Converge
from gpufleet.operations.load_modules import LOADED, MODPROBE_SECONDS, load_rdma_modules
from gpufleet.settings.gpu_settings import Rdma


@deploy("RDMA")
def rdma(wanted: Rdma | None, distribution: str) -> None:
    """Converge packages and files, and load the modules; None removes gpufleet's files."""
    node = Converge(desired_rdma(wanted, distribution))
    if wanted is None:
        node.files(name="no files")
        return
    node.packages(name="packages")
    node.files(name="modules at boot, limits")
    loaded = Converge(DesiredState(Listing(LOADED)))
    load_rdma_modules(loaded, wanted, name="modules", _timeout=MODPROBE_SECONDS)
