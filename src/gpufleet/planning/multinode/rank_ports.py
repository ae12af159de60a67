"""
Assign the ports between the nodes of each replica. Pure.

`planning/ports.py` assigns the ports for clients; this module assigns ports that clients never use.
A range is free on a node if no other range and no endpoint of the plan has one of its ports there;
`reachability.py` reports ports in use by other programs. Running replicas keep their ranges if
possible, because a change would need a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpufleet.errors import FleetError
from gpufleet.planning.multinode.launch import NIXL_PORT, endpoint_ports, has_handover
from gpufleet.planning.stage import Running, Stage
from gpufleet.settings.serving_settings import Served

PORTS = 16
"""
Number of ports of a multi-node replica.

The first are the ports of vllm-rank, the others those of incarnations (on_node/rank/head.py).
"""
EPHEMERAL = 32768
"""Start of Linux's net.ipv4.ip_local_port_range; any program may get a port of this range."""


@dataclass(frozen=True)
class Ports:
    """A replica's internal ports, the same on all of its nodes."""

    cluster: int = 0
    """The first of `PORTS` ports; 0 for a replica on one node."""
    side_channel: int = 0
    """NIXL's first port, one per engine of the whole replica; 0 if no KV cache is transferred."""


def assign_rank_ports(
    stages: Iterable[Stage],
    settings: Mapping[str, Served],
    *,
    running: Mapping[str, Ports] | None = None,
) -> dict[str, Ports]:
    """
    Return the ports of every replica by its id (`llama-0`). Running replicas are assigned first,
    then the others in the order of `stages`. `settings` has the declaration of each model,
    `running` the ports of running replicas. A replica gets `cluster_port` of its model or the next
    range that is free on all its nodes, and NIXL's own port or the next such range.

    Raises `FleetError` with every replica without a free range.
    """
    replicas: dict[str, list[Stage]] = {}
    taken: dict[str, set[int]] = {}
    for stage in stages:
        replicas.setdefault(stage.id, []).append(stage)
        served = taken.setdefault(stage.node, set())
        if len(stage.nodes) > 1:
            served.update(endpoint_ports(stage, settings[stage.model]))
        else:
            served.add(stage.port)
    cluster = _assign_ranges(
        {
            name: _PortRequest(
                name=f"serving.{each[0].model}.cluster_port",
                first=settings[each[0].model].cluster_port,
                size=PORTS,
                nodes=each[0].nodes,
                runs=_ports_of(running, name).cluster,
            )
            for name, each in replicas.items()
            if len(each[0].nodes) > 1
        },
        taken,
    )
    side_channel = _assign_ranges(
        {
            name: _PortRequest(
                name=f"serving.{each[0].model}: the side channel of NIXL",
                first=NIXL_PORT,
                size=each[0].data_parallel,
                nodes=each[0].nodes or (each[0].node,),
                runs=_ports_of(running, name).side_channel,
            )
            for name, each in replicas.items()
            if has_handover(each[0], settings[each[0].model])
        },
        taken,
    )
    return {name: Ports(cluster.get(name, 0), side_channel.get(name, 0)) for name in replicas}


def running_ports(running: Iterable[Running]) -> dict[str, Ports]:
    """Return the ports of running replicas by id, from their units."""
    ports: dict[str, Ports] = {}
    for each in running:
        known = ports.get(each.id, Ports())
        ports[each.id] = Ports(
            known.cluster or each.cluster_port, known.side_channel or each.side_channel
        )
    return ports


@dataclass(frozen=True)
class _PortRequest:
    """A request of a replica for a range of ports."""

    name: str
    first: int
    size: int
    nodes: tuple[str, ...]
    runs: int

    @property
    def end(self) -> int:
        """
        Return the end of the allowed ports.

        A range that begins below the ephemeral ports must end below them.
        """
        return EPHEMERAL if self.first < EPHEMERAL else 1 << 16

    def choices(self) -> Iterator[int]:
        """Yield the possible first ports, best first."""
        every = range(self.first, self.end - self.size + 1, self.size)
        if self.runs in every:
            yield self.runs
        yield from every


def _ports_of(running: Mapping[str, Ports] | None, name: str) -> Ports:
    return (running or {}).get(name, Ports())


def _assign_ranges(
    wishes: Mapping[str, _PortRequest], taken: dict[str, set[int]]
) -> dict[str, int]:
    """Assign each request a range of ports, running ones first, and add it to `taken`."""
    given: dict[str, int] = {}
    problems = []
    for name in sorted(wishes, key=lambda name: not wishes[name].runs):
        wish = wishes[name]
        port = next((each for each in wish.choices() if _is_free(each, wish, taken)), None)
        if port is None:
            problems.append(
                f"{wish.name}: there are no {wish.size} consecutive free ports from {wish.first} "
                f"to {wish.end - 1} on {' and '.join(wish.nodes)}: stop programs that use the ports"
                + ("" if wish.size != PORTS else ", or write a lower port")
            )
            continue
        given[name] = port
        for node in wish.nodes:
            taken.setdefault(node, set()).update(range(port, port + wish.size))
    if problems:
        raise FleetError(*problems)
    return given


def _is_free(port: int, wish: _PortRequest, taken: Mapping[str, Collection[int]]) -> bool:
    wanted = range(port, port + wish.size)
    return all(at not in taken.get(node, ()) for node in wish.nodes for at in wanted)
