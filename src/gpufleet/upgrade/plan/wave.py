"""Groups and waves of an upgrade, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpufleet.upgrade.json_value import JsonValue

Kind: TypeAlias = Literal["stages", "node"]
"""
stages: units of vLLM are replaced. node: layers below them (a driver) change, with all stages on
the node.
"""


def model_of(replica: str) -> str:
    """
    Return the entry of `serving` to which a replica belongs.

    >>> model_of("llama-3-70b-0")
    'llama-3-70b'
    """
    return replica.rpartition("-")[0]


@dataclass(frozen=True)
class Group(JsonValue):
    """
    The smallest part of a fleet that changes at once; its replicas are drained and judged together.
    """

    id: str
    """A replica's id (`tiny-0`), or the names of whole nodes, joined by +."""
    kind: Kind
    nodes: tuple[str, ...]
    """Its nodes by name. All nodes of a multi-node replica are in one group."""
    replicas: tuple[str, ...]
    """Ids of the replicas that do not serve during the change."""
    why: tuple[str, ...] = ()
    """Differences, as `gpufleet plan --diff` prints them."""
    comes: tuple[str, ...] = ()
    """Replicas that do not run yet."""
    goes: tuple[str, ...] = ()
    """Replicas that are removed."""

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of its replicas' models."""
        return tuple(sorted({model_of(each) for each in self.replicas}))


@dataclass(frozen=True)
class Wave:
    """Groups that are changed at the same time."""

    number: int
    """From 1."""
    groups: tuple[Group, ...]
    canary: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of all its nodes."""
        return tuple(sorted({node for each in self.groups for node in each.nodes}))

    @property
    def replicas(self) -> tuple[str, ...]:
        """Return the ids of all its replicas."""
        return tuple(sorted({replica for each in self.groups for replica in each.replicas}))
