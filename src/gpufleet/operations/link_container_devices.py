"""Create the device links by which containers use a node's GPUs."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host, logger
from pyinfra.api import QuoteString, StringCommand, operation

from gpufleet.gpu_software import container_toolkit
from gpufleet.operations.converge import Converge

# The command creates one link for each device file.
LINK_SECONDS = 60


@operation()
def link_container_devices(node: Converge) -> Generator[StringCommand]:
    """
    Create the device links that containers need, unless they exist.

    A deploy makes systemd reload its units. Without the links, systemd would then remove the
    devices from running containers.
    """
    seen = node.snapshot()
    if container_toolkit.has_device_links(seen.listing(container_toolkit.LINKS)):
        host.noop("the device links exist")
        return
    for engine in container_toolkit.running_engines(seen):
        logger.warning("%s%s", host.print_prefix, container_toolkit.engine_warning(engine))
    yield StringCommand("sh", "-c", QuoteString(container_toolkit.LINK))
