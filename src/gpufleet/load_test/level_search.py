"""Search for the highest level of load at which the contract is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.level_runs import LevelRuns, too_old_seconds
from gpufleet.load_test.rate_search import RateSearch
from gpufleet.load_test.result import RateBracket, Searched
from gpufleet.load_test.verdicts import fewest_seconds

START_RATE = 0.5
"""
Arrivals per second of the first level.

If this level does not meet the contract, lower rates are tried.
"""
MOST_CONCURRENCY = 1024.0
"""The maximum concurrency of a closed loop. guidellm has the same limit of streams."""


@dataclass(frozen=True)
class LevelSearch:
    """Searches for the highest load at which one target meets the contract."""

    runs: LevelRuns
    seconds: float
    """Time limit of a level in seconds. A level gets more time if a verdict takes longer."""
    request_seconds: float
    """The time in seconds that the largest request takes on an idle server."""
    on_level: Callable[[LevelSummary], None] = lambda _level: None

    def rate(self, most: float) -> Searched:
        """Find the highest arrivals per second, up to `most`, at which the contract is met."""
        start = min(START_RATE, most)
        # At this rate one request of the largest size is in the server on average.
        alone = 1 / self.request_seconds if self.request_seconds else start
        return self._search(RateSearch(start, most, least=alone))

    def concurrency(self, start: float, most_rate: float) -> Searched:
        """
        Find the highest concurrency of a closed loop at which the contract is met.

        The search also ends if a level has more than `most_rate` answers per second, which is the
        clients' maximum.
        """
        first = min(MOST_CONCURRENCY, max(1.0, round(start)))
        search = RateSearch(first, MOST_CONCURRENCY, whole=True, least=1.0)
        return self._search(search, closed=True, most_rate=most_rate)

    def single(self, load: float, *, closed: bool = False) -> Searched:
        """Run a single level of load instead of a search."""
        level = self.runs.run(load, self.seconds, closed=closed)
        self.on_level(level)
        return Searched((level,), single_level(level))

    def _search(
        self, search: RateSearch, *, closed: bool = False, most_rate: float | None = None
    ) -> Searched:
        levels: list[LevelSummary] = []
        while (load := search.next()) is not None:
            seconds = self._least_seconds(load, closed=closed) * search.budget_factor
            level = self.runs.run(load, seconds, closed=closed)
            levels.append(level)
            self.on_level(level)
            if self.runs.stopped:
                return Searched(tuple(levels), interrupted_search(levels, self.runs.stopped))
            search.add(level)
            if most_rate is not None and level.answered_per_second > most_rate:
                return Searched(tuple(levels), interrupted_search(levels, _client_full(level)))
        found = search.result()
        kept, missed = found.kept, found.missed
        return Searched(
            tuple(levels),
            RateBracket(
                kept.load if kept else None,
                missed.load if missed else None,
                found.status,
                found.why,
                kept.mean_concurrency if kept else None,
            ),
        )

    def _least_seconds(self, load: float, *, closed: bool) -> float:
        """
        Return a level's time limit in seconds.

        The limit is at least twice the time that a verdict needs. On a server that answers almost
        nothing in time, a verdict comes only when requests are too old to meet the contract.
        """
        contract = self.runs.contract
        rate = load / self.request_seconds if closed and self.request_seconds else load
        least = fewest_seconds(contract, rate, self.request_seconds)
        return max(self.seconds, 2 * max(least, too_old_seconds(contract)))


def single_level(level: LevelSummary) -> RateBracket:
    """Return the result of a single level."""
    kept = level.load if level.verdict == "kept" else None
    missed = level.load if level.verdict == "missed" else None
    status = {"kept": "ceiling", "missed": "missed", "not known": "not known"}[level.verdict]
    if missed is not None and level.concurrency == 1:
        status = "not even one"
    return RateBracket(kept, missed, status, level.why, level.mean_concurrency)


def interrupted_search(levels: Sequence[LevelSummary], why: str) -> RateBracket:
    """Return the result of a search that was interrupted after these levels."""
    kept = max(
        (each for each in levels if each.verdict == "kept"), key=lambda e: e.load, default=None
    )
    return RateBracket(
        kept.load if kept else None,
        None,
        "ceiling" if kept else "not known",
        why,
        kept.mean_concurrency if kept else None,
    )


def _client_full(level: LevelSummary) -> str:
    return (
        f"{level.load:g} concurrent requests were answered at {level.answered_per_second:.3g} "
        "requests a second. The client cannot send more than that: use more --processes"
    )
