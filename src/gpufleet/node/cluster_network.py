"""
Find the interface by which each node of a replica reaches the other nodes. Pure.

The module takes the nodes' probes and returns the interface and IPv4 address of each node. Without
this choice, vLLM, Gloo and NCCL would use the default route or the address of the host name. Nodes
usually have several networks, so these may be wrong.

1. If the operator sets a network, the interface of each node with an address in this network is
   used.
2. Otherwise, a network is used in which every node has an address on a hardware interface that is
   up. Networks with RDMA NICs come first, then the fastest, then those with the same interface name
   on all nodes, then the first by name. A network in which two nodes have the same address is not
   used, because it is local to each node, like Docker's.

A probe shows only the configuration, and not which traffic a switch permits. The ranks test the
traffic before they start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import AddressValueError, IPv4Interface, IPv4Network, NetmaskValueError
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.node.nic_affinity import nearest_by_class, nic_classes
from gpufleet.node.topology import value_or

INFINIBAND = "InfiniBand"
ROCE = "Ethernet"
"""`link_layer` of an Ethernet (RoCE) RDMA port in /sys/class/infiniband."""

_ACTIVE = "4:"  # enum ib_port_state, rdma/ib_verbs.h: "4: ACTIVE"

# Names of virtual devices. They connect only parts of the node itself, such as containers and
# virtual machines, or transport packets over a different network, such as VPNs and overlays.
_VIRTUAL = re.compile(
    r"(docker|br-[0-9a-f]{12}$|virbr|vnet|vmnet|lxcbr|lxdbr|incusbr|podman|cni|flannel|cali|cilium"
    r"|weave|kube|nodelocaldns|antrea|ovn|ovs-|tailscale|zt[a-z0-9]{8,}|wg|tun|tap|ppp|nebula|dummy"
    r"|ifb|gre|sit|ip6tnl|tunl)"
)
# Linux' names of such kinds of devices (DEVTYPE in the device's uevent).
_VIRTUAL_KINDS = {"wireguard", "tun", "vxlan", "geneve", "dummy", "ppp", "macsec"}
_STATES_UP = {"up", "unknown"}  # a device whose driver does not report its state is "unknown"


@dataclass(frozen=True)
class Network:
    """The interface and address by which a node reaches the other nodes of its replica."""

    interface: str
    address: str
    """IPv4 address of the interface."""
    hcas: tuple[str, ...] = ()
    """
    The RDMA devices near the replica's GPUs on this node, with the active port, such as `mlx5_0:1`.

    If it is empty, NCCL uses TCP, or chooses devices itself.
    """
    no_rdma: bool = False
    """Whether the replica must not use RDMA, because not all of its nodes can use it."""
    mtu: int | None = None
    why: str = ""
    """The reason for this network, with the alternatives. It is the same for all nodes."""


@dataclass(frozen=True)
class _Interface:
    """
    A net device with one of its IPv4 addresses.

    `own` is None if the device has no IPv4 address, or if the address has an unknown prefix.
    """

    name: str
    own: IPv4Interface | None
    alone: str | None
    """The address, if its prefix is unknown."""
    speed: int
    """Speed in Mbit/s, or 0 if unknown."""
    rdma: bool
    mtu: int | None
    down: bool
    virtual: str
    """Why the interface cannot reach other nodes, or ""."""

    @property
    def flaw(self) -> str:
        """Return why the interface is used only if the operator sets its network, or ""."""
        if self.down:
            return "is down"
        if self.own is None:
            return f"{self.alone}, with unknown prefix" if self.alone else "no IPv4 address"
        if self.own.is_link_local or self.own.is_loopback:
            return "a loopback or link-local address"
        return self.virtual

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Return the sort key of the interface. The best interface has the smallest key."""
        return (not self.rdma, -self.speed, self.name)

    def __str__(self) -> str:
        address = self.own or self.alone
        return f"{self.name} {address}" if address else self.name


def networks(
    replica: str,
    documents: Mapping[str, Mapping[str, Any]],
    gpus: Mapping[str, Collection[int]],
    named: Mapping[str, IPv4Network | None] | None = None,
) -> dict[str, Network]:
    """
    Return the network by which each node of a replica reaches the other nodes.

    `documents` has the nodes' probes in the order of their ranks. `gpus` has the NVML indices of
    the replica's GPUs on each node. `named` has the `cluster_network` of each node for which it is
    set. Raises `FleetError` if no network connects the nodes. The error lists every interface with
    the reason against it.
    """
    found = {node: list(_interfaces(document)) for node, document in documents.items()}
    wanted = {node: (named or {}).get(node) for node in documents}
    if any(wanted.values()):
        chosen, why = _on_named_network(replica, found, wanted)
    else:
        chosen, why = _derived(replica, found)
    sizes = {each.mtu for each in chosen.values()}
    if len(sizes) > 1:
        each_mtu = ", ".join(f"{each.mtu} on {node}" for node, each in chosen.items())
        why += f"; the MTU differs ({each_mtu}), so packets of the larger size may be lost"
    hcas, remark = _hcas(documents, gpus)
    return {
        node: Network(
            interface=each.name,
            address=str(each.own.ip if each.own else each.alone),
            hcas=hcas.get(node, ()),
            no_rdma=bool(remark),
            mtu=each.mtu,
            why=why + remark,
        )
        for node, each in chosen.items()
    }


def interface_addresses(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the addresses of all interfaces in a node's probe."""
    nics = value_or(document.get("nics"))
    found: dict[str, None] = {}
    for each in value_or(nics.get("net"), []) if isinstance(nics, Mapping) else ():
        written = [*(value_or(each.get("networks")) or ()), *(value_or(each.get("ipv6")) or ())]
        first = value_or(each.get("ipv4"))
        for text in [first, *written] if isinstance(first, str) else written:
            found[str(text).partition("/")[0]] = None
    return tuple(found)


def addresses(document: Mapping[str, Any]) -> tuple[str, ...]:
    """
    Return the addresses by which other nodes may reach a node, in the order of its interfaces.
    """
    found = (str(each.own.ip) for each in _interfaces(document) if each.own and not each.flaw)
    return tuple(dict.fromkeys(found))


def describe_networks(replica: str, found: Mapping[str, Network]) -> str:
    """Return a line for the plan with a replica's network and the reason for it."""
    where = ", ".join(f"{node} {each.interface} {each.address}" for node, each in found.items())
    why = next((each.why for each in found.values()), "")
    return f"{replica}: the nodes of this replica communicate over {where}: {why}"


# The network that the operator names


def _on_named_network(
    replica: str,
    found: Mapping[str, list[_Interface]],
    wanted: Mapping[str, IPv4Network | None],
) -> tuple[dict[str, _Interface], str]:
    problems = []
    chosen = {}
    more = []
    for node, interfaces in found.items():
        network = wanted[node]
        if network is None:
            which = next(str(each) for each in wanted.values() if each)
            problems.append(
                f"{node}: cluster_network is not set, but it is set for other nodes of {replica} "
                f"({which}): set it for all of these nodes or for none of them"
            )
            continue
        inside = sorted((each for each in interfaces if _lies_in(each, network)), key=_order)
        usable = [each for each in inside if not each.down]
        if not usable:
            tried = "; ".join(f"{each} is down" for each in inside) or _listing(interfaces)
            problems.append(
                f"{node}: no interface has an address in cluster_network {network}, but {replica} "
                f"needs such an address on this node: {tried}"
            )
            continue
        chosen[node] = usable[0]
        more += [f"{node} {each.name}" for each in usable[1:]]
    problems += _doubles(replica, chosen)
    if problems:
        raise FleetError(*problems)
    ranges = ", ".join(dict.fromkeys(str(each) for each in wanted.values()))
    also = f"; other interfaces in this network: {', '.join(more)}" if more else ""
    return chosen, f"cluster_network is set to {ranges}{also}"


def _lies_in(each: _Interface, network: IPv4Network) -> bool:
    address = each.own or (IPv4Interface(each.alone) if each.alone else None)
    return address is not None and address.ip in network


def _doubles(replica: str, chosen: Mapping[str, _Interface]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for node, each in chosen.items():
        address = str(each.own.ip if each.own else each.alone)
        if address in owners:
            yield (
                f"{owners[address]} and {node} have the same address {address} in "
                f"cluster_network, and {replica} needs both nodes: set a network in which each "
                "node has its own address"
            )
        owners.setdefault(address, node)


# The network that all have


def _derived(
    replica: str, found: Mapping[str, list[_Interface]]
) -> tuple[dict[str, _Interface], str]:
    usable = {
        node: [each for each in interfaces if not each.flaw] for node, interfaces in found.items()
    }
    everywhere = set.intersection(
        *({each.own.network for each in own if each.own} for own in usable.values())
    )
    choices = []
    doubled: dict[IPv4Network, str] = {}
    for network in everywhere:
        members = {
            node: min((each for each in own if _has(each, network)), key=_order)
            for node, own in usable.items()
        }
        if same := _same_address(members):
            doubled[network] = same
        else:
            choices.append((_rank(network, members), network, members))
    if not choices:
        raise FleetError(_none(replica, found, usable, doubled))
    (_, network, chosen), *others = sorted(choices, key=lambda choice: choice[0])
    why = f"{network} is the only network that all these nodes have ({_speed(chosen)})"
    if others:
        also = ", ".join(
            f"{other} ({'/'.join(_names(members))}, {_speed(members)})"
            for _, other, members in others
        )
        why = (
            f"{network} is the first choice of the networks that all these nodes have "
            f"({_speed(chosen)}). To use a different one ({also}), set `cluster_network`"
        )
    return chosen, why


def _has(each: _Interface, network: IPv4Network) -> bool:
    return each.own is not None and each.own.network == network


def _same_address(members: Mapping[str, _Interface]) -> str:
    owners: dict[str, str] = {}
    for node, each in members.items():
        address = str(each.own.ip if each.own else "")
        if address in owners:
            return f"{owners[address]} has the same address"
        owners[address] = node
    return ""


def _rank(network: IPv4Network, members: Mapping[str, _Interface]) -> tuple[object, ...]:
    """Return the sort key of a network. The best network has the smallest key."""
    names = _names(members)
    return (
        not all(each.rdma for each in members.values()),
        -min(each.speed for each in members.values()),
        len(names) > 1,
        names,
        network,
    )


def _names(members: Mapping[str, _Interface]) -> list[str]:
    return sorted({each.name for each in members.values()})


def _order(each: _Interface) -> tuple[object, ...]:
    return each.sort_key


def _speed(members: Mapping[str, _Interface]) -> str:
    speed = min(each.speed for each in members.values())
    said = f"{speed / 1000:g} Gbit/s" if speed else "of unknown speed"
    return f"{said}, RDMA" if all(each.rdma for each in members.values()) else said


def _none(
    replica: str,
    found: Mapping[str, list[_Interface]],
    usable: Mapping[str, list[_Interface]],
    doubled: Mapping[IPv4Network, str],
) -> str:
    tried = "; ".join(
        f"on {node} "
        + _listing(
            interfaces,
            {each: _not_shared(node, each, usable, doubled) for each in usable[node]},
        )
        for node, interfaces in found.items()
    )
    if any(each.alone for own in found.values() for each in own):
        tried += ". Addresses without a prefix come from an older probe: probe these nodes again"
    return (
        f"{replica} spans {' and '.join(found)}, but no network connects these nodes. Set a "
        "network in `cluster_network`, or configure one on the nodes' interfaces. If the nodes "
        "reach each other through a router, set a network that contains an address of each node. "
        f"Tried: {tried}"
    )


def _not_shared(
    node: str,
    each: _Interface,
    usable: Mapping[str, list[_Interface]],
    doubled: Mapping[IPv4Network, str],
) -> str:
    if each.own is None:
        return each.flaw
    network = each.own.network
    without = [
        other
        for other, own in usable.items()
        if other != node and not any(_has(one, network) for one in own)
    ]
    return f"not on {' and '.join(without)}" if without else doubled.get(network, "")


def _listing(interfaces: list[_Interface], reasons: Mapping[_Interface, str] | None = None) -> str:
    """Return every interface with the reason against it, as a list in one line."""
    said = (
        f"{each} ({why})" if (why := (reasons or {}).get(each, each.flaw)) else str(each)
        for each in interfaces
    )
    return ", ".join(said) or "no interface"


# Interfaces in a probe


def _interfaces(document: Mapping[str, Any]) -> Iterator[_Interface]:
    nics = value_or(document.get("nics"), {})
    devices = {each["name"]: each for each in value_or(nics.get("net"), [])}
    rates = dict(_rates(value_or(nics.get("infiniband"), [])))
    for name, device in devices.items():
        parts = list(_hardware(name, devices))
        speeds = [rates[part] for part in parts if part in rates]
        speed = value_or(device.get("speed"), 0)
        interface = _Interface(
            name=name,
            own=None,
            alone=None,
            speed=max(speed if isinstance(speed, int) else 0, sum(speeds), 0),
            rdma=bool(parts) and len(speeds) == len(parts),
            mtu=value_or(device.get("mtu")),
            down=value_or(device.get("state"), "unknown") not in _STATES_UP,
            virtual=_virtual(device, parts),
        )
        written = value_or(device.get("networks"))
        own = [] if written is None else [each for text in written if (each := _parsed(text))]
        first = value_or(device.get("ipv4"))
        for each in own:
            yield replace(interface, own=each)
        if not own:
            # Documents of older probes have an address without its prefix.
            yield replace(interface, alone=first if isinstance(first, str) else None)


def _parsed(text: Any) -> IPv4Interface | None:
    try:
        return IPv4Interface(text)
    except (AddressValueError, NetmaskValueError, ValueError):
        return None


def _hardware(
    name: str, devices: Mapping[str, Mapping[str, Any]], seen: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the PCI functions of a net device, or of the devices below it."""
    device = devices.get(name)
    if device is None or name in seen:
        return
    function = value_or(device.get("pci"), {}).get("bus_id")
    if function:
        yield function
        return
    for part in value_or(device.get("lower"), None) or ():
        yield from _hardware(part, devices, seen | {name})


def _virtual(device: Mapping[str, Any], parts: list[str]) -> str:
    if parts:
        return ""
    kind = value_or(device.get("kind"))
    if kind in _VIRTUAL_KINDS:
        return f"is virtual ({kind})"
    if kind == "bridge" and value_or(device.get("lower")) is not None:
        return "is a bridge without a NIC"
    if _VIRTUAL.match(device["name"]):
        return "is virtual by its name"
    return ""


def _rates(infiniband: list[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """Yield the PCI function and rate in Mbit/s of every RDMA device with an active port."""
    for device in infiniband:
        function = value_or(device["pci"], {}).get("bus_id")
        rates = [
            float(match[1])
            for port in value_or(device["ports"], [])
            if str(port["state"]).startswith(_ACTIVE)
            and (match := re.match(r"([\d.]+) Gb/sec", str(value_or(port["rate"], ""))))
        ]
        if function and rates:
            yield function, int(max(rates) * 1000)


# RDMA devices near the replica's GPUs


def _hcas(
    documents: Mapping[str, Mapping[str, Any]], gpus: Mapping[str, Collection[int]]
) -> tuple[dict[str, tuple[str, ...]], str]:
    """
    Return each node's RDMA devices (HCAs) for NCCL, and a remark if existing ones must not be used.

    All HCAs have the same link layer, because InfiniBand cannot communicate with RoCE.
    """
    near = {
        node: {layer: _near(document, gpus.get(node, ()), layer) for layer in (INFINIBAND, ROCE)}
        for node, document in documents.items()
    }
    for layer in (INFINIBAND, ROCE):
        if all(layers[layer] for layers in near.values()):
            return {node: layers[layer] for node, layers in near.items()}, ""
    some = [node for node, layers in near.items() if any(layers.values())]
    if not some:
        return {}, ""
    return {}, (
        f"; without RDMA, although {' and '.join(some)} could use RDMA, because not every node "
        "has active ports of the same link layer"
    )


def _near(document: Mapping[str, Any], gpus: Collection[int], layer: str) -> tuple[str, ...]:
    """
    Return the active ports with this link layer on the RDMA devices that are nearest to the GPUs.
    """
    devices = value_or(value_or(document.get("nics"), {}).get("infiniband"), [])
    ports = {
        device["name"]: [
            f"{device['name']}:{port['port']}"
            for port in value_or(device["ports"], [])
            if str(port["state"]).startswith(_ACTIVE) and value_or(port["link_layer"]) == layer
        ]
        for device in devices
    }
    classes = nic_classes(document) if devices else {}
    nics = nearest_by_class({nic: found for nic, found in classes.items() if ports.get(nic)})
    names = {nic for gpu in gpus for nic, _ in nics.get(gpu, [])}
    return tuple(port for name in sorted(names, key=_natural) for port in ports[name])


def _natural(name: str) -> tuple[object, ...]:
    """Return a sort key that orders mlx5_10 after mlx5_9."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
