"""Read the cordons, drains and locks of nodes from the nodes' answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.node.marks import Lock, Mark
from gpufleet.serving.rank_status import iso, reason


@dataclass(frozen=True)
class Change:
    """An upgrade that locks nodes, either running or waiting to be resumed."""

    lock: Lock
    """The lock as reported by its first node."""
    nodes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain values. Times are in ISO 8601 in UTC."""
        return {
            "id": self.lock.id,
            "owner": self.lock.owner,
            "from": self.lock.origin,
            "since": iso(self.lock.since),
            "what": self.lock.what,
            "nodes": list(self.nodes),
        }


@dataclass(frozen=True)
class OutOfService:
    """The cordons, drains and locks that people and upgrades have set on nodes.

    Gateways send no requests to drained replicas.
    """

    cordoned: tuple[tuple[str, Mark], ...] = ()
    """Pairs of a node and its cordon, which has the author and the reason."""
    drained: tuple[tuple[str, str, Mark], ...] = ()
    """Triples of a replica, a node, and the drain, which has the author and the reason."""
    changes: tuple[Change, ...] = ()

    def drains(self, replica: str, node: str) -> bool:
        """Return whether a replica is drained on a node."""
        return any((each, at) == (replica, node) for each, at, _ in self.drained)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "cordoned": [{"node": node, **_mark(mark)} for node, mark in self.cordoned],
            "drained": [
                {"replica": replica, "node": node, **_mark(mark)}
                for replica, node, mark in self.drained
            ],
            "upgrades": [each.as_json() for each in self.changes],
        }


def _mark(mark: Mark) -> dict[str, Any]:
    return {"by": mark.by, "why": mark.why, "since": iso(mark.since), "upgrade": mark.upgrade}


def out_of_service(
    answers: Mapping[str, Mapping[str, Any] | str],
) -> tuple[OutOfService, list[str]]:
    """Return the marks of all nodes, and a sentence for each node whose marks are unknown."""
    cordoned, drained, unread = [], [], []
    locks: dict[str, tuple[Lock, list[str]]] = {}
    for node, answer in sorted(answers.items()):
        found = None if isinstance(answer, str) else answer.get("change")
        if found is None:
            continue
        try:
            if refused := [each for each in found.values() if each and "missing" in each]:
                unread.append(
                    f"{node}: the cordon and the drains are unknown: {reason(refused[0])}"
                )
                continue
            lock, cordon = Lock.from_file(found["lock"]), Mark.from_file(found["cordon"])
            read = {name: Mark.from_file(each) for name, each in found["drained"].items()}
            marks = {name: mark for name, mark in read.items() if mark}
            for each in (cordon, lock, *marks.values()):
                iso(float(each.since) if each else None)  # raises for a time that is not a date
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
            why = f"{type(problem).__name__}: {problem}"
            unread.append(f"{node}: the cordon and the drains cannot be read ({why})")
            continue
        cordoned += [(node, cordon)] if cordon else []
        drained += [(name, node, mark) for name, mark in marks.items()]
        if lock:
            locks.setdefault(lock.id, (lock, []))[1].append(node)
    changes = tuple(Change(lock, tuple(nodes)) for lock, nodes in locks.values())
    drained.sort(key=lambda each: each[:2])
    return OutOfService(tuple(cordoned), tuple(drained), changes), unread
