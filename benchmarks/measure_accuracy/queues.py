"""Servers whose true rate is known by another route than the one that is tried.  Pure.

`true_rate` of a fixed service time is a formula (Franx's, for M/D/c); of random ones a simulation
of the queue alone: arrivals, slots and lengths, without HTTP, clients or verdicts.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from gpufleet.load_test import workloads
from gpufleet.load_test.outcomes import Contract
from tests.support.queue_server import QueueServer
from tests.support.simulated_queue import rate_of

PROMPT = workloads.fixed_length(32)
SIMULATED_REQUESTS = 800_000
"""Two seeds of so many differ by 0.3 % in the rate."""
SIMULATED_SEED = 20_331_106
BISECTIONS = 11
"""To 0.03 % of the saturation."""


@dataclass(frozen=True)
class Queue:
    """A server, the requests that it gets, and what it promises."""

    name: str
    slots: int
    first_seconds: float
    """To the first token, once it has a slot: fixed, or the mean of random times."""
    token_seconds: float
    tokens: workloads.Lengths
    random_first: bool
    contract: Contract

    @property
    def work(self) -> workloads.Workload:
        """Return the requests."""
        return workloads.Workload("queue", PROMPT, self.tokens, self.name)

    def server(self, seed: int) -> QueueServer:
        """Return a server to start."""
        return QueueServer(
            slots=self.slots,
            first_seconds=self.first_seconds,
            token_seconds=self.token_seconds,
            exponential=seed if self.random_first else None,
        )

    @property
    def saturation(self) -> float:
        """Return the requests a second with all slots busy."""
        return self.slots / (self.first_seconds + (self.tokens.mean - 1) * self.token_seconds)

    def true_rate(self) -> float:
        """Return the highest arrivals per second at which the share keeps the contract."""
        if self.random_first:
            return self.simulated_rate()
        ttft, e2e = self.contract.ttft_seconds, self.contract.e2e_seconds
        assert ttft is not None
        assert e2e is not None
        service = self.slots / self.saturation
        wait = min(ttft - self.first_seconds, e2e - service)
        return rate_of(self.contract.share, wait, self.slots, service)

    def simulated_rate(
        self, seed: int = SIMULATED_SEED, requests: int = SIMULATED_REQUESTS
    ) -> float:
        """Return the same by simulation."""
        low, high = 0.5 * self.saturation, self.saturation
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self._share_kept(middle, seed, requests) >= self.contract.share:
                low = middle
            else:
                high = middle
        return low

    def _share_kept(self, rate: float, seed: int, requests: int) -> float:
        """Return the share that keeps the contract; each rate has the same draws."""
        draw = random.Random(seed)
        free = [0.0] * self.slots
        due, kept = 0.0, 0
        for _ in range(requests):
            due += draw.expovariate(1.0) / rate
            first, tokens = self.draw(draw)
            rest = (tokens - 1) * self.token_seconds
            begin = max(due, free[0])
            heapq.heapreplace(free, begin + first + rest)
            ttft, e2e = begin + first - due, begin + first + rest - due
            kept += ttft <= (self.contract.ttft_seconds or math.inf) and e2e <= (
                self.contract.e2e_seconds or math.inf
            )
        return kept / requests

    def draw(self, draw: random.Random) -> tuple[float, int]:
        """Return the seconds to a request's first token, once it has a slot, and its tokens."""
        first = self.first_seconds
        if self.random_first:
            first = draw.expovariate(1 / first)
        return first, draw.randint(self.tokens.low, self.tokens.most)


FIXED = Queue(
    "fixed: 16 slots, 1.6 s each",
    16, 0.1, 1.5, workloads.fixed_length(2), random_first=False,
    contract=Contract(ttft_seconds=0.9, itl_seconds=1.6, e2e_seconds=2.6),
)  # fmt: skip
"""Objectives that a wait of 0.8 s breaks; ITL is kept always."""
RANDOM = Queue(
    "random: 8 slots, exponential first token, 2 to 5 tokens",
    8, 0.3, 0.2, workloads.uniform_lengths(2, 5), random_first=True,
    contract=Contract(ttft_seconds=1.25, itl_seconds=0.25, e2e_seconds=1.8),
)  # fmt: skip
"""Objectives that wait, first token and length break together."""
