"""IMEX, by which nodes of one NVL72 rack map each other's GPU memory; nowhere else."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from gevent.event import AsyncResult
from pyinfra import host, logger
from pyinfra.api import FunctionCommand, State, StringCommand, deploy, operation
from pyinfra.context import ctx_state

from gpufleet.converge.desired import Directory, File, Unit, UnitGone, Wanted
from gpufleet.errors import FleetError
from gpufleet.gpu_software.provisioning import Bare
from gpufleet.node.imex_domain import addresses
from gpufleet.operations.converge import Converge, files, refuse
from gpufleet.operations.converge import units as units_operation
from gpufleet.remote.query import survey
from gpufleet.sanitize import printable
from gpufleet.serving import unit

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

SERVICE = "nvidia-imex.service"
NODES = "/etc/nvidia-imex/nodes_config.cfg"


@deploy("IMEX")
def nvidia_imex(node: Bare) -> None:
    """
    Converge IMEX, after the driver is in force: before, nobody knows which nodes share a fabric.

    Its package comes with the driver's, of its version. The module option that makes its channel
    (NVreg_CreateImexChannel0) is the driver's.
    """
    lock = node.settings.gpu_lock
    if lock is None:
        raise ValueError(f"{node.name} has no gpu_lock")
    if not node.machine.imex:
        Converge(Wanted(UnitGone(SERVICE))).units(name="no service")
        return
    joined(lock.driver, name="domain and service")


@operation()
def joined(driver: str) -> Commands:
    """Name the nodes of the domain in IMEX's file, and run it with that."""
    state: State = ctx_state.get()
    try:
        domain = addresses(_documents(state), host.name)
    except FleetError as error:
        if state.is_executing:
            yield from refuse(error.problems)
            return
        logger.info("%swould ask for its domain: the driver is not in force", host.print_prefix)
        for problem in error.problems:
            logger.info("%s    %s", host.print_prefix, printable(problem))
        yield FunctionCommand(lambda *_: True, (), {})
        return
    node = Converge(wanted(driver, domain))
    found = node.difference()
    if not (found.changes or found.problems):
        host.noop(f"IMEX runs with {len(domain)} nodes")
        return
    # pyinfra's way of one operation within another.
    yield from files._inner(node)  # noqa: SLF001
    yield from units_operation._inner(node)  # noqa: SLF001


def wanted(driver: str, domain: tuple[str, ...]) -> Wanted:
    """Return IMEX's file and unit for the addresses of its domain."""
    text = "".join(f"{address}\n" for address in domain).encode()
    file = unit.drop_in(
        "nvidia-driver-service.conf.j2", SERVICE, started_with={"driver": driver, "nodes": text}
    )
    return Wanted(
        Directory(NODES.rpartition("/")[0]),
        File(NODES, text),
        file.file,
        Unit(SERVICE, fingerprint=file.fingerprint),
    )


_asked: dict[tuple[int, bool], AsyncResult] = {}


def _documents(state: State) -> Mapping[str, dict[str, Any] | str]:
    """Return every node's probe, asked once while preparing and once while executing."""
    key = (id(state), state.is_executing)
    if key not in _asked:
        # No yield between looking and storing: under gevent this is atomic.
        _asked[key] = AsyncResult()
        _asked[key].set(survey(state, state.inventory))
    found: Mapping[str, dict[str, Any] | str] = _asked[key].get()
    return found
