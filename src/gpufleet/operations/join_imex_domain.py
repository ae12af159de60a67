"""Run IMEX with the nodes of the same NVLink fabric. The running driver reports the fabric."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, State, StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.converge.desired import DesiredState, Directory, File, Unit
from gpufleet.errors import FleetError
from gpufleet.node.imex_domain import addresses
from gpufleet.operations.artifact import once
from gpufleet.operations.converge import Converge, files, log_dry_run, refuse, units
from gpufleet.remote.query import probe_all
from gpufleet.sanitize import printable
from gpufleet.serving.unit import drop_in

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

SERVICE = "nvidia-imex.service"

NODES = "/etc/nvidia-imex/nodes_config.cfg"


@operation()
def join_imex_domain(driver: str) -> Commands:
    """Write the addresses of the domain's nodes into IMEX's file, and run IMEX with this file."""
    state: State = ctx_state.get()
    try:
        domain = addresses(_documents(state), host.name)
    except FleetError as error:
        if state.is_executing:
            yield from refuse(error.problems)
            return
        log_dry_run("query the IMEX domain of the node when its driver is active")
        for problem in error.problems:
            logger.info("%s    %s", host.print_prefix, printable(problem))
        yield FunctionCommand(lambda *_: True, (), {})
        return
    node = Converge(imex_wanted(driver, domain))
    found = node.difference()
    if not (found.changes or found.problems):
        host.noop(f"IMEX runs with {len(domain)} nodes")
        return
    # pyinfra's way of one operation within another.
    yield from files._inner(node)  # noqa: SLF001
    yield from units._inner(node)  # noqa: SLF001


def imex_wanted(driver: str, domain: tuple[str, ...]) -> DesiredState:
    """Return IMEX's file and unit for the addresses of the domain's nodes."""
    text = "".join(f"{address}\n" for address in domain).encode()
    file = drop_in(
        "nvidia_driver/nvidia-driver-service.conf.j2",
        SERVICE,
        started_with={"driver": driver, "nodes": text},
    )
    return DesiredState(
        Directory(NODES.rpartition("/")[0]),
        File(NODES, text),
        file.file,
        Unit(SERVICE, fingerprint=file.fingerprint),
    )


def _documents(state: State) -> Mapping[str, dict[str, Any] | str]:
    """
    Return the probe of every node.

    Nodes are probed once in the prepare phase and once in execution.
    """
    key = ("every node's probe", state.is_executing)
    return once(state, key, lambda: probe_all(state, state.inventory))
