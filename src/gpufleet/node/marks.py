"""
Parse the marks on a node: the lock of an upgrade, a deploy, a cordon, and drains of replicas. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.formatting import join_names
from gpufleet.sanitize import printable


@dataclass(frozen=True)
class Lock:
    """The lock on a node while an upgrade changes it, with its owner."""

    id: str
    """The id of the upgrade."""
    owner: str
    origin: str
    since: float
    """When the lock was set, in seconds since 1970 by the node's clock."""
    what: str

    @classmethod
    def from_file(cls, said: Mapping[str, Any] | None) -> Lock | None:
        """Return the lock in the node's answer, or None if there is none."""
        if said is None:
            return None
        if not isinstance(said["id"], str):
            raise TypeError(f"id is {said['id']!r}")
        return cls(said["id"], said["owner"], said["from"], float(said["since"]), said["what"])

    def __str__(self) -> str:
        """Return the lock as a sentence."""
        return printable(f"{self.owner} from {self.origin}: {self.what} ({self.id})")


@dataclass(frozen=True)
class Deploy:
    """A deploy that locks a node as long as the deploy's connection exists."""

    id: str
    """The id of pyinfra's run."""
    owner: str
    origin: str
    since: float
    """When the deploy began, in seconds since 1970 by the node's clock."""
    what: str
    """The deploy files of the run."""
    process: int
    """The process id of the deploy on the operator's machine."""

    @classmethod
    def from_file(cls, said: Mapping[str, Any] | None) -> Deploy | None:
        """Return the deploy in the node's answer, or None if there is none."""
        if said is None:
            return None
        return cls(
            said["id"],
            said["owner"],
            said["from"],
            float(said["since"]),
            said["what"],
            int(said["process"]),
        )


def deploy_problems(found: Mapping[str, Deploy]) -> tuple[str, ...]:
    """
    Return one sentence for each deploy about the nodes that are skipped because it locks them.
    """
    names: dict[str, list[str]] = {}
    first: dict[str, Deploy] = {}
    for name, each in sorted(found.items()):
        names.setdefault(each.id, []).append(name)
        first.setdefault(each.id, each)
    return tuple(
        f"{join_names(names[run])}: {printable(each.owner)} is running a deploy there "
        f"({printable(each.what)}) since "
        f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(each.since))}, from "
        f"{printable(each.origin)} (process {each.process} on that machine). Wait until the deploy "
        "ends, or end its process. The nodes are free when the deploy's connections end: "
        "immediately if the process is killed, or within a minute if its machine or network has "
        "failed"
        for run, each in first.items()
    )


@dataclass(frozen=True)
class Mark:
    """A cordon or a drain, with its author and reason."""

    by: str
    why: str
    since: float
    """When the mark was set, in seconds since 1970 by the node's clock."""
    upgrade: str | None
    """
    The id of the upgrade that set the mark, or None if an operator set it.

    Only operators remove the mark of an operator.
    """

    @classmethod
    def from_file(cls, said: Mapping[str, Any] | None) -> Mark | None:
        """Return the mark in the node's answer, or None if there is none."""
        if said is None:
            return None
        return cls(said["by"], said["why"], float(said["since"]), said.get("upgrade"))

    def __str__(self) -> str:
        """Return the mark as a sentence."""
        whose = f", upgrade {self.upgrade}" if self.upgrade else ""
        return printable(f"{self.by}{whose}: {self.why}")
