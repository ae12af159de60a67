"""What operators write about gateways, and about how a fleet is changed under load.

Pure, as `settings/node_settings.py`, of which these are parts. Durations are in seconds; sizes say
their unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import (
    Field,
    PositiveInt,
    model_validator,
)

from gpufleet.settings.base import LOOPBACK, BindAddress, Port, Seconds, Setting, Sha256, form

# A word of HAProxy's configuration and a metric's label are made of it.
ClientName = Annotated[
    str,
    form(
        r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?",
        "at most 64 of a-z, 0-9, `.`, `_` and `-`, with a letter or digit first and last",
    ),
    Field(description="Name of the client, in logs and metrics"),
]


class GatewayTls(Setting):
    """What the gateway shows its clients; `{node}` in a file's name stands for the node's name."""

    certificate_file: Annotated[str, Field(description="PEM with its chain, on this machine")]
    key_file: Annotated[str, Field(description="PEM, on this machine; its content goes to nodes")]


class ClientKey(Setting):
    """A client and the hash of its key."""

    name: ClientName
    key_sha256: Annotated[
        Sha256,
        Field(description="Of the key, as `printf %s KEY | sha256sum`: the key is nowhere here"),
    ]


class Client(ClientKey):
    """Somebody who may use the gateway."""

    requests_per_minute: Annotated[PositiveInt | None, Field(description="null: no limit")] = None
    models: Annotated[
        tuple[str, ...], Field(description="Entries of `serving`; empty: all models")
    ] = ()


class Affinity(Setting):
    """Which requests go to one replica together, while that replica is not the busiest by far."""

    by: Annotated[
        Literal["none", "session", "client"],
        Field(description="none: the least busy; session: a header; client: who asks"),
    ] = "none"
    header: Annotated[
        str,
        form(r"[A-Za-z0-9-]+", "a header's name, as x-session-id"),
        Field(description="Whose value names a session"),
    ] = "x-session-id"
    most_percent: Annotated[
        int,
        Field(
            ge=101,
            le=1000,
            description="A replica gets no more of it when it has so much of the mean of all",
        ),
    ] = 150


class VirtualAddress(Setting):
    """An address that one of two gateways has: keepalived moves it when that one fails."""

    address: Annotated[
        str,
        form(r"[0-9a-fA-F.:]+/\d+", "an address with its prefix, as 10.0.0.9/24"),
        Field(description="With its prefix"),
    ]
    interface: Annotated[
        str,
        form(r"[\w.@-]{1,15}", "an interface's name, as eth0"),
        Field(description="Network interface that gets it"),
    ]
    router_id: Annotated[int, Field(ge=1, le=255, description="The same on both, no one else's")]
    priority: Annotated[int, Field(ge=1, le=254, description="The higher one has it")] = 100
    password_file: Annotated[str, Field(description="On this machine; at most 8 bytes (VRRP)")]


def access_mistakes(
    clients: Sequence[ClientKey],
    listen: str,
    *,
    encrypted: bool,
    allow_unauthenticated: bool,
    allow_plain_http: bool,
) -> Iterator[str]:
    """Yield what is wrong with who may use a server, and with how its clients reach it."""
    if not clients and not allow_unauthenticated:
        yield "nobody may ask: name `clients`, or set `allow_unauthenticated: true` for everybody"
    if clients and allow_unauthenticated:
        yield "`clients` and `allow_unauthenticated` exclude each other: remove one"
    if not encrypted and listen not in LOOPBACK and not allow_plain_http:
        yield (
            f"keys and prompts would travel readable to {listen}: set `tls`, or `listen: "
            "127.0.0.1`, or `allow_plain_http: true`"
        )
    names = [each.name for each in clients]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"`clients` names {', '.join(twice)} twice"
    hashes = [each.key_sha256 for each in clients]
    if len(set(hashes)) < len(hashes):
        yield "two of `clients` have the same key: give each its own"


class Gateway(Setting):
    """One address for clients: HAProxy in front of all replicas of all models."""

    port: Annotated[Port, Field(description="TCP port that clients ask")] = 8443
    listen: BindAddress = "0.0.0.0"  # noqa: S104
    tls: Annotated[GatewayTls | None, Field(description="null: plain HTTP")] = None
    clients: Annotated[tuple[Client, ...], Field(description="Who may ask")] = ()
    allow_unauthenticated: Annotated[
        bool, Field(description="Accept that anyone who reaches the port may use the models")
    ] = False
    allow_plain_http: Annotated[
        bool, Field(description="Accept that keys and prompts travel readable")
    ] = False
    affinity: Affinity = Affinity()
    request_seconds: Annotated[
        Seconds,
        Field(ge=10, le=86400, description="Longest silence of a server within a request"),
    ] = 600
    queue_seconds: Annotated[
        Seconds,
        Field(ge=1, le=3600, description="How long a request waits where all servers are full"),
    ] = 60
    per_server: Annotated[
        PositiveInt | None,
        Field(description="Requests that one server gets at once; the others wait; null: any"),
    ] = None
    max_body_mib: Annotated[int, Field(ge=1, le=1024, description="Largest request")] = 32
    connections: Annotated[
        int, Field(ge=100, le=100000, description="Connections of all clients at once")
    ] = 16000
    source_connections: Annotated[
        int,
        Field(
            ge=10,
            le=100000,
            description="Connections at once of one address, or of one /64 network of IPv6",
        ),
    ] = 1000
    memory_mib: Annotated[
        int,
        Field(ge=512, description="HAProxy's most; it is restarted when it wants more, in MiB"),
    ] = 8192
    metrics_port: Annotated[Port, Field(description="TCP port of HAProxy's metrics")] = 8405
    virtual_address: Annotated[
        VirtualAddress | None, Field(description="null: clients ask the node's own address")
    ] = None

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
    """Your own balancer in place of our gateway: two commands, run on this machine.

    Each is a list of words, run without a shell; `{node}`, `{address}`, `{port}`, `{model}` and
    `{replica}` stand for the server that is meant. Status 0: done.
    """

    drain_command: Annotated[
        tuple[str, ...], Field(min_length=1, description="Takes a server out of the balancer")
    ]
    undrain_command: Annotated[tuple[str, ...], Field(min_length=1, description="Puts it back")]
    seconds: Annotated[Seconds, Field(gt=0, description="Deadline of each")] = 60
