"""Resolve the fleet's `upgrade` settings.  Pure.

Canary, waves and capacity are counted over all nodes, so these settings belong to the whole fleet.
If the nodes have different settings, the upgrade is refused, with the places of the declarations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from gpufleet.errors import FleetError
from gpufleet.formatting import node_ranges
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.upgrade_settings import Upgrade

KEY = "upgrade"


def fleet_policy(declared: Mapping[str, NodeVars]) -> Upgrade:
    """
    Return the `upgrade` settings that all nodes of an upgrade share.

    `declared` has the nodes by name. Raises `FleetError` with a sentence for each key that they
    declare differently.
    """
    if not declared:
        return Upgrade()
    values: dict[str, dict[str, list[str]]] = {}
    for node, each in sorted(declared.items()):
        for key, value in _leaves(each.settings.upgrade):
            values.setdefault(key, {}).setdefault(repr(value), []).append(node)
    problems = [
        f"{KEY}.{key} differs between nodes of this upgrade: "
        + "; ".join(
            f"{value} on {node_ranges(nodes)} ({_places(key, nodes, declared)})"
            for value, nodes in said.items()
        )
        + ": set it once, in a group that contains all these nodes"
        for key, said in values.items()
        if len(said) > 1
    ]
    if problems:
        raise FleetError(*problems)
    return next(iter(declared.values())).settings.upgrade


def _leaves(settings: BaseModel, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key, for example `gates.soak_seconds`, with its value."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", list(value) if isinstance(value, tuple) else value


def _places(key: str, nodes: list[str], declared: Mapping[str, NodeVars]) -> str:
    """Return the places that set a key on these nodes; "default" if no file sets it."""
    origins = (declared[node].origins.get(KEY) for node in nodes)
    places = dict.fromkeys(
        str(origin.place_of(*key.split("."))) if origin else "default" for origin in origins
    )
    return ", ".join(places)
