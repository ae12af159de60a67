"""Compute the time series of a load test: arrivals, latencies and the servers' load. Pure.

The steps have equal length, by the requests' due times. There are at most `MOST_STEPS`, however
long the test took.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpufleet.load_test.intervals import percentile

MOST_STEPS = 240
_LENGTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
"""The possible step lengths in seconds."""
_DIGITS = 6


@dataclass(frozen=True)
class TimeSeries:
    """Series with one value for each step; None if unknown in that step."""

    step_seconds: float
    levels: tuple[float, ...]
    """
    The begin of each level in seconds since the measurement's begin; a closed loop's come last.
    """
    rate: tuple[float, ...]
    """Due requests per second."""
    failed: tuple[float, ...]
    """
    Due requests per second without a complete answer.

    Requests dropped at a level's end do not count.
    """
    running: tuple[float | None, ...]
    """Requests that the target's servers worked on, including other clients'."""
    waiting: tuple[float | None, ...]
    """Requests that waited for the servers."""
    kv_usage: tuple[float | None, ...]
    """The used share of the servers' KV caches, as the mean of all."""
    ttft_p50: tuple[float | None, ...]
    """Seconds from the intended arrival to the first token."""
    ttft_p95: tuple[float | None, ...]
    itl_p50: tuple[float | None, ...]
    """Percentile over requests of the mean seconds between an answer's tokens."""
    itl_p95: tuple[float | None, ...]


class Load(NamedTuple):
    """A reading of the servers' load."""

    at: float
    """Seconds since the measurement began."""
    running: float
    waiting: float
    kv_usage: float


class Requests:
    """The requests of a run: their due times, in the run's own time, and their latencies."""

    def __init__(self) -> None:
        # Arrays: a run of hours has a million requests.
        self.due, self.ttft, self.itl = array("d"), array("d"), array("d")
        self.failed = array("d")

    def add(self, due: float, ttft: float | None, itl: float | None, *, failed: bool) -> None:
        """Add a request; a latency that it lacks is None."""
        self.due.append(due)
        self.ttft.append(math.nan if ttft is None else ttft)
        self.itl.append(math.nan if itl is None else itl)
        if failed:
            self.failed.append(due)


def time_series(
    requests: Requests, loads: Sequence[Load], levels: Sequence[float]
) -> TimeSeries | None:
    """Return the series; None without requests. `levels` are the times at which levels began."""
    if not requests.due:
        return None
    last = max([max(requests.due), 0.0, *(each.at for each in loads)])
    step = float(next((e for e in _LENGTHS if last / e < MOST_STEPS), last / MOST_STEPS + 1))
    count = int(last // step) + 1
    rate, failed = [0] * count, [0] * count
    ttft: list[list[float]] = [[] for _ in range(count)]
    itl: list[list[float]] = [[] for _ in range(count)]
    for due, first, between in zip(requests.due, requests.ttft, requests.itl, strict=True):
        at = max(0, int(due // step))
        rate[at] += 1
        if not math.isnan(first):
            ttft[at].append(first)
        if not math.isnan(between):
            itl[at].append(between)
    for due in requests.failed:
        failed[max(0, int(due // step))] += 1
    taken: list[list[Load]] = [[] for _ in range(count)]
    for each in loads:
        taken[int(each.at // step)].append(each)
    return TimeSeries(
        step_seconds=step,
        levels=tuple(round(each, 3) for each in levels),
        rate=tuple(round(each / step, _DIGITS) for each in rate),
        failed=tuple(round(each / step, _DIGITS) for each in failed),
        running=_means([[e.running for e in each] for each in taken]),
        waiting=_means([[e.waiting for e in each] for each in taken]),
        kv_usage=_means([[e.kv_usage for e in each] for each in taken]),
        ttft_p50=_percentiles(ttft, 50),
        ttft_p95=_percentiles(ttft, 95),
        itl_p50=_percentiles(itl, 50),
        itl_p95=_percentiles(itl, 95),
    )


def _means(steps: Sequence[Sequence[float]]) -> tuple[float | None, ...]:
    return tuple(round(sum(each) / len(each), _DIGITS) if each else None for each in steps)


def _percentiles(steps: Sequence[Sequence[float]], percent: float) -> tuple[float | None, ...]:
    return tuple(round(percentile(each, percent), _DIGITS) if each else None for each in steps)
