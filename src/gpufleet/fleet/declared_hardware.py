"""
Build simulated probes of nodes that do not exist yet, from hardware names of groups or nodes.

The hardware is healthy, and no replica runs on it. Its driver meets the requirements of the node's
settings. Its system is Ubuntu 24.04, which is supported for serving and has the Python version of
gpufleet's lock files. Values that a name does not determine are generated for each node: GPUs'
UUIDs and an address in 198.18.0.0/15 (RFC 2544: for tests, not routed), or in `cluster_network` if
it is set.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from gpufleet.artifacts import release
from gpufleet.catalog import recorded_nodes
from gpufleet.errors import FleetError
from gpufleet.formatting import join_names, suggestion
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars

EVERY_NODE = "all"
_SYSTEM = {"os_release": {"id": "ubuntu", "version_id": "24.04"}, "python": "3.12.3"}
_NETWORK = IPv4Network("198.18.0.0/15")


def parse_hardware(written: Sequence[str]) -> dict[str, str]:
    """
    Parse the value of `--as` into {group or node: hardware}.

    >>> parse_hardware(["h100x8"])
    {'all': 'h100x8'}
    >>> parse_hardware(["gpu_h100=h100x8,gpu-03=a100x8"])
    {'gpu_h100': 'h100x8', 'gpu-03': 'a100x8'}

    Raises `FleetError` for unknown hardware, and for a name given twice.
    """
    found: dict[str, str] = {}
    problems = []
    for each in (part.strip() for text in written for part in text.split(",")):
        name, _, hardware = each.rpartition("=")
        name = name or EVERY_NODE
        if found.setdefault(name, hardware) != hardware:
            problems.append(
                f"--as gives {name} both {found[name]} and {hardware}: remove one of the two"
            )
        if hardware not in recorded_nodes.names():
            problems.append(
                f"--as {each}: there is no hardware "
                f"{hardware!r}{suggestion(hardware, recorded_nodes.names())}; the known "
                f"names are {', '.join(recorded_nodes.names())}"
            )
    if problems:
        raise FleetError(*problems)
    return found


def hardware_documents(
    declared: Mapping[str, NodeVars], hardware: Mapping[str, str], known: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """
    Return {node: simulated probe} for the nodes in `hardware`.

    In `hardware`, a node's own name takes precedence over its groups, an inner group over an outer
    group, and a group over `all`. If `hardware` has none of these names, the node's `gpus.hardware`
    is used. Nodes in `known` need no hardware name.

    Raises `FleetError` for names that the inventory does not have, and for nodes without hardware.
    """
    names = [EVERY_NODE, *declared, *(group for each in declared.values() for group in each.groups)]
    problems = [
        f"--as {name}=...: the inventory has no group of GPU nodes and no GPU node "
        f"{name!r}{suggestion(name, names)}"
        for name in hardware
        if name not in names
    ]
    found: dict[str, dict[str, Any]] = {}
    missing = []
    for number, (name, node) in enumerate(sorted(declared.items())):
        kinds = (name, *reversed(node.groups), EVERY_NODE)
        named = next((hardware[each] for each in kinds if each in hardware), None)
        kind = named or node.settings.gpus.hardware
        if kind is not None:
            found[name] = _node_document(name, number, kind, node.settings)
        elif name not in known:
            missing.append(name)
    if missing:
        group = declared[missing[0]].groups[-1:] or (missing[0],)
        problems.append(
            f"the hardware of {join_names(missing)} is not given: add `--as "
            f"{group[0]}=NAME`, or set `gpus.hardware` in group_vars/{group[0]}.yml; NAME "
            f"is one of {', '.join(recorded_nodes.names())}"
        )
    if problems:
        raise FleetError(*problems)
    return found


def with_identity(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a recorded probe with new UUIDs, as from a different node with the same hardware."""
    text = json.dumps(document)
    for gpu in document["gpus"]:
        own = uuid5(NAMESPACE_DNS, f"{gpu['index']}.{name}")
        text = text.replace(gpu["uuid"], f"GPU-{own}")
    identity = uuid5(NAMESPACE_DNS, name)
    return {
        **json.loads(text),
        "hostname": name,
        "machine_id": identity.hex,
        "boot_id": str(identity),
    }


def _node_document(name: str, number: int, kind: str, settings: NodeSettings) -> dict[str, Any]:
    """Return the recorded probe of a kind of hardware, with a new identity."""
    document = with_identity(recorded_nodes.document(kind), name) | _SYSTEM
    _set_address(document, number, settings.cluster_network or _NETWORK)
    document["driver"]["cuda"] = max(document["driver"]["cuda"], _cuda_needed(settings))
    return document


def _set_address(document: dict[str, Any], number: int, network: IPv4Network) -> None:
    hosts = max(1, network.num_addresses - 2)
    address = network[(1 + number % hosts) % network.num_addresses]
    for each in document["nics"]["net"]:
        if each["name"] == document["nics"]["default_route"]:
            each |= {"ipv4": str(address), "networks": [f"{address}/{network.prefixlen}"]}


def _cuda_needed(settings: NodeSettings) -> int:
    """
    Return the newest CUDA in the declared engines' wheels, in NVML's notation, or 0 if unknown.
    """
    found = [0]
    for each in settings.used_engines:
        try:
            lock = Path(each.lock).read_bytes()
        except OSError:
            continue  # the plan continues without it; the deploy reports the problem of the lock
        major, minor = release.cuda_release(lock) or (0, 0)
        found.append(major * 1000 + minor * 10)
    return max(found)
