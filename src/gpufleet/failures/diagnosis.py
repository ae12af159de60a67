"""
Distinguish the cause of a failure from its consequences. Pure.

The cause is the earliest line whose rule does not describe a consequence. Two kinds of lines are
never causes: derived lines (`Engine core initialization failed`), and lines that follow from the
line of a different rule (`follows`). If failures do not follow from each other, all of them are
causes, the earliest first.
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
A cause may be logged up to this time after its effect. The kernel and programs write their lines
with different delays, and the clocks of nodes differ (gpufleet's own number).
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
    """All lines in all logs and processes that match one rule."""

    rule: Rule
    first: Place
    last: Place
    count: int
    processes: tuple[tuple[str, int], ...]
    """
    The processes that wrote the lines, each with its number of lines, the most frequent first. The
    name is "" if the lines do not contain a process.
    """
    causes: tuple[Advice, ...]
    """The cause. If there is not enough evidence, all possible causes."""
    looks: tuple[str, ...] = ()
    """If there are several possible causes: for each, where to find the evidence."""
    detail: str = ""
    """What a number in the line means."""
    first_at: datetime | None = None
    """The time in UTC, or None if the log has no times."""
    last_at: datetime | None = None
    started_after: Place | None = None
    """A later line of the same log which shows that a server began to answer, or None."""

    @property
    def cause(self) -> str:
        """Return the cause. If the evidence does not decide, return all possible causes."""
        said = [each.cause for each in self.causes]
        if len(said) == 1:
            return said[0]
        return "One of: " + " ".join(f"({n}) {each}" for n, each in enumerate(said, 1))

    @property
    def sentence(self) -> str:
        """
        Return the cause and the fix in one line. If several causes are possible, the texts are
        those of the rule.
        """
        advice = self.causes[0] if len(self.causes) == 1 else self.rule.advice
        return f"{advice.cause} {advice.fix}"


@dataclass(frozen=True)
class Unknown:
    """A failure that matches no rule: its first error, and the end of its traceback."""

    first_error: Place | None
    exception: Place | None


@dataclass(frozen=True)
class Waiting:
    """A server that waits for a different program. Its log has no error."""

    last: Place
    """The last line of the log."""
    last_at: datetime | None
    """The time in UTC, or None if the log has no times."""
    served: bool
    """Whether the server had answered before. If not, it is still starting, or it hangs."""
    fix: str


@dataclass(frozen=True)
class Findings:
    """
    The result of `explain`. The logs show no failure if there are no causes and `unknown` is None.
    """

    causes: tuple[Finding, ...]
    consequences: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    unknown: Unknown | None
    lines: Mapping[str, int]
    """The number of lines that were read from each log."""
    waiting: Waiting | None = None
    """Set if `unknown` is only a wait that has not ended, without an error."""
    unordered: bool = False
    """
    Whether the order of lines is unknown, because there are several logs and one of them has no
    times.
    """

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
    Explain the failures in the lines of one or several logs. Each log has its own order of lines.

    `evidence` distinguishes several possible causes of one line. `year` is used for times without a
    year. By default, it is the year of other lines.
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
    # A failure that follows from a consequence is also a consequence. If two findings follow from
    # each other, the earlier finding is the cause.
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
    """
    Return the wait of the server. Return None if there is an error, or a consequence that is not a
    wait.
    """
    if seen.first_error or not all(each.rule.until for each in consequences):
        return None
    wait = max(consequences, key=lambda each: clock.key(each.last, EARLIEST))
    last = seen.ended[wait.last.source]
    return Waiting(last, clock.time(last), wait.last.source in seen.started, wait.rule.advice.fix)


class _Clock:
    """Convert times to UTC. The times in logs may lack the year or the time zone."""

    def __init__(self, seen: Seen, year: int | None) -> None:
        places = [place for tally in seen.tallies.values() for place in (tally.first, tally.last)]
        years = [at.stamp.moment.year for at in places if at.stamp and at.stamp.has_year]
        self._year = year or max(years, default=datetime.now(UTC).year)
        self._offset = seen.offset

    def time(self, place: Place) -> datetime | None:
        return stamp_utc(place.stamp, self._offset, self._year)

    def key(self, place: Place, untimed: datetime) -> tuple[datetime, int]:
        """Return the key for sorting places: by time, then by the order of reading."""
        return self.time(place) or untimed, place.order


def _order(finding: Finding) -> tuple[datetime, int]:
    """
    Return the key for sorting findings: by time, then by the order of reading. Logs without times
    come last.
    """
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
    Return the cause that the evidence proves and (). If none is proven, return all possible causes,
    and for each where to find evidence.
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
    """Return whether the finding is a consequence of the other finding."""
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
    """
    Return whether the first finding came before the second. If times are unknown, return whether
    that is possible.
    """
    if one.first_at is not None and other.first_at is not None:
        return one.first_at <= other.first_at + skew
    return one.first.source != other.first.source or one.first.order < other.first.order
