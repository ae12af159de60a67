"""Read a node's cordon. On a cordoned node, running replicas stay and no new ones are placed. Pure.

An operator sets the mark with `gpufleet cordon`. An upgrade also sets it while it changes the node.
The mark of a running upgrade is temporary and does not count, because a plan would otherwise move
replicas that the upgrade is about to restart. The mark counts if the upgrade ended after a failed
change and left the mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpufleet.sanitize import printable


class Cordon(NamedTuple):
    """The cordon of a node, with its author and reason."""

    by: str
    """The author of the mark, as user@host."""
    why: str
    upgrade: str | None = None
    """The id of the upgrade that set the mark, or None if an operator set it."""

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

    Documents of older probes have no such key. Their nodes count as not cordoned.
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
    """Return a sentence about a cordoned node for the plan."""
    return (
        f"{node}: {cordon}. gpufleet places no new replicas on this node, and running replicas "
        f"stay. {uncordon_command(node, cordon.upgrade is not None)} removes the cordon"
    )
