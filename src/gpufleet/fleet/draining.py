"""
Determine the effects of draining a node.  Pure.

The effects are the affected replicas, their nodes, and the models that lose their last replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.formatting import join_names
from gpufleet.network import haproxy
from gpufleet.planning.stage import Running
from gpufleet.serving import servers


@dataclass(frozen=True)
class Drain:
    """The replicas with a stage on the drained node, and the nodes of their other stages."""

    node: str
    nodes: Mapping[str, tuple[str, ...]]
    """All nodes with a stage of each affected replica, by replica (`tiny-0`)."""
    servers: tuple[Mapping[str, Any], ...]
    """Servers of the affected replicas, in the form of `upgrade.run.traffic`."""
    last: tuple[str, ...]
    """Models that no replica elsewhere serves."""

    @property
    def replicas(self) -> tuple[str, ...]:
        """Return the ids of the affected replicas."""
        return tuple(sorted(self.nodes))

    def replicas_on(self, node: str, replicas: Collection[str] | None = None) -> tuple[str, ...]:
        """
        Return the affected replicas that have a stage on a node.

        If `replicas` is given, only these replicas are returned.
        """
        return tuple(
            each
            for each in self.replicas
            if node in self.nodes[each] and (replicas is None or each in replicas)
        )

    @property
    def every_node(self) -> tuple[str, ...]:
        """Return the nodes of all affected replicas, and the drained node itself."""
        return tuple(
            sorted({self.node, *(each for nodes in self.nodes.values() for each in nodes)})
        )


def find_drain(
    node: str, running: Iterable[Running], out: Collection[tuple[str, str]] = ()
) -> Drain:
    """
    Return the replicas that draining a node affects.

    `running` are the running stages of the whole fleet, `out` the (node, replica) pairs that are
    drained already.
    """
    every = tuple(running)
    here = {each.id for each in every if each.node == node}
    nodes = {
        replica: tuple(sorted({each.node for each in every if each.id == replica}))
        for replica in sorted(here)
    }
    models = {each.model for each in every if each.id in here}
    others = {
        each.model for each in every if each.id not in here and (each.node, each.id) not in out
    }
    return Drain(
        node=node,
        nodes=nodes,
        servers=tuple(
            {
                "name": haproxy.server_name(each),
                "node": each.node,
                "port": each.port,
                "model": each.model,
                "replica": each.stage,
            }
            for each in sorted(servers.running_servers(every))
            if each.stage in here
        ),
        last=tuple(sorted(models - others)),
    )


def refusal(found: Drain) -> str | None:
    """Return why a node must not be drained without `--force`, or None if it may be drained."""
    if not found.last:
        return None
    what = join_names(found.last)
    return (
        f"{found.node}: no other node serves {what}, so requests for "
        f"{'this model' if len(found.last) == 1 else 'these models'} would fail while the "
        "node is drained: start a replica on a different node first, or drain the node "
        "anyway with --force"
    )
