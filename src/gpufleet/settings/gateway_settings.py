"""Settings of gateways and of your own load balancer.

Pure. `settings/node_settings.py` contains these settings. Durations are in seconds. The name of a
size contains its unit.
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

# The name becomes a word in HAProxy's configuration and a label of metrics.
ClientName = Annotated[
    str,
    pattern_rule(
        r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?",
        "at most 64 of a-z, 0-9, `.`, `_` and `-`, with a letter or digit first and last",
    ),
    Field(description="Name of the client, in logs and metrics"),
]


class GatewayTls(Setting):
    """The gateway's certificate. `{node}` in a file name is replaced by the node's name."""

    certificate_file: Annotated[
        str,
        Field(
            description="PEM file of the certificate and its chain, on the machine that runs "
            "gpufleet"
        ),
    ]
    key_file: Annotated[
        str,
        Field(
            description="PEM file of the key, on the machine that runs gpufleet, which copies the "
            "content to the nodes"
        ),
    ]


class ClientKey(Setting):
    """A client and the hash of its key."""

    name: ClientName
    key_sha256: Annotated[
        Sha256,
        Field(
            description="SHA-256 digest of the key: `printf %s KEY | sha256sum` prints it. "
            "The key itself is not stored"
        ),
    ]


class Client(ClientKey):
    """A client of the gateway."""

    requests_per_minute: Annotated[
        PositiveInt | None,
        Field(description="Requests that the client may send in a minute. null: no limit"),
    ] = None
    models: Annotated[
        tuple[str, ...],
        Field(description="Entries of `serving` that the client may use. Empty: all models"),
    ] = ()


class Affinity(Setting):
    """
    Session affinity: which requests go to the same replica, unless that replica is overloaded.
    """

    by: Annotated[
        Literal["none", "session", "client"],
        Field(
            description="Requests that go to the same replica. none: each request goes to the "
            "least busy replica. session: requests with the same session header. client: "
            "requests of the same client"
        ),
    ] = "none"
    header: Annotated[
        str,
        pattern_rule(r"[A-Za-z0-9-]+", "the name of a header, for example x-session-id"),
        Field(description="Header of a request that identifies its session"),
    ] = "x-session-id"
    most_percent: Annotated[
        int,
        Field(
            ge=101,
            le=1000,
            description="Most load of a replica, in percent of the mean load of all "
            "replicas. Above this load, requests go to a different replica",
        ),
    ] = 150


class VirtualAddress(Setting):
    """
    A virtual address of two gateways. If one gateway fails, keepalived moves the address to the
    other gateway.
    """

    address: Annotated[
        str,
        pattern_rule(
            r"[0-9a-fA-F.:]+/\d+",
            "an address with the length of its network prefix, for example 10.0.0.9/24",
        ),
        Field(description="IP address with the length of its network prefix"),
    ]
    interface: Annotated[
        str,
        pattern_rule(r"[\w.@-]{1,15}", "the name of a network interface, for example eth0"),
        Field(description="Network interface that gets the address"),
    ]
    router_id: Annotated[
        int,
        Field(
            ge=1,
            le=255,
            description="VRRP router id. It must be equal on both gateways, and no other VRRP "
            "router of the network may use it",
        ),
    ]
    priority: Annotated[
        int,
        Field(
            ge=1,
            le=254,
            description="While both gateways work, the gateway with the higher priority has "
            "the address",
        ),
    ] = 100
    password_file: Annotated[
        str,
        Field(
            description="File with the VRRP password, on the machine that runs gpufleet. The "
            "password has at most 8 bytes"
        ),
    ]


def access_mistakes(
    clients: Sequence[ClientKey],
    listen: str,
    *,
    encrypted: bool,
    allow_unauthenticated: bool,
    allow_plain_http: bool,
) -> Iterator[str]:
    """Yield the mistakes in a server's clients, in their keys, and in the encryption of access."""
    if not clients and not allow_unauthenticated:
        yield (
            "no client has access: set `clients`, or allow access without keys with "
            "`allow_unauthenticated: true`"
        )
    if clients and allow_unauthenticated:
        yield "`clients` and `allow_unauthenticated` exclude each other: remove one of the two"
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
        yield "two clients in `clients` have the same key: give each client its own key"


class ModelLimits(Setting):
    """
    Limits of one model, which replace the gateway's limits. For example, an embedding model can run
    more requests at once than a chat model.
    """

    per_server: Annotated[
        PositiveInt | None,
        Field(
            description="Most concurrent requests for each server of this model. null: "
            "`gateway.per_server` applies"
        ),
    ] = None
    queue_seconds: Annotated[
        Seconds | None,
        Field(
            ge=1,
            le=3600,
            description="Maximum time that a request for this model waits. null: "
            "`gateway.queue_seconds` applies",
        ),
    ] = None


class Gateway(Setting):
    """The gateway: an HAProxy in front of all replicas of all models."""

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
        Field(
            ge=10,
            le=86400,
            description="If a server sends nothing for this time within a request, the gateway "
            "ends the request",
        ),
    ] = 600
    queue_seconds: Annotated[
        Seconds,
        Field(
            ge=1,
            le=3600,
            description="Maximum time that a request waits while all servers are full",
        ),
    ] = 60
    per_server: Annotated[
        PositiveInt | None,
        Field(
            description="Most concurrent requests for each server. Further requests wait. "
            "null: no limit"
        ),
    ] = None
    limits: Annotated[
        dict[str, ModelLimits],
        Field(description="Limits of single models. Each key is an entry of `serving`"),
    ] = {}
    max_body_mib: Annotated[
        int, Field(ge=1, le=1024, description="Size of the largest request that is accepted")
    ] = 32
    connections: Annotated[
        int,
        Field(ge=100, le=100000, description="Most concurrent connections of all clients together"),
    ] = 16000
    source_connections: Annotated[
        int,
        Field(
            ge=10,
            le=100000,
            description="Most concurrent connections from one IPv4 address or one IPv6 /64 network",
        ),
    ] = 1000
    memory_mib: Annotated[
        int,
        Field(ge=512, description="Memory limit of HAProxy in MiB; above it, HAProxy is restarted"),
    ] = 8192
    metrics_port: Annotated[Port, Field(description="TCP port of HAProxy's metrics")] = 8405
    virtual_address: Annotated[
        VirtualAddress | None, Field(description="null: clients connect to the node's own address")
    ] = None

    def model_limits(self, model: str) -> ModelLimits:
        """Return a model's limits. If the gateway's value applies, `queue_seconds` is None."""
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
    """
    Your own load balancer instead of gpufleet's gateway: two commands, which gpufleet runs on the
    machine where you start it. Each command is a list of arguments and runs without a shell. In the
    arguments, `{node}`, `{address}`, `{port}`, `{model}` and `{replica}` are replaced by the values
    of the server. Status 0 means that the command succeeded.
    """

    drain_command: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="Command that makes the load balancer send no new requests to a server",
        ),
    ]
    undrain_command: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="Command that makes the load balancer send requests to the server again",
        ),
    ]
    seconds: Annotated[Seconds, Field(gt=0, description="Maximum run time of each command")] = 60
