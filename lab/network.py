"""Build the lab's network: a bridge, and a cable and namespace per node, without a way out.

A node can have further cables. Each further cable ends at the switch of its network. This machine
is not in these networks.

All functions converge: each function reads the present state and adds the missing parts, so you can
call it again after a `kill -9` at any point. `remove` finds all parts by their names and removes
them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, ip_network
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError
from lab import cgroup, link_delay, run_command
from lab.state import LabNode, LabState, lab_ids, number_of

# The search for a free network goes upwards from here. GPUFLEET_LAB_NET overrides it.
_FIRST_NET = IPv4Network("10.201.7.0/24")
_LAST_NET = IPv4Network("10.201.254.0/24")

# A lower priority than all routes of the machine: this route applies only if there is no bridge.
_FALLBACK_METRIC = "4096"

# A booted node uses about 10 inotify instances of root. The kernel's default limit of 128 is enough
# only for 13 nodes. The machine keeps the raised limit.
_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY_INSTANCES = 8192


def choose(state: LabState) -> IPv4Network:
    """
    Return the lab's /24 network: the requested one, its previous one, or the first free one.

    A network is free if this machine has no route to any of its addresses and no other lab has
    stored it. Raises `FleetError` if the requested network is not free, or if no network is free.
    """
    taken = [*_routed(state), *_other_networks(state)]
    if wanted := os.environ.get("GPUFLEET_LAB_NET"):
        return _checked(wanted, taken)
    for net in ([state.net] if state.net else []) + list(_candidates()):
        if not any(net.overlaps(other) for other in taken):
            return net
    raise FleetError(
        f"No free /24 between {_FIRST_NET} and {_LAST_NET} for the lab: "
        "set GPUFLEET_LAB_NET to a /24 to which this machine has no route."
    )


def up(state: LabState) -> None:
    """Create the bridge, and the rules that keep the nodes' traffic on it."""
    bridge = state.prefix
    if not _exists(bridge):
        # A bridge without its own MAC address uses that of a port, and changes it when ports are
        # added or removed. For some seconds, neighbours would then send to the old address.
        run_command.run(
            "ip", "link", "add", bridge, "address", _mac(state.machine), "type", "bridge"
        )
    _ip("addr", "replace", f"{state.machine}/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    _ip("route", "replace", "unreachable", str(state.subnet), "metric", _FALLBACK_METRIC)
    for number, _ in enumerate(state.networks, 1):
        # The bridge gets no address, because this machine is in none of these networks.
        if not _exists(switch := state.switch(number)):
            mac = _mac(state.machine, number)
            run_command.run("ip", "link", "add", switch, "address", mac, "type", "bridge")
        _ip("link", "set", switch, "up")
    # Packets are refused, not dropped, so that a node with a connection to the outside gets an
    # error at once. IPv6 needs no rule, because nodes have only link-local addresses.
    run_command.run(
        *("nft", "-f", "-"),
        stdin=f"""
            table ip {state.table} {{}}
            delete table ip {state.table}
            table ip {state.table} {{
                chain out {{
                    type filter hook prerouting priority -150
                    iifname "{bridge}" ip daddr != {{
                        {state.subnet}, 255.255.255.255, 224.0.0.0/4
                    }} reject with icmp type net-unreachable
                }}
            }}""",
    )
    if int(_INOTIFY.read_text()) < _INOTIFY_INSTANCES:
        _INOTIFY.write_text(str(_INOTIFY_INSTANCES))


def plug(state: LabState, node: LabNode) -> None:
    """Give a node its network namespace and a healthy cable to the bridge."""
    netns, port = state.netns(node.name), state.port(node)
    handle = Path("/run/netns") / netns
    if not os.path.ismount(handle):  # Path.is_mount() knows directories only
        handle.unlink(missing_ok=True)  # a file left from before the machine's last boot
        run_command.run("ip", "netns", "add", netns)
    if not _exists(port):
        end = ("name", "eth0", "address", _mac(node.address), "netns", netns)
        _ip("link", "add", port, "type", "veth", "peer", *end)
    cables = state.cables.get(node.name, {})
    _ip("link", "set", port, "master", state.prefix)
    _ip("-n", netns, "link", "set", "lo", "up")
    # Beside further interfaces eth0 is for management: it reaches this machine and no other node.
    prefix, other = ("32", "24") if cables else ("24", "32")
    run_command.run("bridge", "link", "set", "dev", port, "isolated", "on" if cables else "off")
    old = ("addr", "del", f"{node.address}/{other}", "dev", "eth0")
    run_command.run("ip", "-n", netns, *old, check=False)
    _ip("-n", netns, "addr", "replace", f"{node.address}/{prefix}", "dev", "eth0")
    _ip("-n", netns, "link", "set", "eth0", "up")
    if cables:
        _ip("-n", netns, "route", "replace", str(state.machine), "dev", "eth0")
    _ip("-n", netns, "route", "replace", "default", "via", str(state.machine))
    for interface, address in cables.items():
        _lay(state, node, interface, IPv4Interface(address))
    heal(state, node)


def _lay(state: LabState, node: LabNode, interface: str, address: IPv4Interface) -> None:
    """Give a node an additional cable to the switch of its address's network."""
    netns = state.netns(node.name)
    number = state.networks.index(address.network) + 1
    switch = state.switch(number)
    if not _exists(port := f"{switch}.{node.number}"):
        mac = _mac(node.address, number)
        end = ("name", interface, "address", mac, "netns", netns)
        _ip("link", "add", port, "type", "veth", "peer", *end)
    _ip("link", "set", port, "master", switch)
    _ip("-n", netns, "addr", "replace", str(address), "dev", interface)
    _ip("-n", netns, "link", "set", interface, "up")


def pull(state: LabState) -> None:
    """Remove all additional cables and their switches."""
    for name in _further(state):
        run_command.run("ip", "link", "del", name, check=False)


def _further(state: LabState, number: int | str = "*") -> list[str]:
    """Return the interfaces of additional networks, ports first; for a node, only its ports."""
    pattern = state.switch("[1-9]")
    links = Path("/sys/class/net")
    ports = [each.name for each in links.glob(f"{pattern}.{number}")]
    return ports + ([each.name for each in links.glob(pattern)] if number == "*" else [])


def unplug(state: LabState, name: str, number: int) -> None:
    """Remove a node's cable and namespace, if they exist."""
    run_command.run("nft", "delete", "table", "netdev", f"{state.table}_{number}", check=False)
    run_command.run("ip", "link", "del", f"{state.prefix}.{number}", check=False)
    run_command.run("ip", "link", "del", state.tap(number), check=False)
    for port in _further(state, number):
        run_command.run("ip", "link", "del", port, check=False)
    handle = Path("/run/netns") / state.netns(name)
    if handle.exists():
        run_command.run("ip", "netns", "del", handle.name, check=False)
        handle.unlink(missing_ok=True)


def remove(state: LabState) -> None:
    """Remove the bridge, its rules, and every port and namespace with the lab's name."""
    for handle in Path("/run/netns").glob(f"{state.prefix}-*-*"):
        name = handle.name.removeprefix(f"{state.prefix}-")
        unplug(state, name, number_of(name))
    for port in Path("/sys/class/net").glob(f"{state.prefix}.*"):
        run_command.run("ip", "link", "del", port.name, check=False)
    for tap in Path("/sys/class/net").glob(state.tap("*")):
        run_command.run("ip", "link", "del", tap.name, check=False)
    pull(state)
    if _exists(state.prefix):
        run_command.run("ip", "link", "del", state.prefix)
    for table in _tables():
        if table["name"] == state.table or table["name"].startswith(f"{state.table}_"):
            run_command.run("nft", "delete", "table", table["family"], table["name"])
    if state.net and any(_blocks(route) == state.net for route in _routes()):
        _ip("route", "del", "unreachable", str(state.net), "metric", _FALLBACK_METRIC)


def _tables() -> list[dict[str, Any]]:
    """Return all nftables tables, or none if nft is not installed."""
    if not shutil.which("nft"):
        return []
    listed = json.loads(run_command.run("nft", "-j", "list", "tables"))["nftables"]
    return [entry["table"] for entry in listed if "table" in entry]


# -- faults ----------------------------------------------------------------------------------------


def pull_cables(state: LabState, node: LabNode) -> None:
    """Pull every cable, which loses sent packets without informing peers."""
    for port in (state.port(node), *_further(state, node.number)):
        _ip("link", "set", port, "down")


def heal(state: LabState, node: LabNode) -> None:
    """Plug in the cables again, without loss or delay and at full speed."""
    table, port = f"{state.table}_{node.number}", state.port(node)
    run_command.run("nft", "delete", "table", "netdev", table, check=False)
    run_command.run("tc", "qdisc", "del", "dev", port, "root", check=False)
    if _exists(tap := state.tap(node.number)):
        cgroup.remove(_carrier(state, node))
        _ip("link", "del", tap)
        _ip("link", "set", port, "master", state.prefix)
    for cable in (port, *_further(state, node.number)):
        _ip("link", "set", cable, "up")


def lose(state: LabState, node: LabNode, percent: int) -> None:
    """Drop `percent` of the packets in each direction; 20 loses 36 % of echoes."""
    if not 0 <= percent <= 100:
        raise FleetError(f"Loss is {percent}: it is a percentage, 0 to 100.")
    _drop(state, node, f"numgen random mod 100 < {percent}", "ingress", "egress")


def deafen(state: LabState, node: LabNode, peer: LabNode) -> None:
    """Drop packets from `peer` to the node, in this direction only."""
    _drop(state, node, f"ip saddr {peer.address}", "egress")


def delay(state: LabState, node: LabNode, milliseconds: int) -> None:
    """Delay every packet in each direction; 200 makes a round trip of 400 ms."""
    heal(state, node)
    tap, port = state.tap(node.number), state.port(node)
    _ip("tuntap", "add", tap, "mode", "tap", "vnet_hdr")
    _ip("link", "set", tap, "master", state.prefix, "up")
    _ip("link", "set", port, "nomaster")
    program = [sys.executable, "-I", link_delay.__file__, port, tap, str(milliseconds)]
    cgroup.start(_carrier(state, node), program, state.dir / "delay.log")


def _carrier(state: LabState, node: LabNode) -> str:
    """Return the cgroup of the delaying program, which ends with the node's power."""
    return f"{state.prefix}/{node.name}/delay"


def _drop(state: LabState, node: LabNode, what: str, *hooks: str) -> None:
    """Drop packets at the node's port: `ingress` for sent ones, `egress` for received ones."""
    table, port = f"{state.table}_{node.number}", state.port(node)
    chains = "".join(
        f"""
                chain {hook} {{ type filter hook {hook} device "{port}" priority 0; {what} drop
                }}"""
        for hook in hooks
    )
    run_command.run(
        *("nft", "-f", "-"),
        stdin=f"""
            table netdev {table} {{}}
            delete table netdev {table}
            table netdev {table} {{{chains}
            }}""",
    )


def throttle(state: LabState, node: LabNode, rate: str) -> None:
    """Limit the node's receive rate to `rate` in tc's form: `1mbit`, `500kbit`."""
    # 16 kB holds the largest burst of a few full packets; 2 s of queue before packets are lost.
    shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "2s")
    run_command.run("tc", "qdisc", "replace", "dev", state.port(node), "root", *shape)


# -- what is there ---------------------------------------------------------------------------------


def _ip(*args: str) -> None:
    run_command.run("ip", *args)


def _exists(interface: str) -> bool:
    return (Path("/sys/class/net") / interface).exists()


def _mac(address: IPv4Address, network: int = 0) -> str:
    """Return a locally administered MAC, equal at every `up`: 02, network and address."""
    return ":".join(f"{byte:02x}" for byte in (2, network, *address.packed))


def _candidates() -> Iterator[IPv4Network]:
    for net in ip_network("10.201.0.0/16").subnets(new_prefix=24):
        if isinstance(net, IPv4Network) and _FIRST_NET <= net <= _LAST_NET:
            yield net


def _routes() -> list[dict[str, Any]]:
    routes: list[dict[str, Any]] = json.loads(run_command.run("ip", "-j", "-4", "route"))
    return [route for route in routes if route["dst"] != "default"]


def _blocks(route: dict[str, Any]) -> IPv4Network | None:
    """Return the network that a lab keeps with this route, or None for other routes."""
    ours = route.get("type") == "unreachable" and str(route.get("metric")) == _FALLBACK_METRIC
    return IPv4Network(route["dst"]) if ours else None


def _routed(state: LabState) -> list[IPv4Network]:
    """Return the networks that this machine routes for purposes other than this lab."""
    return [
        IPv4Network(route["dst"], strict=False)
        for route in _routes()
        if route.get("dev") != state.prefix and not (state.net and _blocks(route) == state.net)
    ]


def _other_networks(state: LabState) -> list[IPv4Network]:
    """Return the networks of the machine's other labs, up or not."""
    others = [LabState.load(name) for name in lab_ids()]
    return [other.net for other in others if other.net and other.id != state.id]


def _checked(wanted: str, taken: list[IPv4Network]) -> IPv4Network:
    try:
        net = IPv4Network(wanted)
    except ValueError as error:
        raise FleetError(f"GPUFLEET_LAB_NET is {wanted!r}: {error}.") from error
    if net.prefixlen != 24:
        raise FleetError(f"GPUFLEET_LAB_NET is {wanted}: a lab's network is a /24.")
    if clash := [str(other) for other in taken if net.overlaps(other)]:
        raise FleetError(
            f"GPUFLEET_LAB_NET is {wanted}, but this machine or another lab already uses "
            f"{', '.join(clash)}: choose another /24."
        )
    return net
