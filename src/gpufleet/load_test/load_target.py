"""Choose the target of a load test: one replica's own server, or a model behind a gateway. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpufleet.errors import FleetError
from gpufleet.formatting import join_names, suggestion
from gpufleet.load_test.outcomes import Contract
from gpufleet.planning.kind_flags import objective_problems
from gpufleet.planning.stage import Running
from gpufleet.serving import servers
from gpufleet.settings.base import LOOPBACK
from gpufleet.settings.monitoring_settings import Objectives
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import ModelKind, Served
from gpufleet.sizing.model_kinds import POOLS


@dataclass(frozen=True)
class Target:
    """The address for requests, and the replicas that answer them."""

    name: str
    """`replica tiny-0`, or `gateway` with the node's name."""
    url: str
    """Scheme, host and port."""
    model: str
    """The name of the model's entry in `serving`."""
    served_name: str
    """The model's name in requests."""
    replicas: tuple[str, ...]
    """The replicas that may receive the requests."""
    replicas_of: int
    """
    The planned number of the model's replicas.

    It exceeds the number of `replicas` while some are drained.
    """
    key_file: str | None = None
    """The file on this machine with the API key of the server or gateway."""
    ca_file: str | None = None
    """
    The file on this machine with certificate authorities. None: the system's authorities are used.
    """
    nodes: tuple[str, ...] = ()
    """The nodes of the replicas."""
    unknown: tuple[str, ...] = ()
    """Servers that receive requests from the gateway, but whose node did not answer."""
    session_header: str = ""
    """The header by which the gateway sends a conversation to one replica; "" without affinity."""
    per_server: int | None = None
    """
    The gateway's maximum number of concurrent requests per server, or None.

    Further requests wait in the gateway.
    """


@dataclass(frozen=True)
class TargetDeclaration:
    """The settings and the running replicas from which a target is chosen."""

    addresses: Mapping[str, str]
    """The address of every node in the inventory, to which the load test connects."""
    settings: Mapping[str, NodeSettings]
    """Settings of the GPU nodes."""
    gateways: Mapping[str, NodeSettings]
    """Settings of the nodes with a gateway."""
    running: Sequence[Running]
    out: Mapping[str, str]
    """Replicas that receive no requests, with the reason."""


def choose_model(declared: TargetDeclaration, wanted: str | None) -> str:
    """Return the entry of `serving` to measure. It is `wanted`, or else the only entry."""
    known = sorted({name for each in declared.settings.values() for name in each.serving})
    if wanted is None:
        if len(known) == 1:
            return known[0]
        raise FleetError(
            f"the inventory serves {join_names(known)}: write the name of the model to measure"
            if known
            else "the inventory serves no model, because `serving` is empty"
        )
    if wanted not in known:
        raise FleetError(f"`serving` has no {wanted!r}{suggestion(wanted, known)}")
    return wanted


def kind_of(model: str, declared: TargetDeclaration) -> ModelKind:
    """Return the kind of a model's requests."""
    kinds = (each.kind for each in declared.running if each.model == model)
    return next(kinds, "generate")


def contract_of(model: str, declared: TargetDeclaration, share: float) -> Contract:
    """
    Return a model's objectives as a contract.

    Raises `FleetError` if no objective is a latency, or if an objective does not apply to the
    model's kind.
    """
    objectives = served_as(model, declared).objectives
    kind = kind_of(model, declared)
    if problems := objective_problems(model, kind, objectives):
        raise FleetError(*problems)
    whole = kind in POOLS or kind == "transcribe"
    if kind == "transcribe" and (objectives.ttft_p99_seconds or objectives.itl_p99_seconds):
        raise FleetError(
            f"serving.{model}.objectives: load tests request whole transcripts, whose tokens "
            "have no times of their own: set only `e2e_p99_seconds`"
        )
    found = contract_from(objectives, share)
    if found.ttft_seconds is None and found.itl_seconds is None and found.e2e_seconds is None:
        text = "" if whole else "`ttft_p99_seconds`, `itl_p99_seconds` or "
        raise FleetError(
            f"serving.{model}.objectives has no latency, so a load test could not find a load "
            f"that is too high: set {text}`e2e_p99_seconds`, which is the time to the whole "
            "answer"
        )
    return found


def contract_from(objectives: Objectives, share: float) -> Contract:
    """Return objectives as a contract for a share of requests."""
    return Contract(
        objectives.ttft_p99_seconds,
        objectives.itl_p99_seconds,
        objectives.e2e_p99_seconds,
        share,
    )


def served_as(model: str, declared: TargetDeclaration) -> Served:
    """Return a model's settings, from the first node that declares it."""
    return next(each.serving[model] for each in declared.settings.values() if model in each.serving)


def with_drained(declared: TargetDeclaration, replica: str | None) -> TargetDeclaration:
    """
    Return the declaration changed so that one replica receives requests even if it is drained.

    A load test then has this replica for itself. A load test beside users (`--guest`) must not use
    this function, because a drain applies to such a test as well.
    """
    out = {name: why for name, why in declared.out.items() if name != replica}
    return replace(declared, out=out)


def replica_target(
    model: str, wanted: str | None, declared: TargetDeclaration, place: str | None = None
) -> Target:
    """
    Return one replica's own server as the target.

    The replica is `wanted`, or else the first replica of the model that receives requests. `place`
    is the node on which the load clients run, by default this machine.
    """
    ready = _ready(model, declared)
    names = list(dict.fromkeys(each.stage for each in ready))
    if wanted is not None and wanted not in names:
        why = declared.out.get(wanted)
        raise FleetError(
            f"{wanted} receives no requests: {why}"
            if why
            else f"{model} has no replica {wanted!r} that serves{suggestion(wanted, names)}"
        )
    server = next(each for each in ready if wanted in (None, each.stage))
    servers = declared.settings[server.node].servers
    alone = servers is None or servers.listen in LOOPBACK
    if servers is None or (alone and place != server.node):
        raise FleetError(
            f"{server.node}: the servers listen only on their own node (`vllm.listen`), but the "
            f"load would come from {place or 'this machine'}. Measure the model behind its "
            f"gateway, or use --from {server.node}"
        )
    address = servers.listen if alone else declared.addresses[server.node]
    return Target(
        f"replica {server.stage}",
        f"http://{_host(address)}:{server.port}",
        model,
        served_name(model, declared),
        (server.stage,),
        1,
        key_file=servers.api_key_file,
        nodes=tuple(sorted({e.node for e in declared.running if e.id == server.stage})),
    )


def choose_gateway(node: str | None, declared: TargetDeclaration) -> str:
    """Return the name of a gateway's node. It is `node`, or else the only node with a gateway."""
    known = sorted(declared.gateways)
    if node is None and len(known) > 1:
        raise FleetError(
            f"the inventory has gateways on {join_names(known)}: choose one with `--gateway NODE`"
        )
    if not known or (node is not None and node not in known):
        raise FleetError(
            f"no gateway is declared on {node}{suggestion(str(node), known)}"
            if known
            else "the inventory declares no gateway: measure a replica with `--replica`"
        )
    return node or known[0]


def gateway_target(
    model: str,
    chosen: str,
    key_file: str | None,
    certificate: str | None,
    declared: TargetDeclaration,
    *,
    place: str | None = None,
) -> Target:
    """
    Return the target of a model behind the gateway on the node `chosen`.

    The replicas in `declared.out` receive no requests. `place` is the node on which the load
    clients run, by default this machine.
    """
    gateway = declared.gateways[chosen].gateway
    assert gateway is not None  # noqa: S101  # `gateways` has no others
    alone = gateway.listen in LOOPBACK
    if alone and place != chosen:
        raise FleetError(
            f"{chosen}: the gateway listens only on its own node (`gateway.listen`), but the "
            f"load would come from {place or 'this machine'}: measure with --from {chosen}"
        )
    if gateway.clients and key_file is None:
        raise FleetError(
            "the gateway requires a client's key, but the settings contain only the hash of the "
            "key: write the file with the key as `--key-file FILE`"
        )
    ready = _ready(model, declared)
    shared = gateway.virtual_address
    address = shared.address.partition("/")[0] if shared else declared.addresses[chosen]
    if alone:
        address = gateway.listen
    declared_certificate = gateway.tls.certificate_file if gateway.tls else None
    return Target(
        f"gateway {chosen}",
        f"{'https' if gateway.tls else 'http'}://{_host(address)}:{gateway.port}",
        model,
        served_name(model, declared),
        tuple(dict.fromkeys(each.stage for each in ready)),
        _count_planned(model, declared),
        key_file=key_file,
        ca_file=certificate
        or (declared_certificate and declared_certificate.replace("{node}", chosen)),
        nodes=tuple(sorted({each.node for each in declared.running if each.model == model})),
        session_header=gateway.affinity.header if gateway.affinity.by == "session" else "",
        per_server=gateway.model_limits(model).per_server,
    )


def _count_planned(model: str, declared: TargetDeclaration) -> int:
    """
    Return the planned number of replicas.

    It is the declared number, or the number of replicas with a unit on a node if this number is
    larger.
    """
    wanted = served_as(model, declared).replicas
    found = {each.id for each in declared.running if each.model == model}
    return max(len(found), 0 if wanted == "fit" else wanted)


def affinity_remarks(chosen: str, declared: TargetDeclaration) -> tuple[str, ...]:
    """Return remarks on a gateway that would send all load of one client to one replica."""
    gateway = declared.gateways[chosen].gateway
    if gateway is None or gateway.affinity.by != "client":
        return ()
    return (
        f"{chosen} sends a client's requests to one replica until the replica has "
        f"{gateway.affinity.most_percent} % of the mean load (`gateway.affinity`). The load test "
        "is a single client. The requests of many clients may be spread better, so the rate with "
        "many clients may be higher",
    )


def place_remarks(place: str, target: Target, declared: TargetDeclaration) -> tuple[str, ...]:
    """Return remarks on a load test whose clients run on the node `place` of the fleet."""
    here = sorted({each.id for each in declared.running if each.node == place})
    measured = [each for each in here if each in target.replicas]
    others = [each for each in here if each not in target.replicas]
    remarks = []
    if measured:
        remarks.append(
            f"the load came from {place}, which runs {join_names(measured)}: the load clients "
            "use processor time that the measured servers then lack"
        )
    if target.name == f"gateway {place}":
        remarks.append(
            f"the load came from {place}, the gateway's own node: the load clients use processor "
            "time that the gateway then lacks, and their requests do not cross a network"
        )
    if others:
        remarks.append(
            f"the load came from {place}, which also runs {join_names(others)}: the load clients "
            "use processor time that these replicas then lack"
        )
    return tuple(remarks)


def key_problem(target: Target, key: str, rate: float, declared: TargetDeclaration) -> str:
    """
    Return why the gateway would refuse requests with this key, or "" if it accepts them.

    The function checks the key, the model and the rate. Refused requests would count as requests
    that did not meet the contract.
    """
    found = declared.gateways.get(target.name.removeprefix("gateway "))
    if not target.name.startswith("gateway ") or found is None or found.gateway is None:
        return ""
    digest = hashlib.sha256(key.encode()).hexdigest()
    clients = found.gateway.clients
    client = next((each for each in clients if each.key_sha256 == digest), None)
    if not clients:
        return ""
    if client is None:
        return (
            f"{target.key_file}: no client of the gateway has this key: write the file with the "
            "key of one of `gateway.clients`"
        )
    if client.models and target.model not in client.models:
        return (
            f"client {client.name} may not use {target.model}: add the model to the client's "
            "`models` in `gateway.clients`, or remove `models`"
        )
    limit = client.requests_per_minute
    if limit is not None and rate * 60 > limit:
        return (
            f"client {client.name} may send {limit} requests a minute, but the load test would "
            f"send up to {rate:.3g} a second: use a client without `requests_per_minute`, or "
            f"--most {limit / 60:.3g}, which --closed-loop does not accept"
        )
    return ""


def served_name(model: str, declared: TargetDeclaration) -> str:
    """Return a model's name in requests."""
    return served_as(model, declared).served_name or model


def _ready(model: str, declared: TargetDeclaration) -> list[servers.Server]:
    """
    Return a model's servers that receive requests, sorted by replica.

    Raises `FleetError` if there are none.
    """
    every = [each for each in servers.running_servers(declared.running) if each.model == model]
    found = [each for each in every if each.stage not in declared.out]
    if not found:
        why = join_names([f"{name}: {said}" for name, said in sorted(declared.out.items())
                          if name in {each.stage for each in every}])  # fmt: skip
        raise FleetError(
            f"no replica of {model} receives requests" + (f" ({why})" if why else "")
            + ": deploy the model first, or see the reason in `gpufleet status`"
        )  # fmt: skip
    return sorted(found, key=lambda each: (each.stage, each.node, each.port))


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
