"""Find the replicas of a model that a gateway sends requests to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpufleet.network import haproxy
from gpufleet.planning.stage import Running
from gpufleet.serving import servers


@dataclass(frozen=True)
class Rotation:
    """The use of a model's replicas by a gateway at one moment."""

    serving: frozenset[str]
    """Replicas that get requests."""
    out: Mapping[str, str]
    """Replicas without requests, with the reasons."""
    remarks: tuple[str, ...]
    """
    Sentences on replicas of which only some servers get requests, and on marked replicas in use.
    """
    unknown: tuple[str, ...] = ()
    """Servers that get requests, but run on no node that answered."""

    def lines(self) -> tuple[str, ...]:
        """Return the replicas without requests and the reasons, as sentences."""
        return tuple(
            f"{replica} got no requests: {why}" for replica, why in sorted(self.out.items())
        )


def model_rotation(
    model: str,
    gateway: str,
    state: haproxy.GatewayState,
    running: Iterable[Running],
    marked: Mapping[str, str],
) -> Rotation:
    """
    Return the rotation of a model's replicas at a gateway.

    HAProxy's answer decides, and not the marks on nodes. `marked` has the replicas that should get
    no requests, with the reasons that explain HAProxy's answer.
    """
    running = tuple(running)
    states = {each.name: each for each in state.servers}
    found: dict[str, list[str]] = {}
    for each in servers.running_servers(running):
        if each.model == model:
            seen = states.get(haproxy.server_name(each))
            found.setdefault(each.stage, []).append(_why_out(seen))
    serving = {replica for replica, whys in found.items() if "" in whys}
    remarks = [
        f"{gateway}: {whys.count('')} of {len(whys)} servers of {replica} get requests"
        for replica, whys in sorted(found.items())
        if replica in serving and any(whys)
    ]
    remarks += [
        f"{gateway} still sends requests to {replica}: {why}"
        for replica, why in sorted(marked.items())
        if replica in serving
    ]
    out = {
        replica: marked.get(replica) or f"{gateway} {whys[0]}"
        for replica, whys in found.items()
        if replica not in serving
    }
    known = {haproxy.server_name(each) for each in servers.running_servers(running)}
    unknown = (
        name
        for name, each in sorted(states.items())
        if each.backend == model and name not in known and not _why_out(each)
    )
    return Rotation(frozenset(serving), out, tuple(remarks), tuple(unknown))


def _why_out(state: haproxy.ServerState | None) -> str:
    """Return why a server gets no requests; "": it gets requests."""
    if state is None:
        return "does not have this server: run the gateway's deploy"
    if state.drained:
        return "has drained this server"
    # "UP 1/3" goes down, "DOWN 1/2" comes up, "no check" is taken as up.
    return (
        ""
        if state.status.startswith(("UP", "no check"))
        else f"reports this server as {state.status}"
    )
