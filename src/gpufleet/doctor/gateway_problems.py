"""What is wrong with gateways: whether they run, and reach what serves.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from gpufleet.doctor.fleet_diagnosis import Impact, Problem
from gpufleet.doctor.sights import Sights
from gpufleet.serving.rank_status import Health
from gpufleet.serving.status import FleetStatus


def gateway_problems(sights: Sights, inventory: str) -> Iterator[Problem]:
    """Yield what is wrong with each gateway."""
    alone = len(sights.gateways) == 1
    well = {
        (replica.id, rank.node)
        for replica in sights.status.replicas
        if replica.health is Health.SERVES
        for rank in replica.ranks
    }
    for node, state in sorted(sights.gateways.items()):
        subject = f"gateway {node}"
        if state.error or not state.runs:
            yield Problem(
                subject,
                f"{subject}: {state.error or 'HAProxy does not run'}",
                Impact.OUTAGE if alone else Impact.DEGRADED,
                do=f"`journalctl -u gpufleet-gateway -n 50` on {node}",
                page="docs/alerts/gateway-down.md",
                nodes=(node,),
            )
            continue
        backends: dict[str, list[str]] = defaultdict(list)
        for each in state.servers:
            backends[each.backend].append(each.status)
            name, down = each.server, not each.status.startswith(("UP", "no check"))
            if down and not each.drained and _names(name, well):
                yield Problem(
                    f"{subject}, {each.backend}/{name}",
                    f"{subject} sends nothing to {name} ({each.status}), which serves",
                    Impact.DEGRADED,
                    cause="the gateway does not reach it: firewall, route, or another address",
                    do=f"`gpufleet reach {inventory}`",
                    page="docs/alerts/gateway-server-down.md",
                    nodes=(node,),
                )
        for model, statuses in sorted(backends.items()):
            if statuses and not any(each.startswith(("UP", "no check")) for each in statuses):
                yield Problem(
                    f"{subject}, {model}",
                    f"{subject} has no server for {model}: it answers 503",
                    Impact.OUTAGE,
                    (f"its servers: {', '.join(sorted(set(statuses)))}",),
                    page="docs/alerts/gateway-no-server.md",
                    nodes=(node,),
                    because=_down_of(sights.status, model),
                )


def _names(server: str, well: Collection[tuple[str, str]]) -> bool:
    """Return whether a gateway's server is of a replica that serves: `gpu-01.llama-0`."""
    return any(server.startswith(f"{node}.{replica}") for replica, node in well)


def _down_of(status: FleetStatus, model: str) -> str:
    """Return a replica of a model that does not serve; "": there is none."""
    down = [each for each in status.replicas if each.model == model and not each.health.good]
    return down[0].id if down else ""
