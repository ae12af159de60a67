"""
Render the nftables table of a node's ports that other machines may reach. Pure.

Any client that reaches the internal ports of a replica can run code on the node. On these ports,
vLLM, Ray, torch and NIXL have no authentication and load pickles. So the table opens these ports
only to the other nodes of the replica, on the interface that the replica uses. Endpoints and
exporters are open to the clients that the settings list.

nftables cannot know the ports that vLLM, NCCL and Ray choose themselves. The table recognises such
a port by the second packet of a connection (SYN-ACK). This packet belongs to the listening socket,
so its user is the user of the listening program (`meta skuid`, nft(8)). A SYN cookie belongs to no
socket and is dropped, so a SYN flood cannot open a port.

The table is independent of other tables. It changes no other table, and packets that another table
drops stay dropped.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, collapse_addresses
from typing import Any, TypeAlias

from gpufleet import node_paths
from gpufleet.errors import FleetError
from gpufleet.planning.multinode.launch import endpoint_ports
from gpufleet.planning.multinode.rank_ports import PORTS
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving import watchdog_unit
from gpufleet.settings.base import LOOPBACK
from gpufleet.settings.firewall_settings import Firewall
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.templates import render_template

SERVICE = "gpufleet-firewall.service"
DIRECTORY = node_paths.CONFIGURATION
RULES = f"{DIRECTORY}/firewall.nft"
"""
The ruleset that the service loads at boot.

on_node/network/firewall.py writes it once the rules are confirmed.
"""
TEMPLATE = "firewall/nftables.conf.j2"

Range: TypeAlias = tuple[int, int]
Networks: TypeAlias = Iterable[IPv4Network | IPv6Network]

# Names of interfaces have at most 15 of these characters (Linux' IFNAMSIZ). nft would read a * at
# the end as a pattern.
_INTERFACE = re.compile(r"[A-Za-z0-9_.:-]{1,15}")
_LAST_PRIVILEGED = 1023
"""
The last port on which only root may listen (net.ipv4.ip_unprivileged_port_start).

vLLM uses only higher ports.
"""


@dataclass(frozen=True)
class PeerAddress:
    """
    An address of this node, and the nodes that connect to it.

    The nodes belong to one replica, or to prefill and decode.
    """

    interface: str
    """
    The name of the interface.

    "" means any interface, and is used for a running replica whose interface is not known.
    """
    address: str
    """This node's address."""
    others: tuple[str, ...]
    """The addresses of the other nodes."""
    ports: tuple[Range, ...]
    """
    The known ports between the nodes.

    On the ports of the first range, ranks also exchange datagrams.
    """
    ranks: bool = True
    """
    Whether the nodes run ranks of one replica. False: the nodes are partners in prefill and decode.
    """


def render_rules(
    stages: Iterable[Stage],
    settings: NodeSettings,
    *,
    ssh_port: int = 22,
    running: Iterable[Running] = (),
    fellows: Iterable[str] = (),
) -> str:
    """
    Return the table of a node in nft's syntax.

    `stages` are the node's planned stages. `running` are the running stages, whose ports also stay
    open. `ssh_port` is the port of the deploy's SSH connection. `fellows` are the addresses of the
    other GPU nodes of the fleet, which copy releases and models from this node. Raises `FleetError`
    for ports in the settings that must not be opened, and for interface names that nft does not
    accept.
    """
    wanted = settings.firewall or Firewall()
    ours, old = tuple(stages), tuple(running)
    meetings = [*_planned(ours), *_running_peers(old)]
    guarded = _merged(each for meeting in meetings for each in meeting.ports)
    if problems := [
        *_unsupported(meetings),
        *_contradictions(wanted, guarded),
        *_exposed(settings),
    ]:
        raise FleetError(*problems)
    endpoints = _endpoints(ours, settings, old)
    limited = {
        protocol: _ports(
            each.ports for each in wanted.open if each.sources and each.protocol == protocol
        )
        for protocol in ("tcp", "udp")
    }
    opened = [each.ports for each in wanted.open if each.protocol == "tcp"]
    front = list(_front_rules(settings))
    return render_template(
        TEMPLATE,
        drop=wanted.policy == "drop",
        links=list(_links(meetings)),
        guarded=_ports(guarded),
        # A client of a server also reads the server's state from the watchdog.
        endpoints=_ports([*endpoints, *_watchdogs(ours, settings)]),
        # Endpoints also serve vLLM's metrics.
        clients=_sources([*wanted.clients, *wanted.monitoring] if wanted.clients else []),
        # A gateway's clients need keys. vLLM's clients are the gateways and the networks in
        # `firewall.clients`.
        front=_ports(front),
        shares_address=bool(settings.gateway and settings.gateway.virtual_address),
        exporters=_ports(_exporters(settings)),
        monitoring=_sources(wanted.monitoring),
        fellows=_addresses(fellows),
        copies=_ports(_copy_rules(settings)),
        opened=[
            {
                "protocol": each.protocol,
                "ports": _ports([each.ports]),
                "sources": _sources(each.sources),
            }
            for each in wanted.open
        ],
        limited=[(protocol, ports) for protocol, ports in limited.items() if ports],
        ssh=ssh_port,
        user=settings.servers.user if settings.servers else "",
        answered=_ports([(1, _LAST_PRIVILEGED), (ssh_port, ssh_port), *endpoints, *opened]),
    )


def render_service() -> str:
    """Return the systemd unit that loads the rules at boot, before any network is up."""
    return render_template("firewall/gpufleet-firewall.service.j2", rules=RULES)


def changes(loaded: str | None, wanted: str) -> tuple[str, ...]:
    """
    Return the changes from the loaded table to the new one, as lines that begin with + or -.

    >>> changes(None, "table inet gpufleet {\\n}")
    ('+ table inet gpufleet {', '+ }')
    """
    before, after = ((text or "").splitlines() for text in (loaded, wanted))
    lines = difflib.unified_diff(before, after, n=0, lineterm="")
    return tuple(
        f"{line[0]} {' '.join(line[1:].split())}"
        for line in lines
        if line[0] in "+-" and line[:3] not in {"+++", "---"} and line[1:].strip()
    )


def problems(seen: Mapping[str, Any]) -> Iterator[str]:
    """
    Yield the problems of a node's firewall. `seen` is the answer of `on_node/network/firewall.py`.

    An empty answer is also a problem.
    """
    if not seen:
        yield "the firewall could not be queried"
        return
    if seen.get("error"):
        yield f"the firewall's rules are unknown: {seen['error']}"
        return
    if seen["loaded"] is None:
        yield "the firewall's table `inet gpufleet` is not loaded: run the deploy"
    elif seen["loaded"] != seen["canonical"]:
        lines = "; ".join(changes(seen["canonical"], seen["loaded"]))
        yield f"the firewall's loaded rules differ from the declared rules: {lines}"
    if not seen["saved"]:
        yield f"{RULES} differs from the declared rules, and would be loaded after a reboot"
    if seen["pending"]:
        yield "the firewall's new rules were not confirmed, so they will be rolled back"
    if seen["service"] != "active":
        state = seen["service"] or "unknown"
        yield f"{SERVICE} is {state}, so no rules would be loaded after a reboot"


# Connections between nodes


def _planned(stages: Iterable[Stage]) -> Iterator[PeerAddress]:
    for stage in stages:
        if stage.handover:
            networks = dict(stage.handover.networks)
            own = networks.pop(stage.node)
            side = stage.handover.port
            others = tuple(each.address for each in networks.values())
            ports = [(side, side + stage.data_parallel - 1)]
            if others:
                yield PeerAddress(own.interface, own.address, others, tuple(ports), ranks=False)
        if stage.group is None:
            continue
        networks = dict(stage.group.networks)
        own = networks.pop(stage.node)
        first = stage.group.cluster_port
        ports = [(first, first + PORTS - 1)]
        if stage.group.side_channel_port:
            side = stage.group.side_channel_port
            ports.append((side, side + stage.data_parallel - 1))
        others = tuple(each.address for each in networks.values())
        yield PeerAddress(own.interface, own.address, others, tuple(ports))


def _running_peers(running: Iterable[Running]) -> Iterator[PeerAddress]:
    """
    Yield the peer addresses of running stages.

    The addresses are in the arguments of their units (`multinode.launch.command`).
    """
    for each in running:
        said = [line.partition(" ") for line in each.arguments]
        rank = next((number for name, _, number in said if name == "--rank"), "")
        port = next((number for name, _, number in said if name == "--port"), "")
        nodes = [value.partition("=")[2] for name, _, value in said if name == "--node"]
        if rank.isdecimal() and port.isdecimal() and int(rank) < len(nodes):
            own = nodes.pop(int(rank))
            yield PeerAddress("", own, tuple(nodes), ((int(port), int(port) + PORTS - 1),))


def _links(meetings: Sequence[PeerAddress]) -> Iterator[dict[str, Any]]:
    """
    Yield each address of this node that other nodes may reach, with the addresses of these nodes.
    """
    known = {each.address: each.interface for each in meetings if each.interface}
    for address in sorted({each.address for each in meetings}, key=_by_number):
        here = [each for each in meetings if each.address == address]
        interface = known.get(address, "")
        by_range: dict[Range, set[str]] = {}
        for each in (each for each in here if each.ranks):
            by_range.setdefault(each.ports[0], set()).update(each.others)
        yield {
            "received": " ".join([*_named("iifname", interface), f"ip daddr {address}"]),
            "sent": " ".join([*_named("oifname", interface), f"ip saddr {address}"]),
            "others": _addresses(other for each in here for other in each.others),
            "ports": [
                {"range": _ports([ports]), "others": _addresses(others)}
                for ports, others in sorted(by_range.items())
            ],
        }


def _named(keyword: str, interface: str) -> list[str]:
    return [f'{keyword} "{interface}"'] if interface else []


def _addresses(addresses: Iterable[str]) -> list[str]:
    return sorted(set(addresses), key=_by_number)


def _by_number(address: str) -> tuple[int, ...]:
    return tuple(int(part) for part in address.split("."))


# Ports


def _endpoints(
    stages: Iterable[Stage], settings: NodeSettings, running: Iterable[Running]
) -> list[Range]:
    """Return the ports on which the node answers clients, including the ports of running stages."""
    found = {each.port for each in running if each.port and _has_server(each)}
    for stage in stages:
        model = settings.serving[stage.model]
        found.update(endpoint_ports(stage, model) if stage.group else (stage.port,))
    return [(port, port) for port in sorted(found)]


def _watchdogs(stages: Iterable[Stage], settings: NodeSettings) -> Iterator[Range]:
    port = settings.watchdog_port
    if port and watchdog_unit.is_needed(stages, settings.serving):
        yield (port, port)


def _has_server(each: Running) -> bool:
    """
    Return whether a running stage has a server. Only the first rank of a replica always has one.
    """
    has_server = any(line.endswith("vllm serve") for line in each.arguments)
    return each.rank == 0 or (has_server and "--headless" not in each.arguments)


def _front_rules(settings: NodeSettings) -> Iterator[Range]:
    """
    Yield the ports for clients of a gateway and of LiteLLM.

    Ports that `firewall.open` already opens are omitted.
    """
    wanted = settings.firewall or Firewall()
    ports = [settings.gateway.port] if settings.gateway else []
    if settings.litellm and settings.litellm.listen not in LOOPBACK:
        ports.append(settings.litellm.port)
    for port in ports:
        if not any(
            each.ports[0] <= port <= each.ports[1] and each.protocol == "tcp"
            for each in wanted.open
        ):
            yield (port, port)


def _copy_rules(settings: NodeSettings) -> Iterator[Range]:
    """Yield the ports from which other nodes copy releases and models."""
    if settings.servers and settings.servers.distribution.enabled:
        yield (settings.servers.distribution.port, settings.servers.distribution.port)


def _exporters(settings: NodeSettings) -> list[Range]:
    named = ("node_exporter.port", "dcgm.port", "gateway.metrics_port")
    return [(port, port) for key, port in settings.ports.items() if key in named]


def _exposed(settings: NodeSettings) -> Iterator[str]:
    """Yield a sentence for each range in `firewall.open` that would expose exporters."""
    wanted = settings.firewall or Firewall()
    for first, last in (each.ports for each in wanted.open if each.protocol == "tcp"):
        if behind := [port for port, _ in _exporters(settings) if first <= port <= last]:
            yield (
                f"firewall.open: {_ports([(first, last)])} also opens "
                f"{' and '.join(map(str, behind))}, where exporters listen: list the clients of "
                "exporters in `firewall.monitoring` instead"
            )


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Join overlapping and adjacent ranges, because nft refuses overlaps in a set."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def _ports(ranges: Iterable[Range]) -> str:
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in _merged(ranges)
    )


def _sources(networks: Networks) -> list[dict[str, str]]:
    """
    Return networks with nft's name of their address family.

    A network within a larger one is omitted.
    """
    named = list(networks)
    found: list[dict[str, str]] = []
    v4 = [each for each in named if isinstance(each, IPv4Network)]
    v6 = [each for each in named if isinstance(each, IPv6Network)]
    found += ({"family": "ip", "network": str(each)} for each in collapse_addresses(v4))
    found += ({"family": "ip6", "network": str(each)} for each in collapse_addresses(v6))
    return found


# Refusals


def _unsupported(meetings: Iterable[PeerAddress]) -> Iterator[str]:
    for name in sorted({each.interface for each in meetings}):
        if name and not _INTERFACE.fullmatch(name):
            yield (
                f"the interface {name!r} connects nodes of a replica, but nftables does not accept "
                "this name: rename the interface, or set a different network in `cluster_network`"
            )


def _contradictions(wanted: Firewall, guarded: Sequence[Range]) -> Iterator[str]:
    for first, last in (each.ports for each in wanted.open):
        for begin, end in guarded:
            if first <= end and begin <= last:
                yield (
                    f"firewall.open: {_ports([(first, last)])} overlaps {_ports([(begin, end)])}, "
                    "which the nodes of a replica use between each other. Any client that reaches "
                    "such a port can run code on the node: remove these ports from firewall.open, "
                    "or change `cluster_port`"
                )
