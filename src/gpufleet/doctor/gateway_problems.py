"""What is wrong with gateways: whether they run, and reach what serves.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from gpufleet.doctor.fleet_diagnosis import Impact, Problem
from gpufleet.doctor.sights import Sights
from gpufleet.network.haproxy import ServerState
from gpufleet.serving.rank_status import Health
from gpufleet.serving.status import FleetStatus

_UP = ("UP", "no check")
"""HAProxy's words for a server that gets requests."""


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
        if isinstance(state, str):
            yield Problem(
                subject,
                f"{subject} cannot be asked, so whether it sends requests is not known: {state}",
                Impact.RISK,
                do=f"`ssh {node}`",
                page="docs/alerts/gateway-down.md",
                names=(node,),
            )
            continue
        if not state.runs:
            yield Problem(
                subject,
                f"{subject}: {state.error or 'HAProxy does not run'}",
                Impact.OUTAGE if alone else Impact.DEGRADED,
                do=f"`journalctl -u gpufleet-gateway -n 50` on {node}",
                page="docs/alerts/gateway-down.md",
                names=(node,),
            )
            continue
        backends: dict[str, list[str]] = defaultdict(list)
        for each in state.servers:
            backends[each.backend].append(each.status)
            if (
                not each.status.startswith(_UP)
                and not each.drained
                and (served := _served(each, well))
            ):
                yield Problem(
                    f"{subject}, {each.backend}/{each.server}",
                    f"{subject} sends nothing to {each.server} ({each.status}), which serves",
                    Impact.DEGRADED,
                    cause="the gateway does not reach it: firewall, route, or another address",
                    do=f"`gpufleet reach {inventory}`",
                    page="docs/alerts/gateway-server-down.md",
                    names=(node, each.backend, *served),
                )
        for model, statuses in sorted(backends.items()):
            if not any(status.startswith(_UP) for status in statuses):
                yield Problem(
                    f"{subject}, {model}",
                    f"{subject} has no server for {model}: it answers 503",
                    Impact.OUTAGE,
                    (f"its servers: {', '.join(sorted(set(statuses)))}",),
                    do=f"`gpufleet status {inventory}` shows {model}'s replicas",
                    page="docs/alerts/gateway-no-server.md",
                    names=(node, model),
                    because=_down_of(sights.status, model),
                )


def _served(server: ServerState, well: Collection[tuple[str, str]]) -> tuple[str, ...]:
    """Return the replica and the node of a gateway's server; (): it is of none that serves."""
    for replica, node in well:
        # As `haproxy.server_name`: with a number where a replica has several servers.
        name = f"{node}.{replica}"
        if server.server == name or server.server.startswith(f"{name}."):
            return replica, node
    return ()


def _down_of(status: FleetStatus, model: str) -> str:
    """Return a replica of a model that does not serve; "": there is none."""
    down = [each for each in status.replicas if each.model == model and not each.health.good]
    return down[0].id if down else ""
