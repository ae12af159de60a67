"""Decide during a level of load whether it needs more requests, and summarize it. Pure.

Fast requests finish first, so a request counts only when all requests due before it are also
decided: finished, failed, or too old to meet the contract. `verdicts` evaluates the share of kept
requests. A level whose queue grows without end is stopped early.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import nsmallest
from itertools import chain
from typing import Any, Literal, NamedTuple

from gpufleet.load_test.intervals import Slope, batch_means, percentile, percentiles, slope
from gpufleet.load_test.outcomes import Contract, Outcome
from gpufleet.load_test.verdicts import (
    LOOKS,
    NO_JUDGEMENT,
    Judgement,
    Verdict,
    is_answered,
    judge_share,
    most_strains,
    strains_of,
)

Ended = Literal["resolved", "budget", "over-saturated"]

FIRST_REQUESTS = 50
"""The number of first requests of a level whose median time is a request's time without a queue."""
OVERLOAD_SECONDS, OVERLOAD_REQUESTS, OVERLOAD_REQUEST_TIMES = 30.0, 100, 3
"""
The minimum of seconds, requests and request times before a level can be over-saturated. The seconds
are guidellm's. While a server fills up, its requests in flight also grow each second.
"""
OVERLOAD_CONFIDENCE = 0.999
"""
The confidence of the two slopes, which must be clear because the contract does not measure them.
"""
OVERLOAD_GROWTH = 4.0
"""The minimum growth of the queue, in standard deviations, for over-saturation.

The queue of a server that just keeps up with Poisson arrivals varies by about the square root of
their number; only growth beyond this shows a lack of capacity.
"""


@dataclass(frozen=True)
class LevelSummary:
    """The results of one level of load. Latencies are in seconds from the intended arrival."""

    rate: float | None
    """Requested arrivals per second; None in a closed loop."""
    concurrency: int | None
    """Clients of a closed loop; None in an open loop."""
    seconds: float
    """Seconds of counted arrivals: from the end of the warm-up to the oldest undecided request."""
    requests: int
    """The number of counted requests."""
    kept: int
    """The number of requests that kept the whole contract."""
    low: float
    """Lower bound of Wilson's interval of kept / requests, on which the verdict is based.

    The interval is for the effective number of independent requests, at the confidence of the last
    look.
    """
    high: float
    verdict: Verdict
    why: str
    """The reason of the verdict with the numbers."""
    ended: Ended
    warm_up_seconds: float
    errors: Mapping[str, int]
    """
    Failed requests by reason; "unfinished" ones are too old to keep the contract and unanswered.
    """
    ttft: Mapping[str, float]
    """mean, p50, p90, p95 and p99; empty without answered requests."""
    itl: Mapping[str, float]
    """Statistics over all gaps between chunks, not over the requests' means."""
    e2e: Mapping[str, float]
    mean_concurrency: float
    """Mean concurrency by Little's law: the sum of times in the system / seconds."""
    output_tokens_per_second: float
    """
    Tokens of requests that finished between the warm-up and the end of arrivals, per second.

    Load above the server's capacity does not raise it.
    """
    prompt_tokens_per_second: float
    dispatch_lag_p99: float
    """The client's lag: p99 of seconds from due to sent."""

    @property
    def load(self) -> float:
        """Arrivals per second, or the concurrency of a closed loop."""
        return self.rate if self.rate is not None else float(self.concurrency or 0)

    @property
    def unit(self) -> str:
        """Return the unit of `load`."""
        return "requests/s" if self.rate is not None else "concurrent requests"

    @property
    def answered_per_second(self) -> float:
        """Return the counted requests with a complete answer, per second."""
        return _ratio(self.requests - sum(self.errors.values()), self.seconds)

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON values, which `from_json` parses."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> LevelSummary:
        """Parse `as_json`'s output. Raises TypeError if keys are missing or unknown."""
        return cls(**stored)


class Decision(NamedTuple):
    """Whether a level needs more requests."""

    action: Literal["go on", "stop"]
    ended: Ended | None
    """Why the level stops."""
    why: str


class Level:
    """Collects one level's outcomes, and decides when they suffice. It has no clock of its own."""

    def __init__(
        self,
        contract: Contract,
        rate: float | None,
        budget_seconds: float,
        give_up_seconds: float,
        concurrency: int | None = None,
    ) -> None:
        """Set the arrivals per second (or a closed loop's concurrency) and the time limit."""
        self._contract = contract
        self._rate, self._concurrency = rate, concurrency
        self._budget, self._give_up = budget_seconds, give_up_seconds
        self._outcomes: list[Outcome] = []
        self._strains: list[tuple[float, tuple[float, ...]]] = []
        self._times: list[tuple[float, float]] = []
        self._in_flight: list[tuple[float, int]] = []
        self._now = 0.0
        self._looks, self._overload_looks = 0, 0
        self._unfinished: Sequence[float] = ()
        self._judgement = NO_JUDGEMENT
        self._decision = Decision("go on", None, "not evaluated yet")

    def add(self, outcome: Outcome) -> None:
        """Record a finished or failed request. The order is arbitrary."""
        self._outcomes.append(outcome)
        self._strains.append((outcome.due, strains_of(outcome, self._contract)))
        if is_answered(outcome):
            self._times.append((outcome.due, outcome.e2e or 0.0))

    def decide(self, now: float, in_flight: Sequence[float]) -> Decision:
        """
        Return whether to continue; a "stop" is final.

        `in_flight` are the due times of all unfinished requests. A request older than the
        contract's e2e, or than the give-up time, counts as missed. (A limit on TTFT decides nothing
        before the request finishes, because the first token may have arrived in time.)
        """
        if self._decision.action == "stop":
            return self._decision
        self._now, last = now, now >= self._budget
        self._unfinished = in_flight
        self._in_flight.append((now, len(in_flight)))
        end = self._decided_until(self._contract)
        looks = LOOKS if last else self._looks_until(end)
        if looks > self._looks:
            self._looks = looks
            self._judgement = self._judge(self._contract, self._strains)
        ended: Ended | None = "budget" if last else None
        if self._judgement.verdict != "not known":
            ended = "resolved"
        elif overload := self._check_overload(in_flight):
            ended = "over-saturated"
            numbers = self._judge(self._contract, self._strains)
            self._judgement = numbers._replace(verdict="missed", why=overload)
        self._decision = Decision("stop" if ended else "go on", ended, self._judgement.why)
        return self._decision

    def summary(self) -> LevelSummary:
        """
        Return the level's result.

        Add the outcomes of all requests in flight at the end first. The verdict is decided by then,
        but late tokens may be missing.
        """
        judged = self._judgement
        counted = [each for each in self._outcomes if judged.start <= each.due < judged.end]
        answered = [each for each in counted if is_answered(each)]
        finished = [
            each
            for each in self._outcomes
            if is_answered(each) and judged.start < (each.done or 0.0) <= self._now
        ]
        seconds, span = judged.end - judged.start, self._now - judged.start
        lags = [each.sent - each.due for each in counted]
        errors = Counter(each.error or "unfinished" for each in counted if not is_answered(each))
        errors["unfinished"] += judged.requests - len(counted)
        return LevelSummary(
            rate=self._rate,
            concurrency=self._concurrency,
            seconds=seconds,
            requests=judged.requests,
            kept=judged.kept,
            low=judged.interval.low,
            high=judged.interval.high,
            verdict=judged.verdict,
            why=judged.why,
            ended=self._decision.ended or "budget",
            warm_up_seconds=judged.start,
            errors=dict(+errors),
            ttft=percentiles([each.ttft for each in answered if each.ttft is not None]),
            itl=percentiles([*chain.from_iterable(each.gaps for each in answered)]),
            e2e=percentiles([each.e2e for each in answered if each.e2e is not None]),
            mean_concurrency=_ratio(sum(each.e2e or 0.0 for each in answered), seconds),
            output_tokens_per_second=_ratio(sum(each.tokens for each in finished), span),
            prompt_tokens_per_second=_ratio(sum(each.prompt_tokens for each in finished), span),
            dispatch_lag_p99=percentile(lags, 99) if lags else 0.0,
        )

    def is_missed_despite(self, lag_seconds: float) -> bool:
        """
        Return whether the contract is missed even with limits that are longer by the client's lag.

        If a client sends no request later than `lag_seconds`, a queue answers none of them later
        than it would answer a punctual client, plus this lag. Then the server misses the contract,
        not the client.
        """
        relaxed = self._contract.with_longer_limits(lag_seconds)
        strains = [(each.due, strains_of(each, relaxed)) for each in self._outcomes]
        return self._judge(relaxed, strains).verdict == "missed"

    def _decided_until(self, contract: Contract) -> float:
        """Return the due time of the oldest request that may still keep the contract, or now."""
        now, too_old = self._now, min(self._give_up, contract.e2e_seconds or math.inf)
        return min([now, *(due for due in self._unfinished if now - due <= too_old)])

    def _looks_until(self, seconds: float) -> int:
        """Return the number of looks up to this time; looks are at 2^(-k/2) of the budget."""
        if seconds <= 0:
            return 0
        return max(0, min(LOOKS, LOOKS + math.floor(2 * math.log2(seconds / self._budget))))

    def _judge(
        self, contract: Contract, strains: list[tuple[float, tuple[float, ...]]]
    ) -> Judgement:
        """Judge the requests that the contract decides, with the confidence of the last look."""
        end = self._decided_until(contract)
        strains.sort()
        counted = strains[: bisect_left(strains, (end,))]
        if late := [due for due in self._unfinished if due < end]:
            finished = {due for due, _ in counted}
            most = most_strains(contract)
            counted = sorted(counted + [(due, most) for due in late if due not in finished])
        look = max(0, self._looks - 1)
        return judge_share(contract, counted, self._request_seconds(), end, look)

    def _request_seconds(self) -> float:
        """
        Return one request's time without queueing: the median of the first requests.

        If the median of all requests is lower, it is used instead, because the first requests may
        have been slow because the server was cold.
        """
        if not self._times:
            return 0.0
        first = nsmallest(FIRST_REQUESTS, self._times)
        return min(percentile([e2e for _, e2e in few], 50) for few in (first, self._times))

    def _check_overload(self, in_flight: Sequence[float]) -> str:
        """
        Return why the server cannot keep up, or "" without signs of it.

        Over-saturation needs an open loop, a full server, and three signs. Requests in flight rise
        over the second half of the time. TTFT (for an answer without tokens, the time to its end)
        rises over due times. The rise of requests in flight exceeds the variation from Poisson
        arrivals on a server that just keeps up.
        """
        now, half = self._now, self._now / 2
        looks, self._overload_looks = self._overload_looks, self._looks_until(now)
        if self._rate is None or self._overload_looks <= looks or now < OVERLOAD_SECONDS:
            return ""
        growth = _trend([each for each in self._in_flight if each[0] >= half])
        arrivals = len([due for due in in_flight if due >= half])
        arrivals += len([due for due, _ in self._strains if due >= half])
        if growth is None or growth.low <= 0 or arrivals < OVERLOAD_REQUESTS:
            return ""
        full = self._request_seconds()
        wanders = OVERLOAD_GROWTH * math.sqrt(arrivals)
        if growth.value * half < wanders or now < OVERLOAD_REQUEST_TIMES * full:
            return ""
        delays = [(each.due, each.ttft) for each in self._outcomes if each.ttft is not None]
        name = "TTFT" if delays else "e2e"
        delay = _trend(sorted(each for each in delays or self._times if each[0] >= full))
        if delay is None or delay.low <= 0:
            return ""
        return (
            f"overloaded after {now:.0f} s: each second, {self._rate:.3g} requests arrive, the "
            f"number of requests in flight grows by {growth.value:.2g}, and {name} grows by "
            f"{delay.value:.2g} s"
        )


def _ratio(total: float, seconds: float) -> float:
    return total / seconds if seconds > 0 else 0.0


def _trend(points: Sequence[tuple[float, float]]) -> Slope | None:
    """Return a series' slope over time, by means of batches."""
    times, values = batch_means([x for x, _ in points]), batch_means([y for _, y in points])
    return slope(times, values, OVERLOAD_CONFIDENCE)
