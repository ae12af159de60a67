"""Read a node's cordon: no new replica is placed there, replicas that run there stay. Pure.

An operator sets the mark (`gpufleet cordon`), or an upgrade during its change of the node. An
upgrade's mark is temporary: a plan that respected it would move replicas that the upgrade is about
to restart. It counts only if the upgrade ended after a failed change and left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpufleet.sanitize import printable


class Cordon(NamedTuple):
    """The cordon of a node, with its author and reason."""

    by: str
    """Author of the mark: user@host."""
    why: str
    upgrade: str | None = None
    """Id of the upgrade that set the mark, or None for an operator."""

    def __str__(self) -> str:
        """
        Return the cordon as part of a sentence.

        >>> str(Cordon("ann@laptop", "disk makes noises"))
        'cordoned by ann@laptop: disk makes noises'
        """
        whose = f" in upgrade {self.upgrade}" if self.upgrade else ""
        return printable(f"cordoned by {self.by}{whose}: {self.why}")


def cordon_of(document: Mapping[str, Any]) -> Cordon | None:
    """
    Return a probe's cordon, or None if it is missing, temporary or unknown.

    Documents of older probes have no such key: their nodes are not cordoned.
    """
    found = document.get("cordon")
    if not isinstance(found, Mapping) or "missing" in found or found.get("passing"):
        return None
    return Cordon(str(found.get("by")), str(found.get("why")), found.get("upgrade"))


def unknown_reason(document: Mapping[str, Any]) -> str | None:
    """Return why a node's cordon is unknown, or None if it is known."""
    found = document.get("cordon")
    if isinstance(found, Mapping) and "missing" in found:
        return printable(str(found["missing"]))
    return None


def uncordon_command(node: str, force: bool = False) -> str:
    """Return the command that removes a node's cordon."""
    return f"`gpufleet uncordon INVENTORY {node}{' --force' if force else ''}`"


def describe_cordon(node: str, cordon: Cordon) -> str:
    """Return a plan's sentence about a cordoned node."""
    return (
        f"{node}: {cordon}. gpufleet places no new replicas on this node, and running replicas "
        f"stay. {uncordon_command(node, cordon.upgrade is not None)} removes the cordon"
    )
