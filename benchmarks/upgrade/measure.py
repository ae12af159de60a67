"""Compute the cost of an upgrade from its journal. Pure.

A replica is out from the moment at which its units are stopped until gateways send to it again.
Its own load time lies within that, and no tool can take it away: from the start of its server to
its first answer. The rest is what the tool costs. While it is drained before, it answers what it
has begun; how long that takes is decided by its clients, and is told beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outage:
    """One replica's, in seconds."""

    group: str
    out: float
    load: float
    drain: float

    @property
    def rest(self) -> float:
        """The time that is not spent loading."""
        return self.out - self.load


@dataclass(frozen=True)
class Cost:
    """The cost of a whole upgrade, in seconds."""

    whole: float
    """From its start to its end, with what is prepared before and proven after."""
    waves: float
    """From the first wave to the end of the last one."""
    outages: tuple[Outage, ...]

    @property
    def loads(self) -> float:
        """All load times, one after the other."""
        return sum(each.load for each in self.outages)


def cost(entries: Iterable[Mapping[str, Any]]) -> Cost:
    """
    Return what an upgrade cost by its journal's entries, as they lie in the file.

    Raises ValueError for one that has not finished, in which something failed, or that changed what
    lies below vLLM: there a server may load before its unit is switched, at the node's boot.
    """
    found = list(entries)
    words = {entry["what"] for entry in found}
    if "finished" not in words or words & {"failed", "stuck"}:
        raise ValueError("only an upgrade that finished without a failure has a cost")
    if "changing" in words:
        raise ValueError("what lies below vLLM was changed: its time is not the upgrade's own")
    at = {
        (entry["what"], entry.get("group")): float(entry["at"])
        for entry in reversed(found)  # the first of each
    }
    ready = {entry["group"]: entry["said"] for entry in found if entry["what"] == "ready"}
    outages = tuple(
        Outage(
            group,
            out=at["undrained", group] - at["switching", group],
            load=max(map(float, said["load_seconds"].values())),  # of its slowest replica
            drain=at["drained", group] - at["draining", group],
        )
        for group, said in ready.items()
    )
    last = max(at["done", group] for group in ready)
    return Cost(
        whole=at["finished", None] - at["started", None],
        waves=last - at["wave", None],
        outages=outages,
    )
