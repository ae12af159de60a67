"""Build an upgrade's report from its journal: each step's time and nodes, the effect on clients.

Pure: takes entries, returns a `Report`; `upgrade/report/text.py` and `upgrade/report/html.py`
render it. The journal of a running upgrade gives the report up to now.

A replica is *away* from the event `draining`, when gateways stop sending it requests, until the
event `undrained`, when they send requests again. This includes drain, load and judgement; the rest
is gpufleet's overhead.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpufleet.upgrade.gates.baseline import ITL, TTFT, Traffic
from gpufleet.upgrade.gates.gates import QUANTILE, quantile
from gpufleet.upgrade.plan.declare_version import Edit
from gpufleet.upgrade.plan.wave import Group, Wave
from gpufleet.upgrade.run.journal_entry import Entry, entries_of
from gpufleet.upgrade.run.upgrade_state import GroupState, State, fold

SCHEMA = 1
"""Version of `Report.as_json()`; increased when a key changes its meaning or is removed."""

PHASES: Mapping[str, str] = {
    "draining": "drains",
    "drained": "drained",
    "changing": "node changes",
    "changed": "node changed",
    "switching": "switches",
    "switched": "loads",
    "ready": "answers",
    "undraining": "comes back",
    "undrained": "soaks",
    "soaked": "is judged",
    "failed": "failed",
    "restoring": "goes back",
    "restored": "loads again",
    "stuck": "stuck",
}
"""The phase of a group after each journal event, in words for operators."""
_END = {"done", "returned"}
_AWAY_FROM, _AWAY_UNTIL = "draining", "undrained"


@dataclass(frozen=True)
class Span:
    """One phase of a group or a node."""

    phase: str
    """A key of `PHASES`."""
    start: float
    """Seconds since 1970, by the clock of the machine that ran the upgrade."""
    end: float

    @property
    def seconds(self) -> float:
        """Return the duration in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class GateResult:
    """The recorded verdict of a gate, with its time."""

    at: float
    gate: str
    passed: bool | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Served:
    """The requests of a replica in a window: before the upgrade, or while it was soaked."""

    seconds: float
    requests: float
    errors: float
    """The larger of two numbers: 5xx answers, and requests that ended in an error."""
    ttft_p99: float | None
    """In seconds; None: too few requests were observed."""
    itl_p99: float | None

    @classmethod
    def from_counters(cls, traffic: Traffic) -> Served:
        """Return the requests, errors and latencies from counters."""
        errors = (
            (traffic.finished or {}).get("error", 0.0),
            (traffic.answered or {}).get("5xx", 0.0),
        )
        p99 = {key: quantile(QUANTILE, found) for key, found in traffic.latencies.items()}
        known = {key: value for key, value in p99.items() if value == value}  # noqa: PLR0124  # NaN
        return cls(traffic.seconds, traffic.requests, max(errors), known.get(TTFT), known.get(ITL))


@dataclass(frozen=True)
class ReplicaReport:
    """A replica's load time, and its requests before and after the change."""

    replica: str
    load_seconds: float | None
    """Seconds from its last start to its first answer."""
    before: Served | None
    after: Served | None


@dataclass(frozen=True)
class NodeReport:
    """One node of a group: its downtime, killed units and phases."""

    node: str
    gap_seconds: float | None
    """
    Seconds from the first unit's stop to the last one's start, by the node's own clock, summed over
    all switches; None: unknown.
    """
    cut: tuple[str, ...]
    """Units that were killed with running requests."""
    spans: tuple[Span, ...]
    """The phases stopping and down, converted to this machine's clock."""


@dataclass(frozen=True)
class GroupReport:
    """The phases, times, verdicts and failures of one group."""

    group: Group
    wave: int
    outcome: str
    """done, returned, stuck or waiting; otherwise its present phase."""
    spans: tuple[Span, ...]
    away_seconds: float
    drain_seconds: float
    load_seconds: float
    """
    Load times in seconds of the slowest replica, summed over all starts including a rollback's.
    """
    left: int
    """Requests that had not finished when the drain ended."""
    judged: tuple[GateResult, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    replicas: tuple[ReplicaReport, ...]
    nodes: tuple[NodeReport, ...]

    @property
    def began(self) -> float | None:
        """Return the time of the first action on the group."""
        return self.spans[0].start if self.spans else None

    @property
    def judge_seconds(self) -> float:
        """
        Return the seconds in which its answers were judged, before gateways sent it requests again.
        """
        return sum(each.seconds for each in self.spans if each.phase == "ready")

    @property
    def own_seconds(self) -> float:
        """Return the seconds out of service, without drain, load and judgement."""
        known = self.drain_seconds + self.load_seconds + self.judge_seconds
        return max(0.0, self.away_seconds - known)


@dataclass(frozen=True)
class WaveReport:
    """The times and groups of one wave."""

    wave: Wave
    began: float | None
    ended: float | None
    """Time of its last action; None: it is not over."""
    expected_seconds: float | None
    """The estimated duration in seconds."""
    groups: tuple[GroupReport, ...]


@dataclass(frozen=True)
class Report:
    """The report of one upgrade."""

    id: str
    kind: str
    what: str
    by: str
    inventory: str
    started: float
    ended: float
    """Time of the last entry."""
    outcome: str
    """finished, stopped, paused, or running (no end is recorded)."""
    why: tuple[str, ...]
    waves: tuple[WaveReport, ...]
    notes: tuple[str, ...]
    resumed: tuple[float, ...]
    """The times at which it was resumed."""
    declared: tuple[str, ...]
    """Lines of variables that the upgrade rewrote and did not restore."""

    @property
    def groups(self) -> tuple[GroupReport, ...]:
        """Return all groups, by wave."""
        return tuple(group for wave in self.waves for group in wave.groups)

    @property
    def waves_seconds(self) -> float:
        """Return the seconds from the first wave's start to the last one's end."""
        began = [each.began for each in self.waves if each.began is not None]
        return self.waves_end - min(began) if began else 0.0

    @property
    def waves_end(self) -> float:
        """Return the time of the last action on a group."""
        return max(
            (span.end for group in self.groups for span in group.spans), default=self.started
        )

    @property
    def load_seconds(self) -> float:
        """Return the sum of all load times in seconds."""
        return sum(each.load_seconds for each in self.groups)

    @property
    def left(self) -> int:
        """Return the number of requests that had not finished when their drain ended."""
        return sum(each.left for each in self.groups)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; times as ISO 8601 in UTC, durations in seconds."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "kind": self.kind,
            "what": self.what,
            "by": self.by,
            "inventory": self.inventory,
            "started": iso(self.started),
            "ended": iso(self.ended),
            "outcome": self.outcome,
            "why": list(self.why),
            "seconds": _round(self.ended - self.started),
            "waves_seconds": _round(self.waves_seconds),
            "load_seconds": _round(self.load_seconds),
            "requests_left": self.left,
            "notes": list(self.notes),
            "resumed": [iso(each) for each in self.resumed],
            "declared": list(self.declared),
            "waves": [_wave_json(each) for each in self.waves],
        }


def report(entries: Iterable[Entry]) -> Report:
    """Return an upgrade's report from its journal's entries."""
    found = tuple(entries)
    state = fold(found)
    ended = found[-1].at if found else 0.0
    waves = tuple(_wave(each, found, state, ended) for each in state.waves)
    put_back = {_text(each) for each in found if each.what == "noted"}
    return Report(
        id=state.id,
        kind=state.kind,
        what=state.what,
        by=state.by,
        inventory=state.inventory,
        started=state.started,
        ended=ended,
        outcome=_outcome(state),
        why=state.stopped or state.paused,
        waves=waves,
        notes=tuple(_notes(found)),
        resumed=tuple(each.at for each in found if each.what == "resumed"),
        declared=tuple(
            str(each)
            for each in map(Edit.from_json, state.declared)
            if f"put back: {each.inverse}" not in put_back
        ),
    )


def _notes(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield the plan's remarks and the notes of the run."""
    for entry in entries:
        if entry.what == "planned":
            yield from map(str, entry.said.get("remarks") or ())
        elif entry.what == "noted" and entry.group is None:
            yield _text(entry)


def iso(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second."""
    if seconds is None:
        return None
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _outcome(state: State) -> str:
    if state.finished:
        return "finished"
    if state.stopped:
        return "stopped"
    return "paused" if state.paused else "running"


def _wave(wave: Wave, entries: Sequence[Entry], state: State, ended: float) -> WaveReport:
    groups = tuple(_group(each, entries, state, ended) for each in wave.groups)
    began = next((e.at for e in entries if e.what == "wave" and e.wave == wave.number), None)
    if began is None:
        began = min((each.began for each in groups if each.began is not None), default=None)
    over = bool(groups) and all(state.groups[each.group.id].is_over for each in groups)
    last = max((span.end for each in groups for span in each.spans), default=None)
    return WaveReport(wave, began, last if over else None, state.seconds.get(wave.number), groups)


def _group(group: Group, entries: Sequence[Entry], state: State, ended: float) -> GroupReport:
    told = tuple(entries_of(entries, group.id))
    own = tuple(each for each in told if each.node is None)
    there = state.groups[group.id]
    return GroupReport(
        group=group,
        wave=there.wave,
        outcome=there.phase,
        spans=_spans(own, ended),
        away_seconds=_away_seconds(own, ended),
        drain_seconds=sum(s.seconds for s in _spans(own, ended) if s.phase == "draining"),
        load_seconds=sum(max(_loads(e).values(), default=0.0) for e in own if e.what == "ready"),
        left=there.left,
        judged=tuple(
            GateResult(
                each.at,
                str(each.said.get("gate")),
                each.said.get("passed"),
                tuple(map(str, each.said.get("reasons") or ())),
            )
            for each in own
            if each.what == "judged"
        ),
        failures=_failures(own, there),
        notes=tuple(_text(each) for each in told if each.what == "noted"),
        replicas=tuple(_replica(each, own, state) for each in group.replicas),
        nodes=tuple(_node(each, told) for each in group.nodes),
    )


def _spans(own: Sequence[Entry], ended: float) -> tuple[Span, ...]:
    """
    Return a group's time by phase; an event that begins no phase belongs to the previous phase.
    """
    found: list[Span] = []
    at: tuple[str, float] | None = None
    for entry in own:
        if entry.what in PHASES or entry.what in _END:
            if at:
                found.append(Span(*at, entry.at))
            at = None if entry.what in _END else (entry.what, entry.at)
    if at:
        found.append(Span(*at, max(ended, at[1])))
    return tuple(found)


def _away_seconds(own: Sequence[Entry], ended: float) -> float:
    """Return the seconds in which gateways sent the group no requests because of this upgrade."""
    total = 0.0
    since: float | None = None
    for entry in own:
        if entry.what == _AWAY_FROM and since is None:
            since = entry.at
        elif entry.what == _AWAY_UNTIL and since is not None:
            total += entry.at - since
            since = None
    return total + (ended - since if since is not None else 0.0)


def _loads(ready: Entry) -> Mapping[str, float]:
    """Return load times in seconds by replica; the key "" has one number for all replicas."""
    said = ready.said.get("load_seconds", ready.said.get("seconds"))
    if isinstance(said, Mapping):
        return {str(name): float(value) for name, value in said.items()}
    return {"": float(said)} if isinstance(said, int | float) else {}


def _failures(own: Iterable[Entry], there: GroupState) -> tuple[str, ...]:
    said = [
        str(sentence)
        for each in own
        if each.what in {"failed", "stuck"}
        for sentence in _sentences(each.said.get("why"))
    ]
    return tuple(dict.fromkeys([*said, *(there.why if there.phase == "stuck" else ())]))


def _replica(replica: str, own: Sequence[Entry], state: State) -> ReplicaReport:
    loads = [_loads(each) for each in own if each.what == "ready"]
    last = loads[-1] if loads else {}
    soaked = [each.said for each in own if each.what == "soaked"]
    return ReplicaReport(
        replica,
        last.get(replica, last.get("")),
        _served(state.baseline, replica),
        _served(soaked[-1], replica) if soaked else None,
    )


def _served(said: Mapping[str, Any], replica: str) -> Served | None:
    try:
        found = said["traffic"][replica]
        return Served.from_counters(Traffic.from_json(found))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # nothing was observed, or this release cannot read it


def _node(node: str, told: Iterable[Entry]) -> NodeReport:
    """
    Return a node's report from its journal entries, with times converted to this machine's clock.
    """
    gaps: list[float] = []
    cut: list[str] = []
    spans: list[Span] = []
    for entry in told:
        if entry.node != node or entry.what not in {"switched", "restored"}:
            continue
        said = entry.said
        cut += map(str, said.get("cut") or ())
        stopped, down, started, clock = (
            said.get(key) for key in ("stopped_at", "down_at", "started_at", "clock")
        )
        if not all(isinstance(each, int | float) for each in (stopped, started, clock)):
            continue
        # The answer was recorded at `entry.at`; the node's clock then showed `clock`.
        ahead = float(clock) - entry.at  # type: ignore[arg-type]
        gaps.append(float(started) - float(stopped))  # type: ignore[arg-type]
        middle = down if isinstance(down, int | float) else started
        spans.append(Span("stopping", float(stopped) - ahead, float(middle) - ahead))  # type: ignore[arg-type]
        spans.append(Span("down", float(middle) - ahead, float(started) - ahead))  # type: ignore[arg-type]
    return NodeReport(node, sum(gaps) if gaps else None, tuple(cut), tuple(spans))


def _text(entry: Entry) -> str:
    return str(entry.said.get("text", ""))


def _sentences(said: Any) -> tuple[str, ...]:
    return (said,) if isinstance(said, str) else tuple(map(str, said or ()))


# -- for programs


def _wave_json(wave: WaveReport) -> dict[str, Any]:
    return {
        "number": wave.wave.number,
        "canary": wave.wave.canary,
        "began": iso(wave.began),
        "ended": iso(wave.ended),
        "expected_seconds": wave.expected_seconds,
        "groups": [_group_json(each) for each in wave.groups],
    }


def _group_json(group: GroupReport) -> dict[str, Any]:
    return {
        "id": group.group.id,
        "kind": group.group.kind,
        "why": list(group.group.why),
        "outcome": group.outcome,
        "away_seconds": _round(group.away_seconds),
        "drain_seconds": _round(group.drain_seconds),
        "load_seconds": _round(group.load_seconds),
        "judge_seconds": _round(group.judge_seconds),
        "own_seconds": _round(group.own_seconds),
        "requests_left": group.left,
        "phases": [_span_json(each) for each in group.spans],
        "gates": [
            {
                "at": iso(each.at),
                "gate": each.gate,
                "passed": each.passed,
                "reasons": list(each.reasons),
            }
            for each in group.judged
        ],
        "failures": list(group.failures),
        "notes": list(group.notes),
        "replicas": [asdict(each) for each in group.replicas],
        "nodes": [
            {
                "node": each.node,
                "gap_seconds": None if each.gap_seconds is None else _round(each.gap_seconds),
                "cut": list(each.cut),
                "phases": [_span_json(span) for span in each.spans],
            }
            for each in group.nodes
        ],
    }


def _span_json(span: Span) -> dict[str, Any]:
    return {"phase": span.phase, "start": iso(span.start), "seconds": _round(span.seconds)}


def _round(seconds: float) -> float:
    return round(seconds, 2)
