"""Merge the journals of a replica's ranks by time. Pure.

The input is the output of `on_node/common/unit_journal.py` on each node. To follow the journals,
gpufleet repeats the query. Each line has the time of its own node, so the order of lines from two
nodes is only as exact as the nodes' clocks. Known clock differences are reported.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.on_node.common.stage_units import PREFIX, SUFFIX
from gpufleet.remote import payload
from gpufleet.sanitize import printable

# Limit of lines in one round: ten times what terminals usually keep.
MOST_LINES = 10_000
FOLLOWED_LINES = 5000
# With NTP, the clocks of two nodes differ by some milliseconds. Related lines of two nodes are
# closer together than this limit only by chance.
CLOCK_MILLISECONDS = 100

_AGO = re.compile(r"-?(\d+) ?(s|m|min|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_ID = re.compile(r"[\w.-]+-\d+")
# vLLM colours its prefixes; the colours are harmless and useless.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, order=True)
class Line:
    """One line of one rank's journal."""

    microseconds: int
    """Microseconds since 1970, by the node's clock."""
    node: str
    order: int
    """Position among the lines of the node, which can have equal times."""
    rank: int | None = field(compare=False)
    pid: int | None = field(compare=False)
    priority: int | None = field(compare=False)
    """syslog's priority: 3 is an error."""
    text: str = field(compare=False)

    @property
    def time(self) -> str:
        """The time as ISO 8601 in UTC, to the millisecond."""
        moment = dt.datetime.fromtimestamp(self.microseconds // 1_000_000, dt.UTC)
        return f"{moment:%Y-%m-%dT%H:%M:%S}.{self.microseconds // 1000 % 1000:03}Z"

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "time": self.time,
            "node": self.node,
            "rank": self.rank,
            "pid": self.pid,
            "priority": self.priority,
            "message": self.text,
        }


@dataclass
class Journals:
    """
    The reader of a replica's journals.

    `program(node)` returns the next query to a node, and `take(answers)` the received lines.
    `notes` has remarks, each only once. `whole` becomes false when lines are missing.
    """

    replica: str
    """The replica's id, such as `llama-0`."""
    lines: int
    """The maximum number of lines in the first round."""
    when: Mapping[str, float]
    """The start time, from `parse_since()`."""
    notes: list[str] = field(default_factory=list)
    whole: bool = True
    nodes: set[str] = field(default_factory=set)
    """Nodes that have a unit or lines of the replica."""
    _cursors: dict[str, str] = field(default_factory=dict)
    _begun: dict[str, int] = field(default_factory=dict)
    _silent: set[str] = field(default_factory=set)
    _noted: set[str] = field(default_factory=set)
    _rounds: int = 0

    def __post_init__(self) -> None:
        self.replica = self.replica.removeprefix(PREFIX).removesuffix(SUFFIX)
        if not _ID.fullmatch(self.replica):
            raise FleetError(
                f"{self.replica!r} is not the name of a replica: give the model and the number of "
                "the replica as `gpufleet status` shows them, for example llama-0"
            )
        if not 0 < self.lines <= MOST_LINES:
            raise FleetError(f"--lines {self.lines}: give 1 to {MOST_LINES}")

    def program(self, node: str) -> str | None:
        """
        Return the next program to run on a node, or None if the node has no part of the replica.
        """
        if self._rounds and node not in self.nodes | self._silent:
            return None
        where: dict[str, Any] = dict(self.when)
        if node in self._cursors:
            where = {"cursor": self._cursors[node], "at": self._begun[node]}
        elif node in self._begun:
            where = {"at": self._begun[node]}
        return payload.program("common/unit_journal", stage=self.replica, lines=self._most, **where)

    @property
    def _most(self) -> int:
        """The maximum number of lines in the next round, large enough for followed lines."""
        return max(self.lines, FOLLOWED_LINES) if self._rounds else self.lines

    def take(self, answers: Mapping[str, Mapping[str, Any] | str]) -> list[Line]:
        """
        Return the lines of one round, oldest first.

        The first round returns the last `lines` lines of all nodes together.

        Raises `FleetError` if no node knows the replica after the first round.
        """
        found: list[Line] = []
        known: set[str] = set()
        more = False
        for node, answer in sorted(answers.items()):
            if isinstance(answer, str):
                self._lost(node, answer)
                continue
            try:
                taken = _lines(self.replica, node, answer)
                self._silent.discard(node)
                known |= {str(each) for each in answer["here"] if isinstance(answer["here"], list)}
                if taken or self.replica in answer["here"]:
                    self.nodes.add(node)
                    self._clocks(node, answer["clocks"])
                if isinstance(answer["cursor"], str):
                    self._cursors[node] = answer["cursor"]
                if taken or node not in self._begun:
                    last = taken[-1].microseconds if taken else int(answer["clock"])
                    self._begun[node] = last // 1_000_000
                more = more or bool(answer["more"])
            except _UnreadError as why:
                self._lost(node, str(why))
                continue
            # A broken or hostile node must not affect the others.
            except (
                AttributeError,
                IndexError,
                KeyError,
                OverflowError,
                TypeError,
                ValueError,
            ) as why:
                self._lost(node, f"the node's answer is invalid ({type(why).__name__}: {why})")
                continue
            found += taken
        found.sort()
        if not self._rounds and not self.nodes:
            self._unknown(known)
        if not self._rounds:
            found = found[-self.lines :]
        elif more:
            self._note(
                f"more than {self._most} lines arrived at once: only the last ones are shown"
            )
            self.whole = False
        self._rounds += 1
        return found

    def _lost(self, node: str, why: str) -> None:
        self.whole = False
        self._silent.add(node)
        self._note(f"{node}: {why}: if a rank of {self.replica} runs there, its lines are missing")

    def _clocks(self, node: str, clocks: Any) -> None:
        if not isinstance(clocks, Mapping) or "missing" in clocks:
            return
        for peer, ahead in clocks.items():
            if abs(ahead) >= CLOCK_MILLISECONDS:
                first, last = sorted((node, str(peer)))
                differ = f"the clocks of {first} and {last} differ by {abs(ahead) / 1000:.1f} s"
                self._note(f"{differ}, so the order of their lines may be wrong by this time")

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.notes.append(text)

    def _unknown(self, known: set[str]) -> None:
        if self._silent:
            raise FleetError(f"no node that answered has {self.replica}", *self.notes)
        raise FleetError(
            f"no node has {self.replica}{suggestion(self.replica, sorted(known))}"
            + (
                f"; known replicas: {', '.join(sorted(known))}"
                if known
                else "; nothing is deployed"
            )
        )


class _UnreadError(Exception):
    """A node's answer has no readable journal."""


def _lines(replica: str, node: str, answer: Mapping[str, Any]) -> list[Line]:
    if answer["schema"] != 1:
        raise ValueError(f"schema {answer['schema']!r}, expected 1")
    lines = answer["lines"]
    if isinstance(lines, Mapping):
        if isinstance(answer["here"], list) and replica not in answer["here"]:
            return []  # what it cannot read is not a gpufleet unit
        raise _UnreadError(
            f"the unit's journal cannot be read: {lines.get('detail') or lines['missing']}"
        )
    rank = answer["rank"] if isinstance(answer["rank"], int) else None
    found = [
        Line(int(at), node, order, rank, pid, priority, str(text))
        for order, (at, pid, priority, text) in enumerate(lines)
    ]
    for line in found:
        _ = line.time  # raises for a time that is not a date
    return found


def parse_since(text: str | None) -> dict[str, float]:
    """
    Return the start time of the requested lines, in the form of `on_node/common/unit_journal.py`.

    `text` is an age such as `10m` or `-10m`, or a time in ISO 8601 (UTC by default). The units of
    an age are s, m, h and d, and each node uses its own clock. Raises `FleetError` for any other
    text.

    >>> parse_since("-10m"), parse_since("2026-11-21T19:40")
    ({'ago': 600}, {'at': 1795290000.0})
    """
    if text is None:
        return {}
    if ago := _AGO.fullmatch(text.strip()):
        return {"ago": int(ago[1]) * _SECONDS[ago[2]]}
    try:
        moment = dt.datetime.fromisoformat(text.strip())
    except ValueError:
        raise FleetError(
            f"--since {text!r} is not a time: write 10m (s, m, h, d) or 2026-11-21T19:40 (UTC)"
        ) from None
    return {"at": (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()}


def format_lines(lines: Iterable[Line], nodes: Iterable[str]) -> list[str]:
    """
    Return lines for a terminal, each with time, node, rank and message.

    The second and later lines of a message are indented, so that they cannot look like lines of a
    different rank.
    """
    width = max(map(len, nodes), default=0)
    return [_one(line, width) for line in lines]


def _one(line: Line, width: int) -> str:
    who = f"{line.node:<{width}}" + ("" if line.rank is None else f" {line.rank}")
    head = f"{line.time} {printable(who)} "
    text = _COLOURS.sub("", line.text).replace("\t", "    ")
    first, *rest = printable(text).split("\n")
    return "\n".join([head + first, *(" " * len(head) + each for each in rest)])
