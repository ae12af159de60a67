"""Compute the time series of a load test: arrivals, latencies and the servers' load. Pure.

The time of the test is divided into steps of equal length. A request belongs to the step of its due
time. There are at most `MOST_STEPS` steps, however long the test took.
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
    """Series with one value for each step. A value is None if it is unknown in that step."""

    step_seconds: float
    levels: tuple[float, ...]
    """
    When each level began, in seconds since the measurement began.

    The levels of a closed loop come last.
    """
    rate: tuple[float, ...]
    """The number of requests due per second."""
    failed: tuple[float, ...]
    """
    The number of requests per second that got no complete answer, by their due time.

    Requests that were dropped at the end of a level do not count.
    """
    running: tuple[float | None, ...]
    """
    The number of requests that the target's servers worked on, including requests of other clients.
    """
    waiting: tuple[float | None, ...]
    """The number of requests that waited in the servers' queues."""
    kv_usage: tuple[float | None, ...]
    """The used share of the KV cache, as the mean over all servers."""
    ttft_p50: tuple[float | None, ...]
    """The median of the seconds from a request's intended arrival to its first token."""
    ttft_p95: tuple[float | None, ...]
    itl_p50: tuple[float | None, ...]
    """The median over requests of the mean seconds between the tokens of an answer."""
    itl_p95: tuple[float | None, ...]


class Load(NamedTuple):
    """The load of all servers at one moment."""

    at: float
    """Seconds since the measurement began."""
    running: float
    waiting: float
    kv_usage: float


class Requests:
    """The due times of a run's requests, in seconds since the run began, and their latencies."""

    def __init__(self) -> None:
        # Arrays: a run of hours has a million requests.
        self.due, self.ttft, self.itl = array("d"), array("d"), array("d")
        self.failed = array("d")

    def add(self, due: float, ttft: float | None, itl: float | None, *, failed: bool) -> None:
        """Add a request. A latency is None if the request has none."""
        self.due.append(due)
        self.ttft.append(math.nan if ttft is None else ttft)
        self.itl.append(math.nan if itl is None else itl)
        if failed:
            self.failed.append(due)


def time_series(
    requests: Requests, loads: Sequence[Load], levels: Sequence[float]
) -> TimeSeries | None:
    """
    Return the series, or None if there are no requests.

    `levels` are the times at which levels began.
    """
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
