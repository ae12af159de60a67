"""
A level without HTTP and without a client: a simulated queue feeds the verdict.  Pure.

Some ten times as fast as virtual time, so hundreds of searches show how often a verdict errs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from benchmarks.measure_accuracy.queues import PROMPT, Queue
from gpufleet.load_test.level import Level, LevelSummary
from gpufleet.load_test.level_runs import give_up_seconds
from gpufleet.load_test.outcomes import Outcome
from tests.support.simulated_queue import run_level

BEAT_SECONDS = 1.0


def simulated_level(queue: Queue, rate: float, seconds: float, seed: object) -> LevelSummary:
    """Return the result of Poisson arrivals at an idle server for a number of seconds."""
    level = Level(queue.contract, rate, seconds, give_up_seconds(queue.contract))
    return run_level(level, served(queue, rate, seed), BEAT_SECONDS)


def served(queue: Queue, rate: float, seed: object) -> Iterator[Outcome]:
    """Yield requests, first come, first served, by the order in which they are due."""
    draw = random.Random(str(seed))
    free = [0.0] * queue.slots
    due = 0.0
    while True:
        due += draw.expovariate(rate)
        first, tokens = queue.draw(draw)
        begin = max(due, free[0])
        at = begin + first
        done = at + (tokens - 1) * queue.token_seconds
        heapq.heapreplace(free, done)
        yield Outcome(due, due, at, done, PROMPT.most, tokens, (), "")
