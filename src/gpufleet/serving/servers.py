"""List the planned and running vLLM servers of a fleet. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpufleet.planning.stage import Running, Stage


@dataclass(frozen=True, order=True)
class Server:
    """A vLLM server of a stage."""

    node: str
    stage: str
    """The replica's id, as in its unit's name, such as `tiny-0`."""
    number: int
    """The server's number, from 1; 0 if the stage has only this server on the node."""
    model: str
    """The server's entry in `serving`."""
    port: int
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that the server loads."""


def planned_servers(stages: Iterable[Stage]) -> tuple[Server, ...]:
    """Return the servers of a plan's stages."""
    return _servers((each, each.servers) for each in stages)


def running_servers(found: Iterable[Running]) -> tuple[Server, ...]:
    """Return the servers of stages that have units on nodes."""
    return _servers((each, each.servers) for each in found)


def planned_and_running(planned: Iterable[Server], running: Iterable[Server]) -> tuple[Server, ...]:
    """
    Return the servers of a plan, and the servers that run until the plan is applied.

    A planned server that already runs has only the adapters that it has in both states.
    """
    runs = {_identity(each): each for each in running}
    found = [
        replace(each, adapters=tuple(sorted({*each.adapters} & {*before.adapters})))
        if (before := runs.pop(_identity(each), None))
        else each
        for each in planned
    ]
    return (*found, *runs.values())


def _identity(server: Server) -> tuple[str, str, int, str]:
    return server.node, server.stage, server.number, server.model


def _servers(found: Iterable[tuple[Stage | Running, tuple[int, ...]]]) -> tuple[Server, ...]:
    return tuple(
        sorted(
            Server(
                stage.node,
                stage.id,
                number if len(ports) > 1 else 0,
                stage.model,
                port,
                stage.adapters,
            )
            for stage, ports in found
            for number, port in enumerate(ports, start=1)
        )
    )
