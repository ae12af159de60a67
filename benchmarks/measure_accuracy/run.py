"""
Test that `gpufleet measure` finds a known capacity, and never states a wrong one.

    python -m benchmarks.measure_accuracy.run [SEARCHES] [--first N] [--rows 1 2 ...] [--simulated]

Whole searches (default 20 of each row, each with its own seed): the search, its levels, verdicts
and the load client's own code over real HTTP to tests/support/queue_server.py, in virtual time
(virtual_time.py). The true rate comes from another route (queues.py). A search is right if its
bracket encloses the true rate, where an end that is not known excludes nothing; wrong if a level
was judged as kept above it or missed below it. Goals: with 900 s a level none is wrong and all are
within 10 %; with budgets that are too small none is wrong. `--simulated` leaves client and HTTP
out (simulated.py): only search and verdicts, some ten times as fast.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.measure_accuracy.queues import FIXED, RANDOM, Queue
from benchmarks.measure_accuracy.simulated import simulated_level
from benchmarks.measure_accuracy.virtual_time import virtual_clients
from gpufleet.load_test.client_places import CONTROLLER, ClientPlace
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.level_runs import LevelRuns
from gpufleet.load_test.load_target import Target
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.rate_search import RateSearch
from gpufleet.load_test.verdicts import fewest_seconds
from gpufleet.load_test.workloads import TokenRange

WITHIN = 0.1
NEAR = 0.03
"""A level within so much of the true rate is close to it: some verdicts on it may be wrong."""
MOST_TIMES = 4
"""The highest level, in multiples of the saturation."""
IDS = TokenRange(100, 1000)


@dataclass(frozen=True)
class Row:
    """Searches that differ in their seed only."""

    queue: Queue
    seconds: float
    """Most of a level."""
    floor: bool
    """The least that a verdict takes is given in any case, as the command does."""
    finds: bool
    """The budget suffices, so each search has to end within 10 %."""

    @property
    def name(self) -> str:
        """Return what is printed."""
        return f"{self.queue.name}; {self.seconds:g} s a level" + ("" if self.floor else ", forced")


ROWS = (
    Row(FIXED, 900, floor=True, finds=True),
    Row(FIXED, 120, floor=True, finds=False),
    Row(FIXED, 45, floor=False, finds=False),
    Row(RANDOM, 45, floor=False, finds=False),
    Row(RANDOM, 900, floor=True, finds=True),
)


@dataclass(frozen=True)
class Searched:
    """The result of one search."""

    status: str
    kept: float | None
    missed: float | None
    levels: int
    requests: int
    seconds: float
    """Virtual seconds of all levels together."""
    deviation: float
    """The largest difference between the client's times and the server's, in seconds."""
    verdicts: tuple[tuple[float, str], ...] = ()
    """The rate and verdict of each level."""

    def is_right(self, true: float) -> bool:
        """Return whether nothing that it states excludes the true rate."""
        return (self.kept or 0.0) <= true <= (self.missed or float("inf"))

    def is_within(self, true: float, part: float = WITHIN) -> bool:
        """Return whether both ends are known and this close to the true rate."""
        return (
            self.kept is not None
            and self.missed is not None
            and self.kept >= true * (1 - part)
            and self.missed <= true * (1 + part)
        )

    def near(self, true: float) -> list[tuple[float, str]]:
        """Return the verdicts on levels close to the true rate."""
        return [each for each in self.verdicts if abs(each[0] / true - 1) <= NEAR]

    def wrong(self, true: float) -> list[float]:
        """Return the levels judged as kept above the true rate or missed below it."""
        return [
            rate
            for rate, verdict in self.verdicts
            if (verdict == "kept" and rate > true) or (verdict == "missed" and rate < true)
        ]

    def line(self, true: float) -> str:
        """Return it as it is printed."""
        ends = " to ".join("?" if end is None else f"{end:.2f}" for end in (self.kept, self.missed))
        return (
            f"  {ends:14} {self.status:9} {'right' if self.is_right(true) else 'WRONG'}, "
            f"{self.levels} levels, {self.requests} requests, {self.seconds:.0f} s, "
            f"deviation {self.deviation:.6f} s, load {os.getloadavg()[0]:.1f}"
        )


def main() -> int:
    """Search and print; status 1 if a goal is missed."""
    taken = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    taken.add_argument("searches", type=int, nargs="?", default=20)
    taken.add_argument("--first", type=int, default=1)
    taken.add_argument("--rows", type=int, nargs="+", default=range(1, len(ROWS) + 1))
    taken.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    taken.add_argument("--simulated", action="store_true")
    given = taken.parse_args()
    missed = 0
    began = time.monotonic()
    with multiprocessing.Pool(given.processes, maxtasksperchild=1) as pool:
        for row in (ROWS[number - 1] for number in given.rows):
            true = pool.apply(row.queue.true_rate)
            print(
                f"\n{row.name}: truly {true:.3f} requests/s of {row.queue.saturation:g} at "
                "saturation",
                flush=True,
            )
            numbers = range(given.first, given.first + given.searches)
            work = [(row, 1000 * number) for number in numbers]
            found = []
            for each in pool.imap(simulated_search if given.simulated else search, work):
                found.append(each)
                print(each.line(true), flush=True)
            missed += not report(row, true, found)
    print(
        f"\n{time.monotonic() - began:.0f} s for all, load {os.getloadavg()[0]:.1f}; goals "
        f"{'missed' if missed else 'kept'}"
    )
    return int(missed > 0)


def search(work: tuple[Row, int]) -> Searched:
    """Find the rate of a new server, of a row and a seed."""
    row, seed = work
    queue = row.queue
    server = queue.server(seed)
    with virtual_clients(server) as clients:
        target = Target("replica queue-0", server.url, "queue", "queue", ("queue-0",), 1)
        runs = LevelRuns(
            target, queue.contract, queue.work, IDS, seed, 1,
            place=ClientPlace(CONTROLLER, 1, clients.start), sleep=clients.sleep,
        )  # fmt: skip
        found = find(row, seed, runs.try_largest(), runs.run)
        seconds = clients.now
    deviations = [link.deviation for link in clients.links]
    worst = max(float("inf") if each is None else each for each in deviations)
    return replace(found, requests=len(server.record), seconds=seconds, deviation=worst)


def simulated_search(work: tuple[Row, int]) -> Searched:
    """Find the rate of a simulated queue, of a row and a seed."""
    row, seed = work
    queue, numbers = row.queue, itertools.count()
    largest = queue.first_seconds + (queue.tokens.most - 1) * queue.token_seconds
    return find(
        row,
        seed,
        largest,
        lambda rate, seconds: simulated_level(queue, rate, seconds, f"{seed}/{next(numbers)}"),
    )


def find(
    row: Row, seed: int, request_seconds: float, run: Callable[[float, float], LevelSummary]
) -> Searched:
    """Find the rate of a row; `run` puts on a level of a rate and the most seconds."""
    # The command begins with 0.5: here other levels are tried in each search.
    start = random.Random(seed).uniform(0.5, 1.0)
    rates = RateSearch(start, MOST_TIMES * row.queue.saturation)
    floor = request_seconds if row.floor else None
    return run_search(rates, row.queue.contract, row.seconds, floor, run)


def run_search(
    rates: RateSearch,
    contract: Contract,
    seconds: float,
    request_seconds: float | None,
    run: Callable[[float, float], LevelSummary],
) -> Searched:
    """
    Search as `gpufleet measure` does; `run` puts on a level of a rate and the most seconds.

    With `request_seconds` each level has the least time that a verdict takes; None: `seconds` only.
    """
    levels = []
    while (rate := rates.next()) is not None:
        least = (
            0.0 if request_seconds is None else 2 * fewest_seconds(contract, rate, request_seconds)
        )
        levels.append(run(rate, max(seconds, least) * rates.budget_factor))
        rates.add(levels[-1])
    found = rates.result()
    return Searched(
        found.status,
        found.kept.load if found.kept else None,
        found.missed.load if found.missed else None,
        len(levels),
        sum(each.requests for each in levels),
        sum(each.seconds for each in levels),
        0.0,
        tuple((each.load, each.verdict) for each in levels),
    )


def report(row: Row, true: float, found: list[Searched]) -> bool:
    """Print the sums of a row; return whether its goal is kept."""
    right = sum(each.is_right(true) for each in found)
    within = sum(each.is_within(true) for each in found)
    stated = sum(each.status == "found" for each in found)
    print(
        f"  {len(found) - right} wrong of {len(found)}; found: {stated}; both ends within "
        f"{WITHIN:.0%} of the truth: {within}; server's times differ from the client's by at most "
        f"{max(each.deviation for each in found):.6f} s",
        flush=True,
    )
    return right == len(found) and (within == len(found) or not row.finds)


if __name__ == "__main__":
    sys.exit(main())
