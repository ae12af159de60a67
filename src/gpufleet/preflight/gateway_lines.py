"""
Report on the gateway's access control: clients' keys, requests without a key, and limits. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpufleet.formatting import count_of, join_names
from gpufleet.preflight.line import Line, Status, Verdict, unknown
from gpufleet.settings.base import LOOPBACK
from gpufleet.settings.gateway_settings import Gateway
from gpufleet.settings.node_settings import NodeSettings

UNAUTHORIZED = 401


@dataclass(frozen=True)
class GatewayAnswer:
    """A gateway's answer to `GET /v1/models` from this machine."""

    status: int | None
    """The HTTP status, or None if there was no answer."""
    why: str = ""
    """The reason if there was no answer."""
    models: tuple[str, ...] = ()
    """The models that an answer with status 200 lists."""


def no_gateway(check: str, settings: Mapping[str, NodeSettings]) -> Line | None:
    """Return the line for a fleet without a gateway, or None if the fleet has a gateway."""
    if any(each.gateway for each in settings.values()):
        return None
    if any(each.balancer for each in settings.values()):
        why = "requests reach vLLM through your own load balancer, which gpufleet does not query"
        return unknown(
            check, why, "send a request through the load balancer: curl -i https://HOST/v1/models"
        )
    proof = "no node has `gateway`, and there is no `balancer`: clients use vLLM's own ports"
    remedy = "`gateway` in group_vars (docs/traffic/gateway.md)"
    return Line(check, "fleet", Verdict(Status.WARN, "there is no gateway", proof, remedy))


def refusal_lines(
    answers: Mapping[str, GatewayAnswer], settings: Mapping[str, NodeSettings]
) -> Iterator[Line]:
    """
    Yield a line for each gateway: whether it refuses a request without a key. `answers` are by
    node.
    """
    if (line := no_gateway("refusal", settings)) is not None:
        yield line
        return
    for node, answer in answers.items():
        gateway = settings[node].gateway
        if gateway is not None:
            yield Line("refusal", node, _refusal(node, answer, gateway))


def _refusal(node: str, answer: GatewayAnswer, gateway: Gateway) -> Verdict:
    asked = f"GET /v1/models without a key, from this machine: {answer.status}"
    if answer.status is None:
        return _unreached(node, answer, gateway)
    if gateway.allow_unauthenticated:
        remedy = "set `gateway.clients`, and remove `allow_unauthenticated`"
        return Verdict(Status.WARN, "accepts requests without a key, as declared", asked, remedy)
    if answer.status == UNAUTHORIZED:
        return Verdict(Status.OK, "refuses a request without a key", asked)
    remedy = "run gpufleet deploy gateway, and check which program listens on the gateway's port"
    return Verdict(Status.FAIL, "does not refuse a request without a key", asked, remedy)


def _unreached(node: str, answer: GatewayAnswer, gateway: Gateway) -> Verdict:
    """
    Return the verdict on a gateway from which this machine gets no answer. Clients may still reach
    it.
    """
    remedy = (
        f"run gpufleet preflight from the users' network; on {node}: curl -i "
        f"http://127.0.0.1:{gateway.port}/v1/models"
    )
    proof = f"this machine gets no answer from the gateway: {answer.why}"
    return Verdict(Status.UNKNOWN, "could not be checked", proof, remedy)


def key_lines(
    answers: Mapping[str, GatewayAnswer] | None,
    key: str | None,
    settings: Mapping[str, NodeSettings],
    inventory: str,
) -> Iterator[Line]:
    """
    Yield a line for each gateway: whether it accepts a client's key, and which models the client
    may use.

    `answers` are the answers to a request with the key, by node. None if no key was given.
    """
    if (line := no_gateway("key", settings)) is not None:
        yield line
        return
    if answers is None or key is None:
        why = "the settings contain only the hashes of clients' keys"
        yield unknown("key", why, f"gpufleet preflight {inventory} --key-file FILE")
        return
    for node, answer in answers.items():
        gateway = settings[node].gateway
        if gateway is not None:
            yield Line("key", node, _key(node, answer, key, gateway))


def _key(node: str, answer: GatewayAnswer, key: str, gateway: Gateway) -> Verdict:
    if answer.status is None:
        return _unreached(node, answer, gateway)
    digest = hashlib.sha256(key.encode()).hexdigest()
    client = next((each.name for each in gateway.clients if each.key_sha256 == digest), None)
    who = f"client {client}" if client else "a key that belongs to no entry of `gateway.clients`"
    asked = f"GET /v1/models as {who}: {answer.status}"
    if answer.status == 200:
        models = join_names(answer.models) or "no model"
        status = Status.OK if answer.models else Status.WARN
        remedy = (
            ""
            if answer.models
            else "correct `models` of the client, then run `gpufleet deploy gateway`"
        )
        return Verdict(status, "accepts the key", f"{asked}, lists {models}", remedy)
    remedy = (
        "use a `--key-file` with the key of an entry of `gateway.clients`, or run `gpufleet "
        "deploy gateway`"
    )
    return Verdict(Status.FAIL, "does not accept the key", asked, remedy)


def limit_lines(settings: Mapping[str, NodeSettings]) -> Iterator[Line]:
    """
    Yield a line for each gateway on its declared limits: requests per client and requests per
    server.
    """
    if (line := no_gateway("limits", settings)) is not None:
        yield line
        return
    for node, here in settings.items():
        if here.gateway is not None:
            is_open = here.firewall is None and here.gateway.listen not in LOOPBACK
            yield Line("limits", node, _limits(here.gateway, is_open=is_open))


def _limits(gateway: Gateway, *, is_open: bool) -> Verdict:
    """
    Return the verdict on the limits of a gateway. `is_open` is True if other machines can reach its
    port.
    """
    free = [each.name for each in gateway.clients if each.requests_per_minute is None]
    said = []
    if free:
        said.append(f"clients without `requests_per_minute`: {join_names(free)}")
    if gateway.per_server is None:
        said.append("no `per_server`: the servers' queues have no limit")
    rest = (
        f"at most {gateway.source_connections} connections per source address, "
        f"{gateway.max_body_mib} MiB per request, {gateway.queue_seconds} s in the queue"
    )
    if gateway.allow_unauthenticated and gateway.per_server is None and is_open:
        proof = f"no key, no firewall, no `per_server`; {rest}"
        remedy = (
            "set `gateway.clients` instead of `allow_unauthenticated`, or set `firewall`; also "
            "set `per_server`"
        )
        return Verdict(Status.FAIL, "allows any machine to fill the servers' queues", proof, remedy)
    if said:
        remedy = "set `gateway.clients[].requests_per_minute` and `gateway.per_server`"
        return Verdict(Status.WARN, "has clients or servers without a limit",
                       f"{'; '.join(said)}; {rest}", remedy)  # fmt: skip
    clients = count_of(len(gateway.clients), "client")
    proof = (
        f"{clients}, each with a limit of requests per minute; {gateway.per_server} requests per "
        f"server; {rest}"
    )
    return Verdict(Status.OK, "limits its clients and servers", proof)
