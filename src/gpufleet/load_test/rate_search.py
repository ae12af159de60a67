"""Find the highest load at which a contract is met: double the load, then bisect. Pure.

If the contract is not met at the first level, the load is halved, at most down to one request at a
time.

Only levels with a verdict bound the result. A level whose verdict is "not known" is tried once
more, with twice the budget. If its verdict is still "not known", the limit is close to this level.
Then levels below and above this level are tried, as far away as the tolerance allows, because they
reach a verdict sooner. If these levels do not enclose the limit closely enough, the result is "not
known" with the levels.

A load is arrivals per second, or the concurrency of a closed loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpufleet.load_test.level import LevelSummary

Status = Literal["found", "not known", "not even one", "ceiling", "budget"]

MOST_LEVELS = 24
"""
The maximum number of levels in a search.

Doubling from 0.5 to 2,048 and bisecting to a tenth takes 16 levels, and a level without a verdict
is tried twice. Of 40 simulated searches with 900 s a level, 39 ended within a tenth of the true
rate on both sides with at most 20 levels, and 34 with at most 15. Of 20 searches over HTTP with at
most 20 levels, 19 ended so, and the other one after its 21st.
"""
MOST_UNKNOWN = 5
"""
The maximum number of levels without a verdict between kept and missed ones, because each takes
three times a level's budget. Levels below the first miss do not count, because few requests arrive
at a low rate.
"""
MOST_UNKNOWN_DOUBLED = 2
"""
The maximum number of levels without a verdict above the highest kept one, before a level is missed.

If twice the load also gives no verdict, the limit is not near: the client or the time limit is the
cause, and still more load would not help.
"""
MOST_HALVINGS = 4
"""
The maximum of halvings after a missed first level.

Each level takes twice the time of the previous one.
"""
FEWEST_FOR_KNEE = 5
"""The minimum of levels for a knee, as in guidellm: two lines fit any smaller number of points."""
KNEE_SLOPE = 0.5
"""The maximum ratio of the second line's slope to the first one's at a knee."""
KNEE_SHORTFALL = 0.9
"""
The maximum ratio, at a knee, of tokens per second at the largest load to the first line's.

Chance lowers tokens less.
"""
ROUNDING = 1e-6
"""Relative margin that keeps two gaps within the tolerance despite floating-point errors."""
APART = 1.1
"""
The minimum ratio of two loads whose ITL is compared.

For closer loads, noise exceeds the load's effect.
"""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `kept` and `missed` enclose the limit if both are known."""

    status: Status
    kept: LevelSummary | None
    """The highest level that kept the contract, or None."""
    missed: LevelSummary | None
    """The lowest level that missed the contract, or None."""
    unknown: tuple[LevelSummary, ...]
    """Levels between `kept` and `missed` without a verdict after the second try, lowest first."""
    why: str


class _Bracket(NamedTuple):
    """The loads that enclose the limit, and the lowest and highest unresolved load between them."""

    kept: float
    lowest: float
    highest: float
    missed: float


class RateSearch:
    """
    Chooses the next level to try. Call `next`, measure the level and `add` it, until `next` returns
    None.
    """

    def __init__(
        self,
        start: float,
        most: float,
        tolerance: float = 0.1,
        budget_levels: int = MOST_LEVELS,
        *,
        whole: bool = False,
        least: float | None = None,
    ) -> None:
        """
        Set the first and the largest load to try.

        If the first load is missed, it is halved down to `least`, one request at a time, at most
        `MOST_HALVINGS` times. Without `least`, the first load is the smallest. The search ends when
        missed - kept <= `tolerance` x kept, or after `budget_levels` levels, including second
        tries. With `whole`, only whole numbers are tried, for example for concurrency.
        """
        if not 0 < start <= most or not tolerance > 0:
            raise ValueError(
                f"start {start}, most {most}, tolerance {tolerance}: 0 < start <= most"
            )
        self._start, self._most, self._tolerance = start, most, tolerance
        self._levels_left, self._whole = budget_levels, whole
        self._least = start if least is None else min(start, least)
        self._asked: float | None = None
        self._second_try = False
        self._kept: tuple[float, LevelSummary] | None = None
        self._missed: tuple[float, LevelSummary] | None = None
        self._unresolved: dict[float, LevelSummary] = {}

    @property
    def budget_factor(self) -> int:
        """The factor, 1 or 2, on the usual budget for the level of the last `next`."""
        return 2 if self._second_try else 1

    def next(self) -> float | None:
        """
        Return the load to measure next, or None if the search has ended.

        The same load is returned until its level is added.
        """
        if self._asked is None and self._levels_left > 0:
            self._asked = self._choose()
        return self._asked

    def add(self, level: LevelSummary) -> None:
        """Record the level requested by `next`. Raises ValueError if no level is requested."""
        if self._asked is None:
            raise ValueError("no level was asked for: call next() first")
        load, self._asked = self._asked, None
        self._levels_left -= 1
        if level.verdict == "not known" and not self._second_try:
            self._asked, self._second_try = load if self._levels_left else None, True
            self._unresolved[load] = level
            return
        self._second_try = False
        self._unresolved.pop(load, None)
        if level.verdict == "kept":
            self._kept = (load, level)
        elif level.verdict == "missed":
            self._missed = (load, level)
        else:
            self._unresolved[load] = level

    def result(self) -> SearchResult:
        """Return the result so far, even before the end of the search."""
        status, why = self._status()
        return SearchResult(
            status,
            self._kept and self._kept[1],
            self._missed and self._missed[1],
            tuple(self._unresolved[load] for load in self._between()),
            why,
        )

    def _between(self) -> list[float]:
        """Return the unresolved loads between the kept and the missed one."""
        low = self._kept[0] if self._kept else 0.0
        high = self._missed[0] if self._missed else math.inf
        return sorted(load for load in self._unresolved if low < load < high)

    def _choose(self) -> float | None:
        between = self._between()
        if self._missed is None:
            tried = max([self._kept[0] if self._kept else 0.0, *between])
            if not tried:
                return self._start
            if self._kept and len(between) >= MOST_UNKNOWN_DOUBLED:
                return None
            if tried < self._most:
                return min(2 * tried, self._most)
        if self._kept is None and self._missed is not None:
            return self._below_start(min([self._missed[0], *between]))
        if self._kept is None or (self._missed is None and not between):
            return None
        if len(between) >= MOST_UNKNOWN:
            return None
        kept = self._kept[0]
        missed = self._missed[0] if self._missed else self._most
        if missed <= kept * (1 + self._tolerance) and self._missed:
            return None
        if not between:
            return self._rounded((kept + missed) / 2, kept, missed)
        return self._beside(_Bracket(kept, between[0], between[-1], missed))

    def _below_start(self, lowest: float) -> float | None:
        """Return the next load below the missed first one, or None at the end."""
        floor = max(self._least, self._start / 2.0**MOST_HALVINGS)
        if self._missed is None or self._missed[0] > self._start or lowest <= floor:
            return None
        wanted = max(lowest / 2, floor)
        return max(1.0, float(math.floor(wanted))) if self._whole else wanted

    def _beside(self, bracket: _Bracket) -> float | None:
        """
        Return a load below or above the unresolved ones, in the wider gap; None if both are closed.
        """
        room = (1 + self._tolerance) * bracket.lowest / bracket.highest
        close = (1 + self._tolerance) ** 0.25
        # Both gaps share what the tolerance leaves. If that is next to nothing, the two ends only
        # come close to what is unresolved.
        gap = close if room < close else math.sqrt(room) * (1 - ROUNDING)
        first = bracket.lowest == bracket.highest
        gaps = [
            (
                bracket.lowest / bracket.kept,
                bracket.lowest / gap if first else (bracket.kept + bracket.lowest) / 2,
                bracket.kept,
                bracket.lowest,
            ),
            (
                bracket.missed / bracket.highest,
                bracket.highest * gap if first else (bracket.highest + bracket.missed) / 2,
                bracket.highest,
                bracket.missed,
            ),
        ]
        for ratio, load, low, high in sorted(gaps, reverse=True):
            rounded = self._rounded(load, low, high) if ratio > gap * (1 + ROUNDING / 2) else None
            if rounded is not None:
                return rounded
        return None

    def _rounded(self, load: float, low: float, high: float) -> float | None:
        """
        Return a load strictly between `low` and `high`; None if no whole number is between them.
        """
        if not self._whole:
            return load
        inside = min(max(float(round(load)), math.floor(low) + 1.0), math.ceil(high) - 1.0)
        return inside if low < inside < high else None

    def _status(self) -> tuple[Status, str]:
        between = self._between()
        kept = self._kept[0] if self._kept else None
        missed = self._missed[0] if self._missed else None
        if kept is None and missed is not None and self._missed and missed <= self._least:
            single = missed == 1 if self._whole else missed < self._start
            what = "even one request at a time" if single else "the smallest load"
            return "not even one", (
                f"{what}, {missed:g}, does not meet the contract: {self._missed[1].why}"
            )
        if kept == self._most:
            return "ceiling", (
                f"the contract is met even at {kept:g}, the largest load that was allowed"
            )
        close = kept is not None and missed is not None and missed <= kept * (1 + self._tolerance)
        if kept is not None and missed is not None and (close or self._has_no_whole_between()):
            return "found", f"the contract is met at {kept:g}, and not met at {missed:g}"
        bounds = (
            "the highest load that is known to meet the contract is "
            f"{'none' if kept is None else format(kept, 'g')}, and the lowest that is known not "
            f"to meet it is {'none' if missed is None else format(missed, 'g')}"
        )
        if between:
            loads = ", ".join(format(load, "g") for load in between)
            return "not known", f"{bounds}. There was no verdict within the time limit at {loads}"
        return "budget", f"{bounds}. The search ended before these two loads were close"

    def _has_no_whole_between(self) -> bool:
        return bool(
            self._whole and self._kept and self._missed and self._missed[0] - self._kept[0] <= 1
        )


def find_knee(levels: Sequence[LevelSummary]) -> LevelSummary | None:
    """
    Return the knee: the level beyond which tokens per second rise by less than the load.

    Tokens are those of answers, or of prompts if answers have none. The knee is the best fit of two
    lines, one from zero to the knee and one beyond it, if the second rises at most `KNEE_SLOPE` as
    steeply. The result is None otherwise, and for fewer than five loads.
    """
    ordered = _by_load(levels)
    if len(ordered) < FEWEST_FOR_KNEE:
        return None
    points = [(each.load, each.output_tokens_per_second) for each in ordered]
    if not any(tokens for _, tokens in points):
        points = [(each.load, each.prompt_tokens_per_second) for each in ordered]
    _, at = min((_misfit(points, at)[0], at) for at in range(1, len(ordered) - 1))
    _, first, second = _misfit(points, at)
    load, tokens = points[-1]
    short = tokens <= KNEE_SHORTFALL * first * load
    return ordered[at] if short and second <= KNEE_SLOPE * first else None


def bend_sentences(levels: Sequence[LevelSummary]) -> tuple[str, ...]:
    """Return sentences on the knee, and on the level at which ITL runs away, if they exist."""
    knee, runaway = find_knee(levels), itl_runaway(levels)
    return (
        *([(
            f"The knee is at {knee.load:.4g} {knee.unit}: above this load, tokens per second "
            "grow more slowly than the load."
        )]
          if knee else []),
        *([(
            f"Up to {runaway.load:.4g} {runaway.unit}, p99 ITL has grown by a larger factor than "
            "the load."
        )] if runaway else []),
    )  # fmt: skip


def _misfit(points: Sequence[tuple[float, float]], at: int) -> tuple[float, float, float]:
    """
    Return the squared error and the slopes of a line from zero to a level, and of one beyond it.
    """
    first = _steepness(points[: at + 1])
    edge = points[at][0]
    rest = [(x - edge, y - first * edge) for x, y in points[at + 1 :]]
    second = _steepness(rest)
    error = sum((y - first * x) ** 2 for x, y in points[: at + 1])
    return error + sum((y - second * x) ** 2 for x, y in rest), first, second


def itl_runaway(levels: Sequence[LevelSummary]) -> LevelSummary | None:
    """
    Return the first level at which p99 ITL grows by a larger factor than the load.

    Each level is compared with the next lower level that is lower by at least the factor `APART`.
    The result is None if no level grows so.
    """
    compared: LevelSummary | None = None
    for level in _by_load(levels):
        if "p99" not in level.itl:
            continue
        if compared is None:
            compared = level
        elif level.load >= APART * compared.load:
            if level.itl["p99"] / compared.itl["p99"] > level.load / compared.load:
                return level
            compared = level
    return None


def _by_load(levels: Sequence[LevelSummary]) -> list[LevelSummary]:
    """Return levels with requests by load; after two tries, only the later one."""
    last = {level.load: level for level in levels if level.requests}
    return [last[load] for load in sorted(last)]


def _steepness(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the best-fitting line through zero."""
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)
