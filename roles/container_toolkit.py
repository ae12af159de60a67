"""NVIDIA's container toolkit, for nodes that also run containers with GPUs."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host, logger
from pyinfra.api import QuoteString, StringCommand, deploy, operation

from gpufleet.artifacts.operator_files import read
from gpufleet.converge.desired import Listing, Unit, Wanted
from gpufleet.gpu_software import container_toolkit as toolkit
from gpufleet.gpu_software.container_toolkit import LINKS
from gpufleet.operations.converge import Converge
from gpufleet.settings.gpu_settings import ContainerToolkit

# One link a device file.
SECONDS = 60


@deploy("container toolkit")
def container_toolkit(wanted: ContainerToolkit | None) -> None:
    """Converge packages and device links; None: the toolkit, if there is one, is not ours."""
    if wanted is None:
        return
    node = Converge(toolkit.wanted(wanted, read(wanted.key_file)))
    node.files(name="the repository's key, udev rule")
    node.packages(name="packages")
    links = Converge(Wanted(Listing(LINKS), *(Unit(each) for each in toolkit.ENGINES)))
    linked(links, name="device links of containers", _timeout=SECONDS)


@operation()
def linked(node: Converge) -> Generator[StringCommand]:
    """
    Make the links that a container's devices are known by, unless they are there.

    Without them systemd forgets the devices of running containers when it reloads its units, which
    our deploys have it do.
    """
    seen = node.snapshot()
    if toolkit.are_linked(seen.listing(LINKS)):
        host.noop("the device links are there")
        return
    for engine in toolkit.running(seen):
        logger.warning("%s%s", host.print_prefix, toolkit.warning(engine))
    yield StringCommand("sh", "-c", QuoteString(toolkit.LINK))
