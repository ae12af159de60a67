"""
Find problems of gateways: stopped gateways, servers that get no requests, and certificates. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from gpufleet.doctor.fleet_diagnosis import Impact, Problem
from gpufleet.doctor.node_evidence import Connection
from gpufleet.doctor.observations import FleetObservations
from gpufleet.formatting import format_duration
from gpufleet.network.haproxy import GatewayState, ServerState
from gpufleet.serving.rank_status import Health, iso
from gpufleet.serving.status import FleetStatus

SOON_SECONDS = 7 * 86400.0
_DEPLOYS = {"gateway": "gateway", "exporter": "node", "litellm": "litellm"}
_UP = ("UP", "no check")
"""The states that HAProxy reports for a server that gets requests."""


def gateway_problems(observed: FleetObservations, inventory: str) -> Iterator[Problem]:
    """Yield the problems of each gateway."""
    alone = len(observed.gateways) == 1
    well = {
        (replica.id, rank.node)
        for replica in observed.status.replicas
        if replica.health is Health.SERVES
        for rank in replica.ranks
    }
    for node, state in sorted(observed.gateways.items()):
        subject = f"gateway {node}"
        if isinstance(state, str):
            yield Problem(
                subject,
                f"{subject} does not answer, so it is unknown whether the gateway sends "
                f"requests: {state}",
                Impact.RISK,
                do=f"`ssh {node}`",
                page="docs/alerts/gateway-down.md",
                names=(node,),
            )
            continue
        if not state.runs:
            log = next(iter(observed.logs.get(subject, ())), None)
            again = f"`systemctl start gpufleet-gateway` on {node}"
            look = f"`journalctl -u gpufleet-gateway -n 50` on {node} shows why the gateway ended"
            yield Problem(
                subject,
                f"{subject}: {state.error or 'HAProxy does not run'}",
                Impact.OUTAGE if alone else Impact.DEGRADED,
                (log.quote,) if log else (),
                log.cause if log else "",
                log.do if log and log.cause else f"{again}\n{look}",
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
                known = observed.evidence.get(node)
                tried = known.connections.get(each.name) if known else None
                place = state.configured.get(each.name, ("ADDRESS", 0))
                yield _unused(each, node, served, tried or place, inventory)
        for model, statuses in sorted(backends.items()):
            if not any(status.startswith(_UP) for status in statuses):
                yield Problem(
                    f"{subject}, {model}",
                    f"{subject} has no server for {model}, so clients get 503",
                    Impact.OUTAGE,
                    (f"states of the model's servers: {', '.join(sorted(set(statuses)))}",),
                    do=f"`gpufleet status {inventory}` shows {model}'s replicas",
                    page="docs/alerts/gateway-no-server.md",
                    names=(node, model),
                    because=_down_of(observed.status, model),
                )


def servers_to_connect(state: GatewayState) -> dict[str, tuple[str, int]]:
    """
    Return {name of the server: (address, port)} for the servers of a gateway that are down and not
    drained.
    """
    return {
        each.name: place
        for each in state.servers
        if not each.status.startswith(_UP)
        and not each.drained
        and (place := state.configured.get(each.name))
    }


def _unused(
    server: ServerState,
    node: str,
    served: tuple[str, ...],
    tried: Connection | tuple[str, int],
    inventory: str,
) -> Problem:
    """
    Return the problem that the gateway on `node` sends no requests to a server that serves.

    `tried` is the result of a connection attempt from the gateway to the server, or only the
    address and port if there was no attempt.
    """
    known = isinstance(tried, Connection)
    address, port = (tried.address, tried.port) if isinstance(tried, Connection) else tried
    host = f"[{address}]" if ":" in address else address
    ask = f"`curl -i http://{host}:{port}/health` on {node}"
    both = " ".join(f"--limit {name}" for name in (node, served[1]))
    if not isinstance(tried, Connection):
        cause = "the gateway cannot reach the server, or the gateway's health check of it fails"
        do = ask
    elif tried.is_lost:
        cause = f"{node} cannot reach the server, because of a firewall, route, switch or cable"
        do = (
            f"`gpufleet drift {inventory} {both}` shows differences from the declaration, "
            f"including the firewalls\n{ask}"
        )
    elif tried.is_refused:
        cause = (
            f"no program listens on this port, so the gateway of {node} has a wrong address or port"
        )
        do = f"`gpufleet deploy gateway {inventory}`"
    else:
        cause = "the gateway can connect, so its check of /health fails"
        do = (
            f"{ask}\n`journalctl -u gpufleet-gateway -n 50` on {node} shows the result of the check"
        )
    return Problem(
        f"gateway {node}, {server.name}",
        f"gateway {node} sends nothing to {server.server} ({server.status}), which serves",
        Impact.DEGRADED,
        (f"{node} to {tried}",) if known else (),
        cause,
        do,
        "docs/alerts/gateway-server-down.md",
        names=(node, server.backend, *served),
    )


def certificate_problems(observed: FleetObservations, now: float) -> Iterator[Problem]:
    """Yield a problem for each certificate on a node that has expired or will expire soon."""
    for node, evidence in sorted(observed.evidence.items()):
        for each in evidence.certificates:
            left = each.ends - now
            if left > SOON_SECONDS:
                continue
            ended = left <= 0
            yield Problem(
                f"certificate {each.path} on {node}",
                f"the {each.use}'s certificate on {node} "
                + (
                    f"expired {format_duration(-left)} ago"
                    if ended
                    else f"expires in {format_duration(left)}"
                ),
                # Clients that verify the certificate cannot connect. For an exporter, the only
                # client is Prometheus.
                Impact.OUTAGE if ended and each.use != "exporter" else Impact.RISK,
                (f"{node}: {each.path} expires at {iso(each.ends)}",),
                "clients that verify certificates reject it" if ended else "",
                f"Renew the certificate's file in your settings, then run `gpufleet deploy "
                f"{_DEPLOYS[each.use]}`"
                if each.use in _DEPLOYS
                else "Renew the certificate's file in your settings, and deploy again.",
                "docs/alerts/certificate-ends-soon.md",
                each.ends if ended else None,
                (node,),
            )


def _served(server: ServerState, well: Collection[tuple[str, str]]) -> tuple[str, ...]:
    """
    Return the serving replica behind a gateway's server, and its node. Return () if the server
    belongs to no serving replica.
    """
    for replica, node in well:
        # The name is that of `haproxy.server_name`: if a replica has several servers, a number
        # follows.
        name = f"{node}.{replica}"
        if server.server == name or server.server.startswith(f"{name}."):
            return replica, node
    return ()


def _down_of(status: FleetStatus, model: str) -> str:
    """Return the id of a replica of the model that is down, or "" if there is none."""
    down = [each for each in status.replicas if each.model == model and not each.health.is_good]
    return down[0].id if down else ""
