"""Refuse replicas whose internal ports are open to all clients.  Pure.

Traffic of vLLM, torch, Ray and NIXL between nodes is not authenticated, and some of it is pickled:
anyone who reaches those ports can run code as vLLM's user. gpufleet's firewall opens them only to
the nodes of the replica (`network/firewall.py`). Without this firewall, other means must block the
ports, and the operator must confirm it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.planning.stage import Stage
from gpufleet.settings import engine_flags
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.variables import Origin


def require_guarded_ports(
    stages: Iterable[Stage],
    settings: Mapping[str, NodeSettings],
    origins: Mapping[str, Mapping[str, Origin]],
) -> None:
    """
    Refuse stages with ports that are open to others while their node has no `firewall`.

    A node with `allow_unguarded_ports` is accepted. `origins` has the origins of each node's
    top-level keys. Raises `FleetError` with a sentence for each replica, with the key that makes it
    use other nodes, and the key's origin.
    """
    exposed: dict[tuple[str, str, str], set[str]] = {}
    for stage, key, nodes in _meetings(stages, settings):
        origin = origins.get(stage.node, {}).get("serving")
        place = f"{origin.place_of(stage.model, key)}: " if origin else ""
        at = f"{place}serving.{stage.model}.{key}"
        found = exposed.setdefault((stage.id, key, at), set())
        found.update(node for node in nodes if _is_open(settings[node]))
    problems = [
        f"{at}: {name} {_USES[key]}. Any client "
        f"that reaches these ports can run code, but {join_names(sorted(nodes))} "
        f"{'has' if len(nodes) == 1 else 'have'}"
        " no `firewall`: write `firewall: {}`, or, if a separate network or your own firewall "
        f"blocks other clients, `allow_unguarded_ports: true` under `{_section(nodes, settings)}`"
        for (name, key, at), nodes in exposed.items()
        if nodes
    ]
    if problems:
        raise FleetError(*problems)


# By the key that makes a stage listen for others.
_BETWEEN = "uses ports without authentication between nodes"
_USES = {
    "span_nodes": _BETWEEN,
    "prefill": _BETWEEN,
    # torch's rendezvous (TCPStore) of its ranks, also of a single one: docs/develop/sglang.md.
    "engine": "opens ports without authentication on all addresses",
}


def _section(nodes: Iterable[str], settings: Mapping[str, NodeSettings]) -> str:
    """Return the section that the servers of these nodes share."""
    found = (settings[node].servers for node in sorted(nodes))
    return next(each.engine for each in found if each)


def _is_open(settings: NodeSettings) -> bool:
    accepted = settings.servers is not None and settings.servers.allow_unguarded_ports
    return settings.firewall is None and not accepted


def _meetings(
    stages: Iterable[Stage], settings: Mapping[str, NodeSettings]
) -> Iterator[tuple[Stage, str, tuple[str, ...]]]:
    """
    Yield stages that listen for others than clients, the key that causes it, and the ports' nodes.
    """
    for stage in stages:
        if engine_flags.of(stage.engine).opens_ports:
            yield stage, "engine", (stage.node,)
        if stage.group is not None:
            yield stage, "span_nodes", (stage.node,)
        if stage.handover and settings[stage.node].serving[stage.model].prefill:
            nodes = tuple(node for node, _ in stage.handover.networks)
            if len(nodes) > 1:
                yield stage, "prefill", nodes
