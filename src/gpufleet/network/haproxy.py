"""
Render a gateway: HAProxy in front of every vLLM server of the fleet. Pure.

The module computes the backends, HAProxy's configuration, and the files that it needs. It also
parses the report of `on_node/network/gateway_drains.py` about a running gateway. A backend is an
entry of `serving`. The servers of a backend are the servers of the replicas. The configuration uses
only features common to HAProxy 2.4 to 3.x (docs.haproxy.org: json_query and wait-for-body came with
2.4).

HAProxy handles every request in these steps. First, the path must belong to the API. Second, the
client's key must be known, and the request must be within the client's rate and models. Third, the
model is read from the path, or from the body, which is JSON or a form. Last, the client's key is
replaced with the key of the servers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any

from gpufleet import node_paths
from gpufleet.formatting import suggestion
from gpufleet.monitoring import prometheus
from gpufleet.monitoring.exporters import file_of_node
from gpufleet.planning.adapter_flags import MODULES, module_names
from gpufleet.serving.servers import Server
from gpufleet.settings.gateway_settings import Client, Gateway
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.serving_settings import Served
from gpufleet.templates import read_template, render_template

UNIT = "gpufleet-gateway.service"
HOME = node_paths.GATEWAY
"""
The directory of HAProxy's configuration.

It is also HAProxy's working directory, so file names can be relative.
"""
CONFIGURATION = "haproxy.cfg"
RUN = node_paths.GATEWAY_RUN
SOCKET = f"{RUN}/admin.sock"
STATE = node_paths.GATEWAY_STATE
"""The directory for the list of drained servers, which must survive restarts."""
PROGRAM = node_paths.GATEWAY_PROGRAM
TEMPLATE = "gateway/haproxy.cfg.j2"
FORM_MODEL = "form-model.lua"
"""The Lua program that reads the model from a form, in `HOME` and in `templates/gateway`."""
PATHS = ("/classify", "/pooling", "/rerank", "/score", "/v2/embed", "/v2/rerank")
"""vLLM's routes for clients outside /v1, for models that do not complete text."""

# HAProxy can find the model only in the part of a body that is in its buffer. A prompt of a million
# tokens has about 4 MB. HAProxy allocates memory only as bodies arrive. (Measured: 300 waiting
# requests take 11 MB, with buffers of 16 KiB as well as of 16 MiB.)
BUFFER_MIB = 8
# The part of a buffer that HAProxy reserves for the headers that it adds (tune.maxrewrite).
REWRITE_BYTES = 16384
# The maximum size and time of the first request head on a connection. HAProxy buffers no more
# before it has checked the key. Heads of clients have about 1 KiB. vLLM's own server (h11) accepts
# 64 KiB by default.
HEAD_BYTES = 32768
HEAD_SECONDS = 10
# Timeout for a client that is silent although it must send or receive data. This covers a TLS
# handshake (HAProxy 2.6 has no other limit for it), an upload, and an answer that the client does
# not read. While a server works on a request, the client may be silent.
CLIENT_SECONDS = 60
# Clients keep idle connections open for up to 60 s (vLLM's benchmark 60 s, openai's client 5 s). A
# gateway that closes such a connection first may close it while a request is on its way.
KEEP_ALIVE_SECONDS = 120
# The interval of HAProxy's queries about a server to the node's watchdog. A result of the watchdog
# takes effect as fast as a failed check.
AGENT_MILLISECONDS = 2000
# After a reload, the old process ends with its last request, or at the latest after this time. The
# time is longer than any drain (`drain_seconds` is at most an hour). So a reload does not cut off
# requests that a drain allows to finish.
HARD_STOP_SECONDS = 3600 + 60

CERTIFICATE = "tls.pem"
"""The file in `HOME` with the certificate and its key."""


@dataclass(frozen=True, order=True)
class Target:
    """A server to which the gateway sends requests."""

    name: str
    """The server's name without its backend (`server_name`)."""
    address: str
    port: int
    stage: str = ""
    """The stage about which HAProxy queries the node's watchdog, or "" if it does not do so."""
    watchdog_port: int = 0

    @property
    def place(self) -> str:
        """The server's address and port."""
        return prometheus.host_port(self.address, self.port)


@dataclass(frozen=True)
class Backend:
    """
    An entry of `serving` with its servers. If there are no servers, clients get the status 503.
    """

    name: str
    served_name: str
    """The model's name in clients' requests."""
    targets: tuple[Target, ...] = ()
    api_key: str = field(default="", repr=False)
    """The API key of the servers, or "" if they require none."""
    adapters: tuple[str, ...] = ()
    """
    The LoRA adapters that all servers of the backend load, by their names in clients' requests.
    """


@dataclass(frozen=True)
class Configuration:
    """The files of a gateway's configuration."""

    files: Mapping[str, bytes] = field(repr=False)
    """Files without secrets, by path relative to `HOME`."""
    secrets: Mapping[str, bytes] = field(repr=False)
    """Files with secrets, readable only by root, by path relative to `HOME`."""
    fingerprint: str
    """
    The fingerprint of all files.

    HAProxy reports the fingerprint that it has loaded (`show info`, description).
    """


@dataclass(frozen=True, order=True)
class ServerState:
    """A server's state at a gateway."""

    backend: str
    server: str
    status: str
    """
    HAProxy's status of the server.

    It is UP, DOWN, DRAIN, MAINT or no check. While the status changes, it is for example "UP 1/3".
    """
    sessions: int
    """
    The number of the server's current requests.

    It includes requests of older HAProxy processes that a reload has replaced.
    """
    queued: int
    drained: bool
    """Whether the server is drained, so that it gets no new requests until it is set to `ready`."""

    @property
    def name(self) -> str:
        """The server's name, as returned by `server_name`."""
        return f"{self.backend}/{self.server}"


@dataclass(frozen=True)
class GatewayState:
    """The state that a gateway reports."""

    error: str = ""
    """Why the gateway could not be queried or changed, or "" if there was no error."""
    runs: bool = False
    fingerprint: str = ""
    """Fingerprint of the configuration that HAProxy has loaded."""
    servers: tuple[ServerState, ...] = ()
    drained: tuple[str, ...] = ()
    """The names (`server_name`) of the servers that stay drained over a reload and a restart."""
    unknown: tuple[str, ...] = ()
    """The servers in the request that the gateway's configuration does not have."""
    configured: Mapping[str, tuple[str, int]] = field(default_factory=dict, hash=False)
    """Address and port of each server in the gateway's configuration, by `server_name`."""
    models: tuple[str, ...] = ()
    """The gateway's backends."""
    keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    """
    Maps each model to the SHA-256 of the key that the gateway sends to the model's servers.

    Models without a key are omitted.
    """


def server_name(server: Server) -> str:
    """
    Return a server's name at a gateway.

    The name consists of the backend, the node and the replica. The name also has the server's
    number, unless the number is 0.

    >>> server_name(Server("gpu-01", "tiny-0", 0, "tiny", 8000))
    'tiny/gpu-01.tiny-0'
    """
    return f"{server.model}/{_name(server)}"


def _name(server: Server) -> str:
    number = [str(server.number)] if server.number else []
    return ".".join([server.node.lstrip("@"), server.stage, *number])


def parse_gateway_state(said: Mapping[str, Any] | str) -> GatewayState:
    """
    Parse the answer of `on_node/network/gateway_drains.py`.

    If the answer is a sentence, the sentence becomes the state's `error`.
    """
    if isinstance(said, str):
        return GatewayState(error=said)
    return GatewayState(
        error=said["error"] or "",
        runs=said["runs"],
        fingerprint=said["fingerprint"],
        servers=tuple(sorted(ServerState(**each) for each in said["servers"])),
        drained=tuple(said["drained"]),
        unknown=tuple(said["unknown"]),
        configured={name: (place[0], place[1]) for name, place in said["configured"].items()},
        models=tuple(said["models"]),
        keys=dict(said["keys"]),
    )


# Backends


def backends(
    nodes: Mapping[str, NodeVars],
    servers: Iterable[Server],
    home: str,
    keys: Mapping[str, str] | None = None,
) -> tuple[Backend, ...]:
    """
    Return the backends of the gateway on node `home`.

    There is one backend for each entry of `serving` that a node declares. `keys` maps a path in
    `vllm.api_key_file` to the API key of the servers.
    """
    declared: dict[str, Served] = {}
    key_of: dict[str, str] = {}
    for _, node in sorted(nodes.items()):
        for entry, model in node.settings.serving.items():
            declared.setdefault(entry, model)
            if file := node.settings.engine_of(entry).api_key_file:
                key_of.setdefault(entry, (keys or {}).get(file, ""))
    found: dict[str, list[Target]] = {entry: [] for entry in declared}
    adapters = {
        entry: {*model.adapters, *module_names(model.flags.get(MODULES))}
        for entry, model in declared.items()
    }
    for each in servers:
        if each.model in adapters:
            adapters[each.model] &= {*each.adapters}
        there = nodes.get(each.node)
        address = prometheus.server_address(there, here=each.node == home) if there else None
        if address is not None and each.model in found:
            asked = _asked(there, each.model, each.stage) if there else ("", 0)
            found[each.model].append(Target(_name(each), address, each.port, *asked))
    return tuple(
        Backend(
            entry,
            declared[entry].served_name or entry,
            tuple(sorted(set(targets))),
            key_of.get(entry, ""),
            tuple(sorted(adapters[entry])),
        )
        for entry, targets in sorted(found.items())
    )


def keep_silent_servers(
    wanted: Iterable[Backend],
    before: Mapping[str, tuple[str, int]],
    silent: Collection[str],
    nodes: Mapping[str, NodeVars],
) -> tuple[Backend, ...]:
    """
    Return the backends in `wanted` with the gateway's current servers on silent nodes.

    A node is silent if it did not answer. `before` maps all current servers of the gateway to their
    addresses and ports.
    """
    # The longest matching name of a node counts, because a server of node gpu.example is not a
    # server of node gpu.
    by_length = sorted(nodes, key=len, reverse=True)
    stays: dict[str, list[Target]] = {}
    for name, (address, port) in sorted(before.items()):
        backend, _, server = name.partition("/")
        node = next((each for each in by_length if server.startswith(f"{each.lstrip('@')}.")), "")
        if node.lstrip("@") in {each.lstrip("@") for each in silent}:
            stage = _stage(backend, server.removeprefix(f"{node.lstrip('@')}."))
            asked = _asked(nodes[node], backend, stage)
            stays.setdefault(backend, []).append(Target(server, address, port, *asked))
    return tuple(
        replace(each, targets=tuple(sorted({*each.targets, *stays.get(each.name, ())})))
        for each in wanted
    )


def _asked(node: NodeVars, entry: str, stage: str) -> tuple[str, int]:
    """
    Return the stage and the port with which HAProxy queries a node's watchdog.

    The result is ("", 0) if HAProxy does not query the watchdog.
    """
    model, port = node.settings.serving.get(entry), node.settings.watchdog_port
    return (stage, port) if model and port and model.watchdog.mode != "off" else ("", 0)


def _stage(entry: str, server: str) -> str:
    """
    Return a server's stage from the part of its name after the node.

    >>> _stage("llama-3.3", "llama-3.3-0.2")
    'llama-3.3-0'
    """
    replica = server.removeprefix(f"{entry}-").partition(".")[0]
    return f"{entry}-{replica}"


def key_files(nodes: Mapping[str, NodeVars]) -> tuple[str, ...]:
    """Return the files on this machine that contain the API keys of all model servers."""
    servers = (each.settings.servers for each in nodes.values())
    return tuple(sorted({each.api_key_file for each in servers if each and each.api_key_file}))


def problems(nodes: Mapping[str, NodeVars], home: str) -> Iterator[str]:
    """
    Yield the problems that a gateway on `home` would have with the fleet's settings, as sentences.
    """
    by_entry: dict[str, dict[str | None, list[str]]] = {}
    for name, node in sorted(nodes.items()):
        for entry in node.settings.serving:
            file = node.settings.engine_of(entry).api_key_file
            by_entry.setdefault(entry, {}).setdefault(file, []).append(name)
    for entry, files in sorted(by_entry.items()):
        if len(files) > 1:
            said = "; ".join(
                f"{file or 'not set'} on {' and '.join(names)}" for file, names in files.items()
            )
            yield (
                f"serving.{entry}: the nodes of this model have different values of "
                f"`vllm.api_key_file` ({said}), but a gateway sends the same key to all "
                "servers of a model: set the same file for all these nodes"
            )
    for entry in sorted({"v1", "v2"} & set(by_entry)):
        yield (
            f"serving.{entry}: the gateway uses the path /{entry} for all models: rename the entry"
        )
    adapters = {
        name: entry
        for node in nodes.values()
        for entry, served in node.settings.serving.items()
        for name in served.adapters
    }
    front = nodes[home].settings.gateway
    for client in front.clients if front else ():
        for name in sorted(adapters.keys() & {*client.models}):
            yield (
                f"gateway.clients: {client.name} has the adapter {name} in `models`: write the "
                f"model {adapters[name]} instead, which includes all adapters of the model"
            )
    for entry in sorted(front.limits.keys() - by_entry.keys() if front else ()):
        yield (
            f"gateway.limits.{entry}: no node declares serving.{entry}: correct the name, or "
            f"remove the limits{suggestion(entry, sorted(by_entry))}"
        )
    for name, node in sorted(nodes.items()):
        wanted = node.settings.firewall
        closed = wanted and wanted.clients and node.settings.serving and name != home
        if wanted and closed and _outside(nodes[home].address, wanted.clients):
            yield (
                f"{name}: firewall.clients does not include the gateway {home} "
                f"({nodes[home].address}): add the gateway's address"
            )


def _outside(address: str, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    """Return whether an address is outside all networks. The result is False for a host name."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    return not any(found in each for each in networks)


# The configuration


def config(
    gateway: Gateway,
    wanted: Sequence[Backend],
    *,
    metrics_address: str = "",
    certificate: bytes = b"",
    run: str = RUN,
    state: str = STATE,
    account: str = "haproxy",
) -> Configuration:
    """
    Return HAProxy's configuration and the files that it reads.

    `certificate` is the content of the files in `gateway.tls`: the certificate and its key.
    `metrics_address` is the address on which metrics are served. "" means all addresses. `run` and
    `state` are directories on the node. `account` is the user of the worker processes. "" means the
    user that starts HAProxy.
    """
    secrets = {"upstream.map": _map((each.name, each.api_key) for each in wanted if each.api_key)}
    if gateway.tls:
        secrets[CERTIFICATE] = certificate
    by_name: dict[str, list[str]] = {}
    for each in wanted:
        for name in (each.served_name, *each.adapters):
            by_name.setdefault(name, []).append(each.name)
    files = {
        "keys.map": _map((each.key_sha256.lower(), each.name) for each in gateway.clients),
        # "!" is not an entry. It means that several entries have this name.
        "models.map": _map(
            (name, entries[0] if len(entries) == 1 else "!") for name, entries in by_name.items()
        ),
        FORM_MODEL: read_template(f"gateway/{FORM_MODEL}").encode(),
    }

    def rendered(fingerprint: str) -> str:
        return render_template(
            TEMPLATE,
            fingerprint=fingerprint,
            gateway=gateway,
            backends=wanted,
            form_model=FORM_MODEL,
            paths=PATHS,
            only=wanted[0].name if len(wanted) == 1 else "",
            limits={each.name: gateway.model_limits(each.name) for each in wanted},
            named=len(wanted) > 1 or any(each.adapters for each in wanted),
            place=_bound(gateway.listen, gateway.port),
            transparent=gateway.virtual_address is not None and gateway.listen not in _ANY,
            metrics_place=_bound(metrics_address, gateway.metrics_port),
            account=account,
            socket=f"{run}/{SOCKET.rpartition('/')[2]}",
            state=f"{state}/{DRAINED_STATE}",
            hard_stop_seconds=max(HARD_STOP_SECONDS, gateway.request_seconds),
            head_bytes=HEAD_BYTES,
            head_seconds=HEAD_SECONDS,
            client_seconds=min(CLIENT_SECONDS, gateway.request_seconds),
            buffer_bytes=_buffer(gateway),
            body_bytes=_buffer(gateway) - 2 * REWRITE_BYTES,
            rewrite_bytes=REWRITE_BYTES,
            most_bytes=gateway.max_body_mib << 20,
            keep_alive_seconds=KEEP_ALIVE_SECONDS,
            agent_milliseconds=AGENT_MILLISECONDS,
            limited=[each for each in gateway.clients if each.requests_per_minute],
            narrowed=[each for each in gateway.clients if each.models],
            lists=[*_lists(gateway.clients, wanted)],
            shared={name: entries for name, entries in by_name.items() if len(entries) > 1},
            error=_error,
            word=_word,
        )

    text = rendered("")
    parts = {CONFIGURATION: text.encode(), **files, **secrets}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
    fingerprint = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:32]
    return Configuration(
        {CONFIGURATION: rendered(fingerprint).encode(), **files}, secrets, fingerprint
    )


DRAINED_STATE = "drained.state"
_ANY = ("0.0.0.0", "::", "")  # noqa: S104  # addresses that are read, not bound


def certificate_files(gateway: Gateway, node: str) -> tuple[str, ...]:
    """
    Return the files on this machine with the certificate and its key.

    The result is empty for plain HTTP.
    """
    if gateway.tls is None:
        return ()
    return (
        file_of_node(gateway.tls.certificate_file, node),
        file_of_node(gateway.tls.key_file, node),
    )


def _buffer(gateway: Gateway) -> int:
    """Return HAProxy's tune.bufsize in bytes."""
    return (min(gateway.max_body_mib, BUFFER_MIB) << 20) + 4 * REWRITE_BYTES


def _bound(listen: str, port: int) -> str:
    if listen == "::":
        return f":::{port} v4v6"
    return f"*:{port}" if listen in _ANY else prometheus.host_port(listen, port)


def _map(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Return the text of a map file for HAProxy, with one line for each pair of key and value."""
    return "".join(f"{key} {value}\n" for key, value in sorted(pairs)).encode()


def _lists(clients: Sequence[Client], wanted: Sequence[Backend]) -> Iterator[dict[str, Any]]:
    """
    Yield the answers to /v1/models.

    Each client that may use only some models gets its own answer. The last answer is for all other
    clients.
    """
    for each in clients:
        if each.models:
            names = [served for served in wanted if served.name in each.models]
            yield {"client": each.name, "document": _word(_models(names))}
    yield {"client": "", "document": _word(_models(wanted))}


def _models(wanted: Iterable[Backend]) -> str:
    """Return the answer to `GET /v1/models` in OpenAI's format. Creation dates are 0."""
    every = tuple(wanted)
    parents: dict[str, str | None] = {each.served_name: None for each in every}
    parents |= {name: each.served_name for each in every for name in each.adapters}
    data = [
        {"id": name, "object": "model", "created": 0, "owned_by": "vllm"}
        | ({"parent": parent} if parent else {})
        for name, parent in sorted(parents.items())
    ]
    return json.dumps({"object": "list", "data": data})


def _error(message: str, kind: str = "invalid_request_error", code: str = "") -> str:
    """Return an error in OpenAI's format, as one word of an HAProxy configuration."""
    said = {"message": message, "type": kind, "param": None, "code": code or None}
    return _word(json.dumps({"error": said}))


def _word(text: str) -> str:
    """
    Return JSON text as one word of an HAProxy configuration.

    The word is in single quotes, because HAProxy interprets no character between them. A single
    quote in the text is replaced with its JSON escape.
    """
    return "'" + text.replace("'", "\\u0027") + "'"
