"""What operators write about gateways, and about how a fleet is changed under load.

Pure, as `settings/node_settings.py`, of which these are parts. Durations are in seconds; sizes say
their unit.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    model_validator,
)

from gpufleet.settings.monitoring_settings import Port, Sha256


class _Setting(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# A word of HAProxy's configuration and a metric's label are made of it.
ClientName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]


class GatewayTls(_Setting):
    """What the gateway shows its clients; `{node}` in a file's name stands for the node's name."""

    certificate_file: Annotated[str, Field(description="PEM with its chain, on this machine")]
    key_file: Annotated[str, Field(description="PEM, on this machine; its content goes to nodes")]


class Client(_Setting):
    """Somebody who may use the gateway."""

    name: ClientName
    key_sha256: Annotated[
        Sha256,
        Field(description="Of the key, as `printf %s KEY | sha256sum`: the key is nowhere here"),
    ]
    requests_per_minute: Annotated[PositiveInt | None, Field(description="null: no limit")] = None
    models: Annotated[
        tuple[str, ...], Field(description="Entries of `serving`; empty: all models")
    ] = ()


class Affinity(_Setting):
    """Which requests go to one replica together, while that replica is not the busiest by far."""

    by: Annotated[
        Literal["none", "session", "client"],
        Field(description="none: the least busy; session: a header; client: who asks"),
    ] = "none"
    header: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9-]+$", description="Whose value names a session")
    ] = "x-session-id"
    most_percent: Annotated[
        int,
        Field(
            ge=101,
            le=1000,
            description="A replica gets no more of it when it has so much of the mean of all",
        ),
    ] = 150


class VirtualAddress(_Setting):
    """An address that one of two gateways has: keepalived moves it when that one fails."""

    address: Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+/\d+$", description="With its prefix")]
    interface: Annotated[str, Field(pattern=r"^[\w.@-]{1,15}$")]
    router_id: Annotated[int, Field(ge=1, le=255, description="The same on both, no one else's")]
    priority: Annotated[int, Field(ge=1, le=254, description="The higher one has it")] = 100
    password_file: Annotated[str, Field(description="On this machine; at most 8 bytes (VRRP)")]


class Gateway(_Setting):
    """One address for clients: HAProxy in front of all replicas of all models."""

    port: Port = 8443
    listen: Annotated[str, Field(description="Address that it binds")] = "0.0.0.0"  # noqa: S104
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
        int,
        Field(ge=10, le=86400, description="Longest silence of a server within a request"),
    ] = 600
    queue_seconds: Annotated[
        int, Field(ge=1, le=3600, description="How long a request waits where all servers are full")
    ] = 60
    per_server: Annotated[
        PositiveInt | None,
        Field(description="Requests that one server gets at once; the others wait; null: any"),
    ] = None
    max_body_mib: Annotated[int, Field(ge=1, le=1024, description="Largest request")] = 32
    metrics_port: Port = 8405
    virtual_address: VirtualAddress | None = None

    @model_validator(mode="after")
    def _open_gateways_are_deliberate(self) -> Gateway:
        mistakes = []
        if not self.clients and not self.allow_unauthenticated:
            mistakes.append(
                "nobody may ask: name `clients`, or set `allow_unauthenticated: true` for everybody"
            )
        if self.clients and self.allow_unauthenticated:
            mistakes.append("`clients` and `allow_unauthenticated` exclude each other: remove one")
        local = self.listen in {"127.0.0.1", "::1", "localhost"}
        if self.tls is None and not local and not self.allow_plain_http:
            mistakes.append(
                f"keys and prompts would travel readable to {self.listen}: set `tls`, or `listen: "
                "127.0.0.1`, or `allow_plain_http: true`"
            )
        names = [each.name for each in self.clients]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            mistakes.append(f"`clients` names {', '.join(twice)} twice")
        hashes = [each.key_sha256 for each in self.clients]
        if len(set(hashes)) < len(hashes):
            mistakes.append("two of `clients` have the same key: give each its own")
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self


class Balancer(_Setting):
    """A balancer of yours in place of our gateway: two commands, run on this machine.

    Each is a list of words, run without a shell; `{node}`, `{address}`, `{port}`, `{model}` and
    `{replica}` stand for the server that is meant. Status 0: done.
    """

    drain_command: Annotated[tuple[str, ...], Field(min_length=1)]
    undrain_command: Annotated[tuple[str, ...], Field(min_length=1)]
    seconds: Annotated[PositiveInt, Field(description="Deadline of each")] = 60


def _size(value: Any) -> Any:
    """Take 2 for two, "25%" for a quarter of all."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d?%|100%", value):
        return value
    raise ValueError(f'must be a number from 1 up, or a share as "25%" (got {value!r})')


WaveSize: TypeAlias = Annotated[int | str, BeforeValidator(_size)]


class Gates(_Setting):
    """What must hold before a replica gets requests again, and before the next wave."""

    soak_seconds: Annotated[
        int, Field(ge=0, le=86400, description="Under requests, until it is judged by them")
    ] = 60
    baseline_seconds: Annotated[
        int, Field(ge=5, le=3600, description="Looked at before anything is changed")
    ] = 30
    latency_ratio: Annotated[
        float,
        Field(ge=1, le=100, description="TTFT and ITL p99 at most so many times those of before"),
    ] = 1.5
    latency_least_requests: Annotated[
        PositiveInt, Field(description="Of fewer, on either side, no latency is judged")
    ] = 50
    error_ratio: Annotated[
        float, Field(ge=0, le=1, description="More errors of the server than before, at most")
    ] = 0.0
    findings: Annotated[bool, Field(description="New blocking findings of the check stop")] = True
    alerts: Annotated[
        bool, Field(description="New alerts about the wave's nodes stop, where a node watches")
    ] = True


class Upgrade(_Setting):
    """How the fleet is changed while it serves."""

    canary: Annotated[int, Field(ge=0, description="Groups in a wave before all others")] = 1
    waves: Annotated[
        tuple[WaveSize, ...],
        Field(
            min_length=1,
            description="Sizes of the waves that follow, in groups or percent of all; the last one "
            "is repeated",
        ),
    ] = (1,)
    failures: Annotated[
        int, Field(ge=0, description="Groups that may fail, and be rolled back, before it stops")
    ] = 0
    confirm: Annotated[
        Literal["start", "canary", "wave"],
        Field(description="Ask a person before the first wave; after the canary too; every wave"),
    ] = "start"
    headroom: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="How full the replicas that remain may become with the present load",
        ),
    ] = 0.85
    keep: Annotated[
        PositiveInt, Field(description="Replicas of a model that have to serve at any time")
    ] = 1
    gates: Gates = Gates()


class Golden(_Setting):
    """Prompts whose answers must be after a change what they were before."""

    prompts: Annotated[
        tuple[str, ...],
        AfterValidator(lambda given: tuple(dict.fromkeys(given))),
        Field(description="Completed with temperature 0"),
    ] = (
        "The capital of France is",
        "1, 2, 3, 4, 5,",
        "def fibonacci(n):",
    )
    max_tokens: Annotated[int, Field(ge=1, le=512)] = 16
    same: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of the tokens, from the first one on, that must be the same; 1: "
            "all; 0: an answer is enough",
        ),
    ] = 1.0
