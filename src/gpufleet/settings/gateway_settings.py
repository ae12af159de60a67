"""Settings of gateways and of your own load balancer.

Pure, like `settings/node_settings.py`, which contains these. Durations are in seconds; the names of
sizes contain the unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import (
    Field,
    PositiveInt,
    model_validator,
)

from gpufleet.settings.base import (
    LOOPBACK,
    BindAddress,
    Port,
    Seconds,
    Setting,
    Sha256,
    pattern_rule,
)

# It becomes a word of HAProxy's configuration and the label of a metric.
ClientName = Annotated[
    str,
    pattern_rule(
        r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?",
        "at most 64 of a-z, 0-9, `.`, `_` and `-`, with a letter or digit first and last",
    ),
    Field(description="Name of the client, in logs and metrics"),
]


class GatewayTls(Setting):
    """The gateway's certificate; `{node}` in a file's name stands for the node's name."""

    certificate_file: Annotated[str, Field(description="PEM with its chain, on this machine")]
    key_file: Annotated[str, Field(description="PEM, on this machine; its content goes to nodes")]


class ClientKey(Setting):
    """A client and the hash of its key."""

    name: ClientName
    key_sha256: Annotated[
        Sha256,
        Field(
            description="SHA-256 of the key, as `printf %s KEY | sha256sum`; the key "
            "itself is not stored"
        ),
    ]


class Client(ClientKey):
    """A client of the gateway."""

    requests_per_minute: Annotated[PositiveInt | None, Field(description="null: no limit")] = None
    models: Annotated[
        tuple[str, ...], Field(description="Entries of `serving`; empty: all models")
    ] = ()


class Affinity(Setting):
    """Session affinity: which requests go to the same replica, unless it is overloaded."""

    by: Annotated[
        Literal["none", "session", "client"],
        Field(description="none: least busy replica; session: by a header; client: by client"),
    ] = "none"
    header: Annotated[
        str,
        pattern_rule(r"[A-Za-z0-9-]+", "a header's name, as x-session-id"),
        Field(description="Header that identifies the session"),
    ] = "x-session-id"
    most_percent: Annotated[
        int,
        Field(
            ge=101,
            le=1000,
            description="Load limit of a sticky replica, in percent of the mean of all",
        ),
    ] = 150


class VirtualAddress(Setting):
    """A virtual address shared by two gateways: keepalived moves it when one fails."""

    address: Annotated[
        str,
        pattern_rule(r"[0-9a-fA-F.:]+/\d+", "an address with its prefix, as 10.0.0.9/24"),
        Field(description="With its prefix"),
    ]
    interface: Annotated[
        str,
        pattern_rule(r"[\w.@-]{1,15}", "an interface's name, as eth0"),
        Field(description="Network interface that holds the address"),
    ]
    router_id: Annotated[
        int,
        Field(ge=1, le=255, description="VRRP router id: the same on both, unique in the network"),
    ]
    priority: Annotated[
        int,
        Field(ge=1, le=254, description="The gateway with the higher priority holds the address"),
    ] = 100
    password_file: Annotated[str, Field(description="On this machine; at most 8 bytes (VRRP)")]


def access_mistakes(
    clients: Sequence[ClientKey],
    listen: str,
    *,
    encrypted: bool,
    allow_unauthenticated: bool,
    allow_plain_http: bool,
) -> Iterator[str]:
    """Yield problems of a server's clients, their keys, and unencrypted access."""
    if not clients and not allow_unauthenticated:
        yield (
            "no client has access: set `clients`, or `allow_unauthenticated: true` for "
            "access without keys"
        )
    if clients and allow_unauthenticated:
        yield "`clients` and `allow_unauthenticated` exclude each other: remove one"
    if not encrypted and listen not in LOOPBACK and not allow_plain_http:
        yield (
            f"keys and prompts would be sent unencrypted to {listen}: set `tls`, or `listen: "
            "127.0.0.1`, or `allow_plain_http: true`"
        )
    names = [each.name for each in clients]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"`clients` names {', '.join(twice)} twice"
    hashes = [each.key_sha256 for each in clients]
    if len(set(hashes)) < len(hashes):
        yield "two of `clients` have the same key: give each its own"


class ModelLimits(Setting):
    """Limits of one model, in place of the gateway's: an embedder takes more than a chat model."""

    per_server: Annotated[
        PositiveInt | None,
        Field(description="Concurrent requests per server of this model; null: the gateway's"),
    ] = None
    queue_seconds: Annotated[
        Seconds | None,
        Field(ge=1, le=3600, description="Maximum wait for this model; null: the gateway's"),
    ] = None


class Gateway(Setting):
    """HAProxy in front of all replicas of all models."""

    port: Annotated[Port, Field(description="TCP port for clients")] = 8443
    listen: BindAddress = "0.0.0.0"  # noqa: S104
    tls: Annotated[GatewayTls | None, Field(description="null: plain HTTP")] = None
    clients: Annotated[tuple[Client, ...], Field(description="Clients with access")] = ()
    allow_unauthenticated: Annotated[
        bool, Field(description="Accept that any client that reaches the port can use the models")
    ] = False
    allow_plain_http: Annotated[
        bool, Field(description="Accept that keys and prompts are sent unencrypted")
    ] = False
    affinity: Affinity = Affinity()
    request_seconds: Annotated[
        Seconds,
        Field(ge=10, le=86400, description="Timeout for a silent server within a request"),
    ] = 600
    queue_seconds: Annotated[
        Seconds,
        Field(ge=1, le=3600, description="Maximum time a request waits while all servers are full"),
    ] = 60
    per_server: Annotated[
        PositiveInt | None,
        Field(description="Concurrent requests per server; others wait; null: unlimited"),
    ] = None
    limits: Annotated[
        dict[str, ModelLimits], Field(description="Limits of models, by entry of `serving`")
    ] = {}
    max_body_mib: Annotated[int, Field(ge=1, le=1024, description="Largest request")] = 32
    connections: Annotated[
        int, Field(ge=100, le=100000, description="Concurrent connections, all clients")
    ] = 16000
    source_connections: Annotated[
        int,
        Field(
            ge=10,
            le=100000,
            description="Concurrent connections per IPv4 address or IPv6 /64 network",
        ),
    ] = 1000
    memory_mib: Annotated[
        int,
        Field(ge=512, description="Memory limit of HAProxy in MiB; above it, HAProxy is restarted"),
    ] = 8192
    metrics_port: Annotated[Port, Field(description="TCP port of HAProxy's metrics")] = 8405
    virtual_address: Annotated[
        VirtualAddress | None, Field(description="null: clients use the node's own address")
    ] = None

    def model_limits(self, model: str) -> ModelLimits:
        """Return a model's limits; `queue_seconds` is None if the gateway's value applies."""
        own = self.limits.get(model, ModelLimits())
        return own if own.per_server else own.model_copy(update={"per_server": self.per_server})

    @model_validator(mode="after")
    def _open_gateways_are_deliberate(self) -> Gateway:
        found = access_mistakes(
            self.clients,
            self.listen,
            encrypted=self.tls is not None,
            allow_unauthenticated=self.allow_unauthenticated,
            allow_plain_http=self.allow_plain_http,
        )
        if mistakes := tuple(found):
            raise ValueError("; ".join(mistakes))
        return self


class Balancer(Setting):
    """Your own balancer instead of gpufleet's gateway: two commands, run on this machine.

    Each is a list of arguments, run without a shell; `{node}`, `{address}`, `{port}`, `{model}` and
    `{replica}` are replaced by the server's. Status 0: done.
    """

    drain_command: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="Command that drains a server at the balancer"),
    ]
    undrain_command: Annotated[tuple[str, ...], Field(min_length=1, description="Puts it back")]
    seconds: Annotated[Seconds, Field(gt=0, description="Deadline of each")] = 60
