"""Settings of a node's firewall.

Pure. `settings/node_settings.py` contains these settings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from gpufleet.settings.base import Network, Port, Seconds, Setting


def _range(value: Any) -> Any:
    """Parse 8080 or "8000-8010" into the first and last port of a range."""
    ports = [part.strip() for part in str(value).split("-")]
    if isinstance(value, bool) or not all(part.isdecimal() for part in ports) or len(ports) > 2:
        raise ValueError(
            f"must be a port or a range of ports, for example 8000-8010 (got {value!r})"
        )
    return int(ports[0]), int(ports[-1])


def _ascends(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError(f"begins with the larger of the two ports: write {value[1]}-{value[0]}")
    return value


PortRange = Annotated[
    tuple[Port, Port],
    BeforeValidator(_range, json_schema_input_type=int | str),
    AfterValidator(_ascends),
]


class Open(Setting):
    """Ports of your own services that the firewall leaves open."""

    ports: Annotated[
        PortRange, Field(description="One port, or the first and the last port of a range")
    ]
    protocol: Annotated[Literal["tcp", "udp"], Field(description="Transport protocol")] = "tcp"
    sources: Annotated[
        tuple[Network, ...],
        Field(description="Networks that may connect to these ports. Empty: any network"),
    ] = ()


class Firewall(Setting):
    """The firewall of a node: which of its ports other machines may reach."""

    policy: Annotated[
        Literal["own_ports", "drop"],
        Field(
            description="own_ports: filter only vLLM's ports. drop: close every port that "
            "these settings do not open"
        ),
    ] = "own_ports"
    clients: Annotated[
        tuple[Network, ...],
        Field(description="Networks that may connect to the endpoints. Empty: any network"),
    ] = ()
    monitoring: Annotated[
        tuple[Network, ...],
        Field(
            description="Networks that may connect to the exporters and to the endpoints' "
            "metrics. Empty: no network with `policy: drop`, and any network with `policy: "
            "own_ports`"
        ),
    ] = ()
    open: Annotated[tuple[Open, ...], Field(description="Additional open ports")] = ()
    confirm_seconds: Annotated[
        Seconds,
        Field(
            ge=20,
            le=600,
            description="If no new SSH connection succeeds within this time, the node "
            "restores its old rules",
        ),
    ] = 60
