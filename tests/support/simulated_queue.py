"""A server with c slots of a fixed service time, simulated; and what theory says of it (M/D/c)."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from itertools import accumulate

from gpufleet.load_test.level import Level, LevelSummary
from gpufleet.load_test.outcomes import Contract, Outcome


def requests(rate: float, slots: int, service: float, seed: int) -> Iterator[Outcome]:
    """Yield requests that come by Poisson and are served first come, first served."""
    draw, due = random.Random(seed), 0.0
    free = deque([0.0] * slots)
    while True:
        due += draw.expovariate(rate)
        # They take equally long, so the slot that was taken first is free first.
        first = max(due, free.popleft())
        done = first + service
        free.append(done)
        yield Outcome(due, due, first, done, 100, 10, (), "")


def run_level(level: Level, outcomes: Iterator[Outcome], beat: float) -> LevelSummary:
    """Feed a level as a client does, with a heartbeat each `beat` seconds, until it stops."""
    flying: list[Outcome] = []
    coming = next(outcomes)
    now = 0.0
    while True:
        now += beat
        while coming.due <= now:
            flying.append(coming)
            coming = next(outcomes)
        for each in [each for each in flying if (each.done or 0.0) <= now]:
            level.add(each)
        flying = [each for each in flying if (each.done or 0.0) > now]
        if level.decide(now, [each.due for each in flying]).action == "stop":
            return level.summary()


def measure(
    contract: Contract, rate: float, slots: int, *, budget: float, seed: int
) -> LevelSummary:
    """Return what Poisson arrivals show at a server with a service time of one second."""
    level = Level(contract, rate, budget, give_up_seconds=10 * budget)
    return run_level(level, requests(rate, slots, 1.0, seed), budget / 100)


def share_within(wait: float, rate: float, slots: int, service: float) -> float:
    """
    Return the share of requests that wait at most so long in an M/D/c queue.

    The queue's stationary distribution by the chain over one service time (each request in service
    leaves, Poisson(rate x service) come), then Franx, "A simple solution for the M/D/c waiting
    time distribution" (2001): no simulation.
    """
    come = [
        math.exp(-rate * service + k * math.log(rate * service) - math.lgamma(k + 1))
        for k in range(2 * slots + 60)
    ]
    states = 4 * slots + 60
    now = [1.0] + [0.0] * (states - 1)
    for _ in range(400):
        after = [0.0] * states
        for here, chance in enumerate(now):
            if chance > 1e-13:
                left = max(here - slots, 0)
                for k, likely in enumerate(come[: states - left]):
                    after[left + k] += chance * likely
        moved = sum(abs(x - y) for x, y in zip(after, now, strict=True))
        now = after
        if moved < 1e-9:
            break
    waiting = [sum(now[: slots + 1]), *now[slots + 1 :]]
    within = [*accumulate(waiting)]
    times = math.floor(wait / service) + 1
    mean = rate * (times * service - wait)
    return sum(
        within[times * slots - 1 - k] * math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1))
        for k in range(times * slots)
    )


def rate_of(share: float, wait: float, slots: int, service: float) -> float:
    """Return the arrivals per second at which such a share waits at most so long."""
    low, high = 0.01 * slots / service, 0.97 * slots / service
    for _ in range(20):
        middle = (low + high) / 2
        if share_within(wait, middle, slots, service) >= share:
            low = middle
        else:
            high = middle
    return low
