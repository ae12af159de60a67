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
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.variables import Origin


def require_guarded_ports(
    stages: Iterable[Stage],
    settings: Mapping[str, NodeSettings],
    origins: Mapping[str, Mapping[str, Origin]],
) -> None:
    """
    Refuse stages that communicate with other nodes while a node has no `firewall`.

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
        f"{at}: {name} uses ports between nodes that have no authentication, where any client "
        f"that reaches them can run code, and {join_names(sorted(nodes))} "
        f"{'has' if len(nodes) == 1 else 'have'}"
        " no `firewall`: write `firewall: {}`, or, if a separate network or your own firewall "
        "blocks other clients, `allow_unguarded_ports: true` under `vllm`"
        for (name, _, at), nodes in exposed.items()
        if nodes
    ]
    if problems:
        raise FleetError(*problems)


def _is_open(settings: NodeSettings) -> bool:
    accepted = settings.vllm is not None and settings.vllm.allow_unguarded_ports
    return settings.firewall is None and not accepted


def _meetings(
    stages: Iterable[Stage], settings: Mapping[str, NodeSettings]
) -> Iterator[tuple[Stage, str, tuple[str, ...]]]:
    """
    Yield stages that communicate with other nodes, the key that causes it, and the ports' nodes.
    """
    for stage in stages:
        if stage.group is not None:
            yield stage, "span_nodes", (stage.node,)
        if stage.handover and settings[stage.node].serving[stage.model].prefill:
            nodes = tuple(node for node, _ in stage.handover.networks)
            if len(nodes) > 1:
                yield stage, "prefill", nodes
