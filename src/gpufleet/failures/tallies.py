"""
Count the lines that match each rule, in limited memory. Pure.

For each rule, the result has the number of lines, the first and the last line, and the processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache

from gpufleet.failures.log_prefix import RANKS, Prefix, Stamp, split_prefix
from gpufleet.failures.log_reader import LogLine
from gpufleet.failures.rule_file import Kind, Rule

MOST_PROCESSES = 64
"""
The most processes that are counted separately for a rule. Further ones are counted as `others`.
"""

MOST_OPEN = 256
"""The most tracebacks that are followed at the same time."""

LONGEST_TRACEBACK = 2000
"""The most lines in which the end of a traceback is searched."""

LONGEST_QUOTE = 300
"""The most characters of a line that are displayed."""

OTHERS = "others"
STARTED = "Application startup complete"
"""
The line that uvicorn writes when a server begins to answer (starlette, in every release of vLLM).
SGLang opens its port after it has loaded the model, and is ready some seconds later.
"""

_BEGINS = ("vLLM API server version", "server_args=")
# Lines that are skipped. Lines with the first three texts contain text of clients (SGLang's with
# --log-requests). Most lines of a long log contain one of the other two.
_SKIPPED = ("Received request ", "Receive: obj=", "Finish: obj=", '" 200 OK', "Avg prompt through")

_TRACEBACK = "Traceback (most recent call last)"
# Lines with one of these texts are parsed: a level, a start, a traceback or an exception.
_TAKEN_APART = ("ERROR", "CRITICAL", "[E", STARTED, *_BEGINS, _TRACEBACK, "Error: ", "Exception: ")
_CLOCK = re.compile(r"\d\d:\d\d:\d\d")
_PREFIX_LENGTH = 120
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]{2,120}(?:Error|Exception|Interrupt|Exit|Warning)\b)")
# SGLang's ranks at the end of a process' name. Only the first line of a message contains them, not
# the other lines of a traceback.
_RANKS = re.compile(rf"(?:^|/){RANKS}$")
_SERIOUS = frozenset({"ERROR", "CRITICAL"})
# An exception without a traceback and a level, as in a log that was cut or filtered.
_BARE = re.compile(r"[A-Za-z_][\w.]{2,120}(?:Error|Exception): ")


@dataclass(frozen=True, slots=True)
class Place:
    """One line to display: its log, number, time, process and text."""

    source: str
    number: int
    process: str
    stamp: Stamp | None
    text: str
    order: int
    """The number of lines of all logs that were read before this line."""


@dataclass
class Tally:
    """The lines of one log that match one rule."""

    first: Place
    last: Place
    count: int = 0
    processes: dict[str, int] = field(default_factory=dict)

    def add(self, place: Place) -> None:
        """Count one more line."""
        self.last = place
        self.count += 1
        name = place.process
        if name not in self.processes and len(self.processes) >= MOST_PROCESSES:
            name = OTHERS
        self.processes[name] = self.processes.get(name, 0) + 1


@dataclass
class Seen:
    """What was collected from the logs."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    """The tallies by (rule, log)."""
    lines: dict[str, int] = field(default_factory=dict)
    """The number of lines of each log."""
    first_error: Place | None = None
    """
    The first line with level ERROR or CRITICAL, the first traceback, or an exception without a
    level.
    """
    first_exception: Place | None = None
    """The end of the first traceback."""
    started: dict[str, Place] = field(default_factory=dict)
    """For each log, the last line in which a server began to answer."""
    ended: dict[str, Place] = field(default_factory=dict)
    """The last line of each log."""
    offset: int | None = None
    """
    The time zone for times without a zone, in minutes: the first zone other than UTC in any line.
    """


def count_lines(lines: Iterable[LogLine], rules: Iterable[Rule]) -> Seen:
    """Read the lines of one or several logs, and return the lines that match each rule."""
    return _Counter(rules).count(lines)


@cache
def _shortest(texts: frozenset[str]) -> tuple[str, ...]:
    """
    Return those texts that do not contain any other of the texts.

    If a line contains one of the texts, it also contains one of the returned texts.
    """
    return tuple(
        text for text in texts if not any(other in text for other in texts if other != text)
    )


class _Counter:
    """
    Count lines by rule. Most lines are only searched for plain texts, and few lines are parsed.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = list(rules)
        self._table = [
            (pattern.needle, pattern, rule) for rule in self._rules for pattern in rule.patterns
        ]
        self._needles = _shortest(frozenset(needle for needle, _, _ in self._table))
        self._untils = [(text, rule.id) for rule in self._rules for text in rule.until]
        self._seen = Seen()
        self._stamped: dict[str, str] = {}
        """The last line of each log that may have a time."""
        self._excused: dict[str, frozenset[str]] = {}
        """For each log, the rules whose lines follow from an earlier line until a server starts."""
        self._tracebacks: dict[tuple[str, str], int] = {}
        """The processes that print a traceback, with the number of its first line."""

    def count(self, lines: Iterable[LogLine]) -> Seen:
        seen, stamped, needles = self._seen, self._stamped, self._needles
        last: dict[str, tuple[LogLine, int]] = {}
        for order, line in enumerate(lines):
            source, number, raw = line
            seen.lines[source] = number
            last[source] = (line, order)
            if any(each in raw for each in _SKIPPED):
                continue
            if _CLOCK.search(raw, 0, _PREFIX_LENGTH):
                if source not in stamped:
                    self._learn_zone(line)
                stamped[source] = raw
            if (
                raw.startswith("{")
                or self._tracebacks
                or any(each in raw for each in _TAKEN_APART)
                or any(needle in raw for needle in needles)
            ):
                self._take(line, order)
        seen.ended = {
            source: self._place(line, line.split(), order) for source, (line, order) in last.items()
        }
        return seen

    def _learn_zone(self, line: LogLine) -> None:
        stamp = line.split().stamp
        if stamp and stamp.offset and self._seen.offset is None:
            self._seen.offset = stamp.offset

    def _take(self, line: LogLine, order: int) -> None:
        """Parse a line. If it matches a rule, count it."""
        seen, prefix = self._seen, line.split()
        text = prefix.text
        found = next(
            (
                rule
                for needle, pattern, rule in self._table
                if needle in text and pattern.matches(text)
            ),
            None,
        )
        place = self._place(line, prefix, order)
        excused = bool(found and found.id in self._excused.get(line.source, ()))
        if found and not excused:
            key = (found.id, line.source)
            seen.tallies.setdefault(key, Tally(place, place)).add(place)
            if found.excuses:
                already = self._excused.get(line.source, frozenset())
                self._excused[line.source] = already | {*found.excuses}
        if any(each in text for each in _BEGINS):
            self._excused.pop(line.source, None)
        for until, rule_id in self._untils:
            if until in text:
                seen.tallies.pop((rule_id, line.source), None)
        if STARTED in text:
            seen.started[line.source] = place
            self._forget_survived_error(line.source)
        kind = Kind.NOTE if excused else found.kind if found else None
        self._note_error(place, prefix, kind)

    def _forget_survived_error(self, source: str) -> None:
        """
        Forget the first error of a log if the server started although the error occurred.

        If a process ended, the error is kept, because a later start does not explain an earlier
        failure.
        """
        seen = self._seen
        derived = {rule.id for rule in self._rules if rule.derived}
        ended = any(log == source and rule in derived for rule, log in seen.tallies)
        broke = seen.first_exception and seen.first_exception.source == source
        if seen.first_error and seen.first_error.source == source and not ended and not broke:
            seen.first_error = None

    def _place(self, line: LogLine, prefix: Prefix, order: int) -> Place:
        stamp = prefix.stamp
        if stamp is None and line.source in self._stamped:
            stamp = split_prefix(self._stamped[line.source]).stamp
        text = prefix.text.rstrip()[:LONGEST_QUOTE]
        return Place(line.source, line.number, prefix.process, stamp, text, order)

    def _note_error(self, place: Place, prefix: Prefix, kind: Kind | None) -> None:
        """
        Remember the first error, and the end of the first traceback that belongs to a failure.
        """
        seen, key = self._seen, (place.source, place.process)
        if kind is Kind.NOTE:
            # A traceback that ends with this line was not a failure (it may be the mistake of a
            # client), so its first line was not an error.
            began = self._tracebacks.pop(key, None)
            error = seen.first_error
            # The line before a traceback states the failure, so it is forgotten too.
            if began and error and (error.source, error.process) == key:
                seen.first_error = None if error.number >= began - 1 else error
            return
        if seen.first_exception:
            self._tracebacks.clear()
            return
        begins = _TRACEBACK in prefix.text
        if begins and not prefix.text.startswith(_TRACEBACK):
            key = (place.source, _RANKS.sub("", place.process))
        serious = prefix.level in _SERIOUS or (not prefix.level and _BARE.match(place.text))
        if seen.first_error is None and (begins or serious):
            seen.first_error = place
        if begins:
            if len(self._tracebacks) < MOST_OPEN:
                self._tracebacks[key] = place.number
        elif key in self._tracebacks:
            if kind is Kind.DERIVED:
                del self._tracebacks[key]
            elif _EXCEPTION.match(place.text):
                seen.first_exception = place
            elif place.number > self._tracebacks[key] + LONGEST_TRACEBACK:
                del self._tracebacks[key]


def stamp_utc(stamp: Stamp | None, offset: int | None, year: int) -> datetime | None:
    """
    Convert the time of a line to UTC. Return None if the line has no time.

    `offset` is the time zone in minutes for times without a zone. `year` is used for times without
    a year.
    """
    if stamp is None:
        return None
    moment = stamp.moment
    if not stamp.has_year:
        try:
            moment = moment.replace(year=year)
        except ValueError:  # 29 February
            moment = moment.replace(year=year, day=28)
    minutes = stamp.offset if stamp.offset is not None else (offset or 0)
    return (moment - timedelta(minutes=minutes)).replace(tzinfo=UTC)
