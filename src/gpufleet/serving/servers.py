"""The vLLM servers of a fleet, of plans and of what runs.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpufleet.planning.stage import Running, Stage


@dataclass(frozen=True, order=True)
class Server:
    """A vLLM server that completes prompts: part of a stage."""

    node: str
    stage: str
    """The replica's id, as in its unit's name: `tiny-0`."""
    number: int
    """From 1; 0: the only one of its stage on the node."""
    model: str
    """Its entry in `serving`."""
    port: int


def planned(stages: Iterable[Stage]) -> tuple[Server, ...]:
    """Return the servers of a plan's stages."""
    return _servers((each.node, each.id, each.model, each.servers) for each in stages)


def running(found: Iterable[Running]) -> tuple[Server, ...]:
    """Return the servers of stages that have units on nodes."""
    return _servers((each.node, each.id, each.model, each.servers) for each in found)


def _servers(found: Iterable[tuple[str, str, str, tuple[int, ...]]]) -> tuple[Server, ...]:
    return tuple(
        sorted(
            Server(node, stage, number if len(ports) > 1 else 0, model, port)
            for node, stage, model, ports in found
            for number, port in enumerate(ports, start=1)
        )
    )
