"""Install NVIDIA's container toolkit, for nodes that also run containers with GPUs."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.artifacts.operator_files import read
from gpufleet.converge.desired import DesiredState, Listing, Unit
from gpufleet.gpu_software.container_toolkit import ENGINES, LINKS, desired_toolkit
from gpufleet.operations.converge import Converge
from gpufleet.operations.link_container_devices import LINK_SECONDS, link_container_devices
from gpufleet.settings.gpu_settings import ContainerToolkit


@deploy("container toolkit")
def container_toolkit(wanted: ContainerToolkit | None) -> None:
    """Converge packages and device links; with None, leave an existing toolkit unchanged."""
    if wanted is None:
        return
    node = Converge(desired_toolkit(wanted, read(wanted.key_file)))
    node.files(name="the repository's key, udev rule")
    node.packages(name="packages")
    links = Converge(DesiredState(Listing(LINKS), *(Unit(each) for each in ENGINES)))
    link_container_devices(links, name="device links of containers", _timeout=LINK_SECONDS)
