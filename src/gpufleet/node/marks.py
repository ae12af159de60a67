"""What marks on a node say: an upgrade's lock, a cordon, the drain of a replica.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.sanitize import printable


@dataclass(frozen=True)
class Lock:
    """Whose a node is while a change goes on."""

    id: str
    """Of the upgrade."""
    owner: str
    origin: str
    since: float
    """Seconds since 1970, by the node's clock."""
    what: str

    @classmethod
    def from_file(cls, said: Mapping[str, Any] | None) -> Lock | None:
        """Return what the node's file says; None: there is none."""
        if said is None:
            return None
        if not isinstance(said["id"], str):
            raise TypeError(f"id is {said['id']!r}")
        return cls(said["id"], said["owner"], said["from"], float(said["since"]), said["what"])

    def __str__(self) -> str:
        """Say it in a sentence."""
        return printable(f"{self.owner} from {self.origin}: {self.what} ({self.id})")


@dataclass(frozen=True)
class Mark:
    """A cordon, or a drain: who made it and why."""

    by: str
    why: str
    since: float
    """Seconds since 1970, by the node's clock."""
    upgrade: str | None
    """None: a person made it, and only a person lifts it."""

    @classmethod
    def from_file(cls, said: Mapping[str, Any] | None) -> Mark | None:
        """Return what the node's file says; None: there is none."""
        if said is None:
            return None
        return cls(said["by"], said["why"], float(said["since"]), said.get("upgrade"))

    def __str__(self) -> str:
        """Say it in a sentence."""
        whose = f", upgrade {self.upgrade}" if self.upgrade else ""
        return printable(f"{self.by}{whose}: {self.why}")
