"""Read a node's cordon: no new replica is placed there, running ones stay.  Pure.

An operator marks it (`gpufleet cordon`), or an upgrade while it changes the node. An upgrade's mark
is temporary: a plan that respected it would move replicas that the upgrade is about to restart. It
counts only if the upgrade ended and left it after a failed change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpufleet.sanitize import printable


class Cordon(NamedTuple):
    """The cordon of a node: its user and reason."""

    by: str
    """user@host"""
    why: str
    upgrade: str | None = None
    """The upgrade that cordoned it; None: a person."""

    def __str__(self) -> str:
        """
        Format it for a sentence.

        >>> str(Cordon("ann@laptop", "disk makes noises"))
        'cordoned by ann@laptop: disk makes noises'
        """
        whose = f" in upgrade {self.upgrade}" if self.upgrade else ""
        return printable(f"cordoned by {self.by}{whose}: {self.why}")


def cordon_of(document: Mapping[str, Any]) -> Cordon | None:
    """
    Return a probe's cordon; None if there is none, or it is temporary or unknown.

    Documents of older probes have no such key: their nodes are not cordoned.
    """
    found = document.get("cordon")
    if not isinstance(found, Mapping) or "missing" in found or found.get("passing"):
        return None
    return Cordon(str(found.get("by")), str(found.get("why")), found.get("upgrade"))


def unknown_reason(document: Mapping[str, Any]) -> str | None:
    """Return why it is unknown whether a probe's node is cordoned; None: it is known."""
    found = document.get("cordon")
    if isinstance(found, Mapping) and "missing" in found:
        return printable(str(found["missing"]))
    return None


def uncordon_command(node: str, force: bool = False) -> str:
    """Return the command that lifts a node's cordon."""
    return f"`gpufleet uncordon INVENTORY {node}{' --force' if force else ''}`"


def describe_cordon(node: str, cordon: Cordon) -> str:
    """Return a plan's sentence about a cordoned node."""
    return (
        f"{node}: {cordon}; no new replicas are placed there, running ones stay; "
        f"{uncordon_command(node, cordon.upgrade is not None)} lifts it"
    )
