"""Estimate each wave's duration from earlier measurements.  Pure.

The estimate for a group is its duration in its last finished upgrade. For a new group it is the
median of groups with the same models, kind and number of nodes. If no upgrade is recorded, a known
start time is a lower bound, shown as "at least". Otherwise the duration is unknown.

The groups of a wave change at the same time, so a wave takes as long as its slowest group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

from gpufleet.formatting import format_duration
from gpufleet.upgrade.plan.wave import Group, Wave, model_of


class Entry(Protocol):
    """A journal entry, as in `journal_entry.Entry`."""

    @property
    def at(self) -> float: ...

    @property
    def what(self) -> str: ...

    @property
    def group(self) -> str | None: ...

    @property
    def said(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Estimate:
    """The estimated duration of a wave."""

    wave: int
    seconds: float | None
    """None: unknown."""
    at_least: bool = False
    """Whether only a part is known: starts and soaking, but not draining."""

    def __str__(self) -> str:
        """
        Format the estimate for a table's cell.

        >>> str(Estimate(1, 184.2)), str(Estimate(1, 40, at_least=True)), str(Estimate(1, None))
        ('3 min 4 s', 'at least 40 s', 'not known')
        """
        if self.seconds is None:
            return "not known"
        return ("at least " if self.at_least else "") + format_duration(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)


def estimate(
    waves: Iterable[Wave],
    journals: Iterable[Sequence[Entry]] = (),
    starts: Mapping[str, float] | None = None,
    soak_seconds: float = 0,
) -> tuple[Estimate, ...]:
    """
    Return the estimated duration of each wave.

    `journals` are the journals of earlier upgrades, the oldest first; `starts` has the observed
    seconds from a replica's start to its first answer.
    """
    by_group: dict[str, float] = {}
    by_likeness: dict[tuple[object, ...], list[float]] = {}
    for entries in journals:
        for group, seconds in _took(entries):
            by_group[group.id] = seconds
            by_likeness.setdefault(_likeness(group), []).append(seconds)
    found = []
    for wave in waves:
        parts: list[tuple[float | None, bool]] = []
        for group in wave.groups:
            alike = by_likeness.get(_likeness(group))
            if group.id in by_group:
                parts.append((by_group[group.id], False))
            elif alike:
                parts.append((median(alike), False))
            else:
                parts.append((_by_starts(group, starts or {}, soak_seconds), True))
        known = [seconds for seconds, _ in parts if seconds is not None]
        all_known = known and len(known) == len(parts)
        found.append(
            Estimate(wave.number, max(known), at_least=any(partly for _, partly in parts))
            if all_known
            else Estimate(wave.number, None)
        )
    return tuple(found)


def load_seconds(journals: Iterable[Sequence[Entry]]) -> dict[str, float]:
    """
    Return the load time in seconds of each model's slowest replica, in its last recorded upgrade.
    """
    found: dict[str, float] = {}
    for entries in journals:
        here: dict[str, float] = {}
        groups = {group.id: group for group in _planned(entries)}
        for entry in entries:
            group = groups.get(entry.group or "")
            if group is None or entry.what != "ready":
                continue
            said = entry.said.get("load_seconds") or entry.said.get("seconds")
            if not isinstance(said, Mapping):
                said = dict.fromkeys(group.replicas, said)
            for replica, seconds in said.items():
                if isinstance(seconds, int | float):
                    model = model_of(replica)
                    here[model] = max(here.get(model, 0.0), float(seconds))
        found |= here
    return found


def _took(entries: Sequence[Entry]) -> list[tuple[Group, float]]:
    """Return the duration in seconds of each group that finished without an interruption."""
    groups = {group.id: group for group in _planned(entries)}
    began: dict[str, float] = {}
    found = []
    for entry in entries:
        # A long pause between two entries, such as a night, does not count.
        if entry.what in {"paused", "resumed"}:
            began.clear()
        elif entry.group not in groups:
            continue
        elif entry.what == "draining":
            began[entry.group] = entry.at
        elif entry.what in {"failed", "restoring"}:
            began.pop(entry.group, None)
        elif entry.what == "done" and entry.group in began:
            found.append((groups[entry.group], max(0.0, entry.at - began.pop(entry.group))))
    return found


def _planned(entries: Iterable[Entry]) -> list[Group]:
    return [
        Group.from_json(group)
        for entry in entries
        if entry.what == "planned"
        for wave in entry.said.get("waves", ())
        for group in wave["groups"]
    ]


def _likeness(group: Group) -> tuple[object, ...]:
    return group.kind, group.models, len(group.nodes)


def _by_starts(group: Group, starts: Mapping[str, float], soak_seconds: float) -> float | None:
    """
    Return a group's minimum duration in seconds; None: unknown.

    It is unknown for whole nodes, and if a model of its replicas has no recorded start.
    """
    if group.kind == "node":
        return None
    loaded = [0.0]
    for replica in group.replicas:
        if replica in group.goes:
            continue
        of_model = [each for name, each in starts.items() if model_of(name) == model_of(replica)]
        if replica not in starts and not of_model:
            return None
        loaded.append(starts.get(replica) or max(of_model))
    return max(loaded) + soak_seconds
