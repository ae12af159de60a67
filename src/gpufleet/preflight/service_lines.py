"""Report whether declared services answer, and which clients they answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpufleet.formatting import count_of, join_names
from gpufleet.preflight.line import Line, Status, Verdict, by_node, reason, unknown
from gpufleet.remote.query import Answer
from gpufleet.serving.rank_status import Health
from gpufleet.serving.status import FleetStatus, declared_adapters
from gpufleet.settings.base import LOOPBACK
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars

Guard = Literal["key", "password", "network"]
"""
How the access to a service is controlled: by a client's key, by a password, or only by the network.
"""
REFUSED = frozenset({401, 403})


@dataclass(frozen=True)
class Service:
    """A service that a node declares."""

    key: str
    """The setting that declares the service, for example `gateway.port`."""
    url: str
    """The URL of the service on its own node. gpufleet requests it without a key or password."""
    listen: str
    guard: Guard
    open_by_choice: bool = False
    """Whether the settings allow all clients to use the service."""

    @property
    def is_public(self) -> bool:
        """Return whether other machines can connect to the service."""
        return self.listen not in LOOPBACK


def services(settings: NodeSettings) -> tuple[Service, ...]:
    """Return the services that a node declares, without vLLM's own servers."""
    return tuple(_services(settings))


def _services(settings: NodeSettings) -> Iterator[Service]:
    of = settings.exporters
    exporter = str(of.listen or "0.0.0.0")  # noqa: S104
    scheme = "https" if of.tls else "http"
    guard: Guard = "password" if of.basic_auth else "network"

    def metrics(key: str, port: int) -> Service:
        return Service(key, f"{scheme}://{host_of(exporter)}:{port}/metrics", exporter, guard)

    if settings.gpu_node or settings.monitoring or settings.gateway:
        yield metrics("node_exporter.port", settings.node_exporter.port)
    # A group's settings also apply to its nodes without GPUs, but these nodes have no DCGM.
    if settings.gpu_node and settings.dcgm and settings.dcgm.exporter_version:
        yield metrics("dcgm.port", settings.dcgm.port)
    if (watch := settings.monitoring) is not None:
        for key, server in (("prometheus", watch.prometheus), ("alertmanager", watch.alertmanager)):
            if server is not None:
                url = f"http://{host_of(server.listen)}:{server.port}/-/ready"
                yield Service(f"monitoring.{key}.port", url, server.listen, "network")
    for key, front in (("gateway.port", settings.gateway), ("litellm.port", settings.litellm)):
        if front is not None:
            at = f"{'https' if front.tls else 'http'}://{host_of(front.listen)}:{front.port}"
            yield Service(key, f"{at}/v1/models", front.listen, "key", front.allow_unauthenticated)
    if settings.gateway:
        url = f"http://{host_of(exporter)}:{settings.gateway.metrics_port}/metrics"
        yield Service("gateway.metrics_port", url, exporter, "network")


def host_of(listen: str) -> str:
    """
    Return the host part of the URL under which a node reaches its own service, from the address
    that the service binds.

    >>> host_of("0.0.0.0"), host_of("::"), host_of("10.0.0.7")
    ('127.0.0.1', '[::1]', '10.0.0.7')
    """
    if listen in {"", "0.0.0.0"}:  # noqa: S104
        return "127.0.0.1"
    if listen == "::":
        return "[::1]"
    return f"[{listen}]" if ":" in listen else listen


def service_lines(
    looks: Mapping[str, Answer], settings: Mapping[str, NodeSettings], inventory: str
) -> tuple[Line, ...]:
    """
    Return lines on the services of each node: whether they answer, and how they are protected.
    """
    see = f"gpufleet drift {inventory}"
    found = {}
    for node, here in settings.items():
        look = looks.get(node, "the node was not queried")
        if isinstance(look, str):
            found[node] = Verdict(Status.UNKNOWN, "could not be checked", look, see)
        else:
            found[node] = _services_of(services(here), look, see)
    return by_node("services", found)


def _services_of(declared: tuple[Service, ...], look: Mapping[str, Any], see: str) -> Verdict:
    # If the node has no program `nft`, it has no firewall rules.
    fence = look["firewall"]
    fenced = fence is True
    unread = isinstance(fence, Mapping) and fence.get("missing") != "no_program"
    dead: list[str] = []
    ajar: list[str] = []
    wide: list[str] = []
    for each in declared:
        status, why = _status(look["pages"].get(each.key))
        if status is None:
            dead.append(f"{each.key}: {why}")
        elif each.guard in {"key", "password"} and status not in REFUSED:
            said = f"{each.key}: answers {status} without a {each.guard}"
            (ajar if status < 400 and not each.open_by_choice else wide).append(said)
        elif each.guard == "network" and not 200 <= status < 400:
            dead.append(f"{each.key}: answers {status}")
        elif each.guard == "network" and each.is_public and not fenced and not unread:
            wide.append(f"{each.key}: any machine that can reach the node can read it")
    if dead:
        return Verdict(Status.FAIL, "has services that do not answer", "; ".join(dead), see)
    if ajar:
        remedy = f"{see}; then run the service's deploy again"
        return Verdict(Status.FAIL, "answers requests that it must reject", "; ".join(ajar), remedy)
    if wide:
        remedy = (
            "set `firewall` in group_vars (docs/traffic/firewall.md), or set a key or "
            "password for the service"
        )
        return Verdict(
            Status.WARN, "has services without a password, key or firewall", "; ".join(wide), remedy
        )
    if unread and any(each.guard == "network" and each.is_public for each in declared):
        proof = (
            f"gpufleet could not find out whether the firewall's rules are loaded: {reason(fence)}"
        )
        return Verdict(
            Status.UNKNOWN, "could not be checked", proof, "nft list table inet gpufleet"
        )
    guards = [f"{each.key} by its {each.guard}" for each in declared if each.guard != "network"]
    if fenced:
        guards.append("the other services by the firewall" if guards else "by the firewall")
    how = join_names(guards) or "all services listen on loopback"
    proof = f"{count_of(len(declared), 'service')} answered; protected: {how}"
    return Verdict(Status.OK, "has services that answer and are protected", proof)


def _status(page: Any) -> tuple[int | None, str]:
    """Return the HTTP status of a page and "", or None and the reason why there is no status."""
    if not isinstance(page, Mapping):
        return None, "the node was not queried"
    if "missing" in page:
        return None, reason(page)
    status = page.get("status")
    return status, "" if status is not None else str(page.get("error"))


_BAD = {Health.STARTS: Status.WARN, Health.UNKNOWN: Status.UNKNOWN}


def server_lines(
    found: FleetStatus, settings: Mapping[str, NodeSettings], inventory: str
) -> Iterator[Line]:
    """
    Yield lines on the state of vLLM's servers, as in `gpufleet status`, and on their access
    control.

    A server that answers requests without its key is not counted as serving in `gpufleet status`.
    """
    see = f"gpufleet status {inventory}"
    for missing in found.missing:
        verdict = Verdict(Status.FAIL, "replicas are missing", missing, see)
        yield Line("services", "vLLM", verdict)
    for node, why in found.silent.items():
        yield Line(
            "services", f"vLLM on {node}", Verdict(Status.UNKNOWN, "could not be checked", why, see)
        )
    bad = [each for each in found.replicas if not each.health.is_good]
    for each in bad:
        status = _BAD.get(each.health, Status.FAIL)
        verdict = Verdict(status, f"does not serve: {each.health}", "; ".join(each.why), see)
        yield Line("services", each.id, verdict)
    open_nodes = sorted(_open_servers(settings.items()))
    if open_nodes:
        proof = "`vllm.allow_unauthenticated`: any client that can reach a server can use it"
        remedy = "set `vllm.api_key_file` or `firewall` (docs/traffic/firewall.md)"
        verdict = Verdict(Status.WARN, "has servers without a key or firewall", proof, remedy)
        yield from by_node("services", dict.fromkeys(open_nodes, verdict))
    good = len(found.replicas) - len(bad)
    if good and not found.missing:
        proof = f"{good} of {count_of(len(found.replicas), 'replica')} serve"
        if not open_nodes:
            proof += "; each server requires its key, is behind the firewall or listens on loopback"
        verdict = Verdict(Status.OK, "replicas serve", proof)
        yield Line("services", "vLLM", verdict)


def adapter_lines(
    found: FleetStatus, declared: Mapping[str, NodeVars], inventory: str
) -> Iterator[Line]:
    """
    Yield lines on whether the server of each replica lists exactly the declared adapters of its
    model.
    """
    see = f"gpufleet status {inventory}"
    known = declared_adapters(declared)
    wanted = {model: names for model, names in known.items() if names}
    count = 0
    for model in sorted(
        {*wanted, *(each.model for each in found.replicas if each.adapters)} & {*known}
    ):
        mine = [each for each in found.replicas if each.model == model]
        names = wanted.get(model, ())
        for each in mine:
            if each.adapters != names:
                proof = f"loads {join_names(each.adapters) or 'none'}, declared "
                verdict = Verdict(
                    Status.FAIL,
                    "loads other adapters than the declared ones",
                    proof + (join_names(names) or "none"),
                    f"gpufleet upgrade {inventory}",
                )
                yield Line("adapters", each.id, verdict)
        ill = [each.id for each in mine if not each.health.is_good]
        if ill or not mine or found.silent:
            why = "not every replica is known"
            if ill:
                why = f"{join_names(ill)}: see the line services"
            yield unknown("adapters", why, see, model)
        elif all(each.adapters == names for each in mine):
            proof = f"{count_of(len(mine), 'replica')} list exactly {join_names(names)}"
            yield Line("adapters", model, Verdict(Status.OK, "loads the declared adapters", proof))
        count += 1
    if not count:
        proof = "no entry of `serving` has `adapters`, and no server loads one"
        yield Line("adapters", "fleet", Verdict(Status.OK, "none is declared", proof))


def _open_servers(nodes: Iterable[tuple[str, NodeSettings]]) -> Iterator[str]:
    for node, here in nodes:
        servers = here.servers
        if servers is None or not here.serving or servers.api_key_file:
            continue
        if servers.listen in LOOPBACK:
            continue
        if here.firewall is None:
            yield node
