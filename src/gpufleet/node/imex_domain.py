"""Find the nodes of a rack whose GPUs can share memory over NVLink with IMEX. Pure.

The fabric manager of the rack's switches assigns a cluster and a clique to every GPU. Nodes whose
GPUs have the same cluster and clique can map each other's memory. Neither host names nor networks
show which nodes these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.node.topology import node_from_probe


def addresses(documents: Mapping[str, Mapping[str, Any] | str], name: str) -> tuple[str, ...]:
    """
    Return the addresses of all nodes in a node's IMEX domain, sorted by node name.

    The node itself is included. `documents` has the probe of each node, or the reason why it is
    missing. Raises `FleetError` if the members are not all known, because a node that is missing in
    IMEX's file is excluded from the domain.
    """
    silent = [f"{node}: {said}" for node, said in documents.items() if isinstance(said, str)]
    if silent:
        raise FleetError(*silent, f"{name}: the IMEX domain is unknown until every node answers")
    nodes = {
        node: node_from_probe(node, said)
        for node, said in sorted(documents.items())
        if not isinstance(said, str)
    }
    own = nodes[name].domain
    if own is None:
        raise FleetError(
            f"{name}: the GPUs have not joined an NVLink fabric, and the fabric determines the "
            "IMEX domain: check `nvidia-smi -q | grep -A4 Fabric`, and the rack's fabric manager"
        )
    members = [node for node in nodes.values() if node.domain == own]
    if unknown := [node.name for node in members if node.address is None]:
        raise FleetError(
            f"{', '.join(unknown)}: the interface of the default route has no known IPv4 address, "
            "but IMEX needs an IPv4 address of each node"
        )
    return tuple(node.address for node in members if node.address)
