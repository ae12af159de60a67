"""Settings of a node's firewall.

Pure, like `settings/node_settings.py`, which contains these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, IPvAnyNetwork

from gpufleet.settings.base import Port, Seconds, Setting


def _range(value: Any) -> Any:
    """Parse 8080 or "8000-8010" into the first and last port of a range."""
    ports = [part.strip() for part in str(value).split("-")]
    if isinstance(value, bool) or not all(part.isdecimal() for part in ports) or len(ports) > 2:
        raise ValueError(f"must be a port or a range of them, as 8000-8010 (got {value!r})")
    return int(ports[0]), int(ports[-1])


def _ascends(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError(f"starts with the larger port: write {value[1]}-{value[0]}")
    return value


PortRange = Annotated[
    tuple[Port, Port],
    BeforeValidator(_range, json_schema_input_type=int | str),
    AfterValidator(_ascends),
]


class Open(Setting):
    """Ports of your own services that the firewall leaves open."""

    ports: Annotated[PortRange, Field(description="A port, or the first and last of a range")]
    protocol: Annotated[Literal["tcp", "udp"], Field(description="Transport")] = "tcp"
    sources: Annotated[
        tuple[IPvAnyNetwork, ...], Field(description="Networks that may connect; empty: any")
    ] = ()


class Firewall(Setting):
    """The node's ports that other machines may reach."""

    policy: Annotated[
        Literal["own_ports", "drop"],
        Field(
            description="own_ports: filter vLLM's ports only. drop: close every port that is "
            "not opened here"
        ),
    ] = "own_ports"
    clients: Annotated[
        tuple[IPvAnyNetwork, ...],
        Field(description="Networks that may connect to the endpoints; empty: any"),
    ] = ()
    monitoring: Annotated[
        tuple[IPvAnyNetwork, ...],
        Field(
            description="Networks that may connect to the exporters and the endpoints' "
            "metrics; empty: none with `drop`, any with `own_ports`"
        ),
    ] = ()
    open: Annotated[tuple[Open, ...], Field(description="Additional open ports")] = ()
    confirm_seconds: Annotated[
        Seconds,
        Field(
            ge=20,
            le=600,
            description="Seconds until new rules are rolled back, unless a new SSH "
            "connection succeeds",
        ),
    ] = 60
