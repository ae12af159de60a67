"""
Render a gateway: HAProxy in front of every vLLM server of the fleet. Pure.

The module computes the backends and HAProxy's configuration with its files, and parses the report
of `on_node/network/gateway_drains.py` on a running gateway. A backend is an entry of `serving`; its
servers are the servers of its replicas. The configuration uses only features common to HAProxy 2.4
to 3.x (docs.haproxy.org: json_query and wait-for-body came with 2.4).

Every request passes these steps in order: the path must be one of the API; the key must be known,
within its rate and models; the model is read from the path or from the body, JSON or a form; the
client's key is replaced with the servers' own.
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
"""Directory of HAProxy's configuration and working directory, so file names can be relative."""
CONFIGURATION = "haproxy.cfg"
RUN = node_paths.GATEWAY_RUN
SOCKET = f"{RUN}/admin.sock"
STATE = node_paths.GATEWAY_STATE
"""State that survives restarts: the drained servers."""
PROGRAM = node_paths.GATEWAY_PROGRAM
TEMPLATE = "gateway/haproxy.cfg.j2"
FORM_MODEL = "form-model.lua"
"""The Lua program that reads the model from a form, in `HOME` and in `templates/gateway`."""
PATHS = ("/classify", "/pooling", "/rerank", "/score", "/v2/embed", "/v2/rerank")
"""vLLM's routes for clients outside /v1, for models that do not complete text."""

# A body is searched for its model as far as HAProxy keeps it. A prompt of a million tokens has some
# 4 MB; memory is taken as bodies come, not beforehand (measured: 300 waiting requests take 11 MB
# with buffers of 16 KiB and of 16 MiB alike).
BUFFER_MIB = 8
# The part of a buffer that HAProxy reserves for headers that it adds (tune.maxrewrite).
REWRITE_BYTES = 16384
# Limits of the size and time of a connection's first request head: before a key is checked, no more
# is buffered. Clients' heads have some 1 KiB; vLLM's own server (h11) takes 64 KiB by default.
HEAD_BYTES = 32768
HEAD_SECONDS = 10
# Timeout for a silent client when it must send or receive: within a TLS handshake (2.6 knows no
# other limit of it), an upload, an answer that it does not take. While a server works it may be
# silent.
CLIENT_SECONDS = 60
# Clients keep idle connections for up to 60 s (vLLM's benchmark; openai's client 5): a gateway that
# closes them first may do so while a request is on its way.
KEEP_ALIVE_SECONDS = 120
# Interval of queries to a node's watchdog about a server: its result takes effect as fast as a
# failed check.
AGENT_MILLISECONDS = 2000
# A reloaded process ends with its last stream, or at the latest after this time. It is longer than
# any drain (`drain_seconds` is at most an hour), so that a reload does not cut off requests that a
# drain lets finish.
HARD_STOP_SECONDS = 3600 + 60

CERTIFICATE = "tls.pem"
"""The file in `HOME` with the certificate and its key."""


@dataclass(frozen=True, order=True)
class Target:
    """One of the gateway's vLLM servers."""

    name: str
    """The server's name without its backend (`server_name`)."""
    address: str
    port: int
    stage: str = ""
    """The stage in queries to the node's watchdog; "" if the watchdog is not queried."""
    watchdog_port: int = 0

    @property
    def place(self) -> str:
        """The server's address and port."""
        return prometheus.host_port(self.address, self.port)


@dataclass(frozen=True)
class Backend:
    """An entry of `serving` with its servers. Without servers, clients get 503."""

    name: str
    served_name: str
    """The model's name in clients' requests."""
    targets: tuple[Target, ...] = ()
    api_key: str = field(default="", repr=False)
    """vLLM's API key; "" if the servers require none."""
    adapters: tuple[str, ...] = ()
    """
    The names, in clients' requests, of the LoRA adapters that all servers of the backend load.
    """


@dataclass(frozen=True)
class Configuration:
    """The files of a gateway's configuration."""

    files: Mapping[str, bytes] = field(repr=False)
    """Files without secrets, by path relative to `HOME`."""
    secrets: Mapping[str, bytes] = field(repr=False)
    """Files with secrets, readable only by root, by path relative to `HOME`."""
    fingerprint: str
    """Fingerprint of all files. HAProxy reports the loaded one (`show info`, description)."""


@dataclass(frozen=True, order=True)
class ServerState:
    """A server's state at a gateway."""

    backend: str
    server: str
    status: str
    """HAProxy's status: UP, DOWN, DRAIN, MAINT or no check; "UP 1/3" during a change."""
    sessions: int
    """The server's current requests, including those of reloaded processes."""
    queued: int
    drained: bool
    """Whether the server is drained: it gets no requests until `ready`."""

    @property
    def name(self) -> str:
        """The server's name, as returned by `server_name`."""
        return f"{self.backend}/{self.server}"


@dataclass(frozen=True)
class GatewayState:
    """The state that a gateway reports."""

    error: str = ""
    """Why the gateway could not be queried or changed; "" without an error."""
    runs: bool = False
    fingerprint: str = ""
    """Fingerprint of the configuration that HAProxy has loaded."""
    servers: tuple[ServerState, ...] = ()
    drained: tuple[str, ...] = ()
    """Servers that stay drained over a reload and restart, by name (`server_name`)."""
    unknown: tuple[str, ...] = ()
    """Requested servers that are missing in the gateway's configuration."""
    configured: Mapping[str, tuple[str, int]] = field(default_factory=dict, hash=False)
    """Address and port of each server in the gateway's configuration, by `server_name`."""
    models: tuple[str, ...] = ()
    """The gateway's backends."""
    keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    """
    SHA-256 of the key that the gateway sends to a model's servers, by model.

    Models without a key are omitted.
    """


def server_name(server: Server) -> str:
    """
    Return a server's name at a gateway: backend, node, replica, and number if not the only one.

    >>> server_name(Server("gpu-01", "tiny-0", 0, "tiny", 8000))
    'tiny/gpu-01.tiny-0'
    """
    return f"{server.model}/{_name(server)}"


def _name(server: Server) -> str:
    number = [str(server.number)] if server.number else []
    return ".".join([server.node.lstrip("@"), server.stage, *number])


def parse_gateway_state(said: Mapping[str, Any] | str) -> GatewayState:
    """
    Parse `on_node/network/gateway_drains.py`'s answer. A sentence becomes the state's `error`.
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
    Return the backends of the gateway on node `home`: one for each entry that a node declares.

    `keys` are the servers' API keys by the path in `vllm.api_key_file`.
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
    Return `wanted` with a gateway's current servers on silent nodes.

    `before` are all current servers of the gateway.
    """
    # The longest name counts: gpu.example is not a server of node gpu.
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
    """Return the stage and port to query a node's watchdog; ("", 0) without a check."""
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
    """Return the files of this machine with the API keys of all model servers."""
    servers = (each.settings.servers for each in nodes.values())
    return tuple(sorted({each.api_key_file for each in servers if each and each.api_key_file}))


def problems(nodes: Mapping[str, NodeVars], home: str) -> Iterator[str]:
    """Yield the problems of a gateway on `home` with the fleet's servers, as sentences."""
    by_entry: dict[str, dict[str | None, list[str]]] = {}
    for name, node in sorted(nodes.items()):
        for entry in node.settings.serving:
            file = node.settings.engine_of(entry).api_key_file
            by_entry.setdefault(entry, {}).setdefault(file, []).append(name)
    for entry, files in sorted(by_entry.items()):
        if len(files) > 1:
            said = "; ".join(
                f"{file or 'none'} on {' and '.join(names)}" for file, names in files.items()
            )
            yield (
                f"serving.{entry}: its nodes have different values of `vllm.api_key_file` "
                f"({said}), but a gateway sends the same key to all servers of a model: set the "
                "same file for all these nodes"
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
                f"model {adapters[name]} instead, which includes all its adapters"
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
    """Return whether an address is outside all the networks; False for a host name."""
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
    `metrics_address` is the address for metrics; "" binds all addresses. `run` and `state` are
    directories on the node. `account` is the workers' user; "" is the user that starts HAProxy.
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
        # "!" is not an entry: several entries have this name.
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
    """Return the files of this machine with the certificate and its key; empty for plain HTTP."""
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
    """Return a map for HAProxy, one line with key and value per entry."""
    return "".join(f"{key} {value}\n" for key, value in sorted(pairs)).encode()


def _lists(clients: Sequence[Client], wanted: Sequence[Backend]) -> Iterator[dict[str, Any]]:
    """
    Yield the answers to /v1/models.

    Each client with restricted models has its own answer. The last answer is for all other clients.
    """
    for each in clients:
        if each.models:
            names = [served for served in wanted if served.name in each.models]
            yield {"client": each.name, "document": _word(_models(names))}
    yield {"client": "", "document": _word(_models(wanted))}


def _models(wanted: Iterable[Backend]) -> str:
    """Return the answer to `GET /v1/models` in OpenAI's format; creation dates are 0."""
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

    The word is in single quotes, in which no character is special. A single quote in the text
    becomes its JSON escape.
    """
    return "'" + text.replace("'", "\\u0027") + "'"
