"""Separate the cause of a failure from its consequences. Pure.

The cause is the earliest line whose rule is not a consequence. Derived lines (`Engine core
initialization failed`), and lines that follow from another rule (`follows`), are never causes.
Failures that do not follow from each other are all causes, the earliest first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gpufleet.checks import xid_table
from gpufleet.failures.evidence import NONE, Evidence, is_met
from gpufleet.failures.log_reader import LogLine
from gpufleet.failures.rule_file import ANY, Advice, Kind, Rule, rules
from gpufleet.failures.tallies import Place, Seen, count_lines, stamp_utc

SKEW = timedelta(seconds=60)
"""
Maximum delay of a cause's log entry after its effect: the kernel and programs write with different
delays, and clocks of nodes differ (own choice).
"""

EARLIEST = datetime.min.replace(tzinfo=UTC)
LATEST = datetime.max.replace(tzinfo=UTC)

_KV = re.compile(
    r"max seq len \((\d{1,12})\).{0,40}?([\d.]{1,12}) GiB .{0,10}KV cache is needed"
    r".{0,80}?\(([\d.]{1,12}) GiB\)(?:.{0,80} maximum model length is (\d{1,12}))?"
)
_XID = re.compile(r"Xid \(.{1,40}\): (\d{1,4}),")


@dataclass(frozen=True)
class Finding:
    """All matches of one rule, over all logs and processes."""

    rule: Rule
    first: Place
    last: Place
    count: int
    processes: tuple[tuple[str, int], ...]
    """
    Processes and their numbers of lines, the most frequent first; "": the lines name no process.
    """
    causes: tuple[Advice, ...]
    """One cause, or several that only further evidence can distinguish."""
    looks: tuple[str, ...] = ()
    """Sources of the evidence, one for each cause."""
    detail: str = ""
    """The meaning of a number in the line."""
    first_at: datetime | None = None
    """In UTC; None: the log has no times."""
    last_at: datetime | None = None
    started_after: Place | None = None
    """The later line of the same log that shows that a server began to answer."""

    @property
    def cause(self) -> str:
        """Return the cause; without evidence to decide, all possible causes."""
        said = [each.cause for each in self.causes]
        if len(said) == 1:
            return said[0]
        return "One of: " + " ".join(f"({n}) {each}" for n, each in enumerate(said, 1))

    @property
    def sentence(self) -> str:
        """
        Return the cause and the fix in one line; if several causes are possible, the rule's own.
        """
        advice = self.causes[0] if len(self.causes) == 1 else self.rule.advice
        return f"{advice.cause} {advice.fix}"


@dataclass(frozen=True)
class Unknown:
    """A failure without a matching rule: the first error, and the end of its traceback."""

    first_error: Place | None
    exception: Place | None


@dataclass(frozen=True)
class Waiting:
    """A wait for another program, in a log without any error."""

    last: Place
    """The log's last line."""
    last_at: datetime | None
    """In UTC; None: the log has no times."""
    served: bool
    """Whether the server had begun to answer before; otherwise it is starting, or hangs."""
    fix: str


@dataclass(frozen=True)
class Findings:
    """The result of `explain`. It is healthy without causes and unknown failures."""

    causes: tuple[Finding, ...]
    consequences: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    unknown: Unknown | None
    lines: Mapping[str, int]
    """Number of lines read, by log."""
    waiting: Waiting | None = None
    """Set if `unknown` is an unfinished wait without an error."""
    unordered: bool = False
    """Whether one of several logs had no times, so that the order is unknown."""

    @property
    def healthy(self) -> bool:
        """Return whether no failure was found."""
        return not self.causes and self.unknown is None


def explain(
    lines: Iterable[LogLine],
    evidence: Evidence = NONE,
    *,
    known: Sequence[Rule] | None = None,
    year: int | None = None,
) -> Findings:
    """
    Explain the failures in lines of one or several logs, each in its own order.

    `evidence` distinguishes the causes of one line. `year` is the year of times without one; by
    default, the year of other lines.
    """
    by_id = {rule.id: rule for rule in (rules() if known is None else known)}
    seen = count_lines(lines, by_id.values())
    clock = _Clock(seen, year)
    ids = {rule_id for rule_id, _ in seen.tallies}
    found = [
        _finding(by_id[each], seen, clock, _causes(by_id[each], evidence, ids)) for each in ids
    ]
    found.sort(key=_order)
    failures = [each for each in found if each.rule.kind is Kind.FAILURE]
    # A consequence of a consequence also counts. If two findings name each other, the earlier one
    # is the cause.
    causes: list[Finding] = []
    for each in failures:
        others = [other for other in failures if other is not each]
        if not any(_follows(each, other) for other in others):
            causes.append(each)
    causes = causes or failures[:1]
    consequences = [
        each
        for each in found
        if each not in causes and each.rule.kind in {Kind.FAILURE, Kind.DERIVED}
    ]
    unknown = None
    if not causes and (consequences or seen.first_error):
        unknown = Unknown(seen.first_error, seen.first_exception)
    return Findings(
        causes=tuple(causes),
        consequences=tuple(consequences),
        notes=tuple(each for each in found if each.rule.kind is Kind.NOTE),
        unknown=unknown,
        lines=seen.lines,
        waiting=_waiting(consequences, seen, clock) if unknown else None,
        unordered=len(seen.lines) > 1 and any(each.first_at is None for each in found),
    )


def _waiting(consequences: Sequence[Finding], seen: Seen, clock: _Clock) -> Waiting | None:
    """Return the wait of a server; None: there is an error, or another consequence than a wait."""
    if seen.first_error or not all(each.rule.until for each in consequences):
        return None
    wait = max(consequences, key=lambda each: clock.key(each.last, EARLIEST))
    last = seen.ended[wait.last.source]
    return Waiting(last, clock.time(last), wait.last.source in seen.started, wait.rule.advice.fix)


class _Clock:
    """Times in UTC, computed from stamps that may lack the year and the zone."""

    def __init__(self, seen: Seen, year: int | None) -> None:
        places = [place for tally in seen.tallies.values() for place in (tally.first, tally.last)]
        years = [at.stamp.moment.year for at in places if at.stamp and at.stamp.has_year]
        self._year = year or max(years, default=datetime.now(UTC).year)
        self._offset = seen.offset

    def time(self, place: Place) -> datetime | None:
        return stamp_utc(place.stamp, self._offset, self._year)

    def key(self, place: Place, untimed: datetime) -> tuple[datetime, int]:
        """Return the sort key of places: time, then order of reading."""
        return self.time(place) or untimed, place.order


def _order(finding: Finding) -> tuple[datetime, int]:
    """Return the sort key of findings: time, then order of reading; logs without times last."""
    return finding.first_at or LATEST, finding.first.order


def _finding(
    rule: Rule, seen: Seen, clock: _Clock, advice: tuple[tuple[Advice, ...], tuple[str, ...]]
) -> Finding:
    tallies = [tally for (rule_id, _), tally in seen.tallies.items() if rule_id == rule.id]
    first = min((tally.first for tally in tallies), key=lambda at: clock.key(at, LATEST))
    last = max((tally.last for tally in tallies), key=lambda at: clock.key(at, EARLIEST))
    processes: dict[str, int] = defaultdict(int)
    for tally in tallies:
        for name, count in tally.processes.items():
            processes[name] += count
    started = seen.started.get(last.source)
    return Finding(
        rule,
        first,
        last,
        sum(tally.count for tally in tallies),
        tuple(sorted(processes.items(), key=lambda each: (-each[1], each[0]))),
        *advice,
        _detail(first.text),
        clock.time(first),
        clock.time(last),
        started if started and started.order > last.order else None,
    )


def _causes(
    rule: Rule, evidence: Evidence, seen: set[str]
) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """
    Return the cause that evidence proves, or else all possible causes with their evidence's
    sources.
    """
    open_ones = []
    for tell in rule.tells:
        met = is_met(tell.when, evidence, seen)
        if met:
            return (tell.advice,), ()
        if met is None:
            open_ones.append(tell)
    if len(open_ones) > 1:
        return tuple(each.advice for each in open_ones), tuple(each.look for each in open_ones)
    return (rule.advice,), ()


def _detail(text: str) -> str:
    if found := _XID.search(text):
        number = int(found[1])
        return f"Xid {number}: {xid_table.KINDS.get(number, xid_table.UNKNOWN).meaning}"
    if found := _KV.search(text):
        length, needs, has, fits = found.groups()
        more = f": {int(fits):,} tokens fit" if fits else ""
        return (
            f"a context of {int(length):,} tokens needs {needs} GiB, {has} GiB are available{more}"
        )
    return ""


def _follows(finding: Finding, other: Finding) -> bool:
    """Return whether a finding is a consequence of another one."""
    named = finding.rule.follows
    if other.rule.id in named:
        return _is_before(other, finding, SKEW) and not (
            finding.rule.id in other.rule.follows and _order(finding) < _order(other)
        )
    if ANY not in named:
        return False
    if ANY in other.rule.follows:
        return _order(other) < _order(finding)
    return _is_before(other, finding, timedelta(0))


def _is_before(one: Finding, other: Finding, skew: timedelta) -> bool:
    """Return whether a finding came before another one; with unknown times, whether it may have."""
    if one.first_at is not None and other.first_at is not None:
        return one.first_at <= other.first_at + skew
    return one.first.source != other.first.source or one.first.order < other.first.order
