"""Judge whether requests met the contract, with the confidence that their number allows. Pure.

Four corrections keep a verdict about a level of load valid:

- **Warm-up.** Requests do not count if they arrive before the server is full (one request's time),
  or before a trend ends. While latencies still rise, a level cannot be judged as kept. While
  latencies still fall, a level cannot be judged as missed.
- **Queues.** Requests that share a queue are often late together. Wilson's interval is therefore
  computed with their number of independent requests, and with Student's t. Without this
  correction, verdicts are often wrong. Example: a simulated M/D/c queue exactly at its limit, 300
  to 10,000 requests, a confidence of 99.4 %. One evaluation with the plain interval gives the
  verdict kept or missed in 26 to 100 % of runs. Here, all evaluations together do so in 1 to 3 %.
- **Each promise by itself.** Trends and correlation are computed for the strain of each promise
  separately. In the maximum of all strains, a constant strain would hide the others: with ITL at
  94 % of its limit, a queue that was still filling up looked steady, and 11 % of searches with a
  small budget were wrong.
- **Repeated evaluation.** If an interval is evaluated after each request, it misses the true value
  by chance at some time. An interval is therefore evaluated ("looked at") at most `LOOKS` times, at
  fixed fractions of the budget. Each look has its part of the allowed error: the last look a half,
  and each earlier look half of the part of the next one. Both directions and a second try share
  the error 1 - confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gpufleet.load_test.intervals import (
    FEWEST_DEGREES,
    Interval,
    autocorrelation_time,
    batch_means,
    find_steady,
    wilson,
)
from gpufleet.load_test.outcomes import Contract, Outcome

Verdict = Literal["kept", "missed", "not known"]

LOOKS = 8
"""The number of looks, at 1, 1/sqrt(2), 1/2, ... of the budget; the first is at 9 % of it."""
MOST_STRAIN = 2.0
"""
The strain of a failure, and of a latency of twice its limit or more.

The cap keeps an outlier from hiding a trend.
"""
BLOCKS_PER_REQUEST_TIME = 3
"""Independent blocks per request time.

Requests that are in the server together share its state, so a third of a request's time counts as
one independent request at most. Correlation is measured over means of such blocks, which show a
slow queue below the noise of single requests. Without this, a simulated server of 64 slots that has
not queued yet is judged kept at its limit in 22 % of runs; with it, in 1 %.
"""


REQUESTS_PER_DEGREE = 3
"""Independent requests for each degree of freedom.

The correlation is also an estimate, from lags up to a few times its own length.
"""


class _Steady(NamedTuple):
    """The point from which no series of a level shows a trend."""

    start: int
    drifts: frozenset[str]
    """The remaining trends: "none", "rising", "falling"."""


class Judgement(NamedTuple):
    """The current verdict on the requests of a level."""

    verdict: Verdict
    start: float
    """The due time from which requests count, inclusive."""
    end: float
    """The due time until which requests count, exclusive."""
    requests: int
    """The number of counted requests."""
    kept: int
    interval: Interval
    """The interval of the share of requests that keep the contract."""
    why: str


NO_JUDGEMENT = Judgement("not known", 0.0, 0.0, 0, 0, Interval(0.0, 1.0), "not evaluated yet")


def is_answered(outcome: Outcome) -> bool:
    """Return whether a request has a complete answer."""
    return not outcome.error and outcome.done is not None


def strains_of(outcome: Outcome, contract: Contract) -> tuple[float, ...]:
    """
    Return the part of each promised limit that a request used. Above 1, the limit is exceeded.

    A part is at most `MOST_STRAIN`. A failed request has this value for all limits. Without a
    promised latency, the result is a single 0.
    """
    ttft, itl, e2e = contract.ttft_seconds, contract.itl_seconds, contract.e2e_seconds
    failed = not is_answered(outcome) or (ttft is not None and outcome.first is None)
    taken = [
        MOST_STRAIN if failed else min(MOST_STRAIN, (seconds or 0.0) / limit)
        for seconds, limit in ((outcome.ttft, ttft), (outcome.itl, itl), (outcome.e2e, e2e))
        if limit is not None
    ]
    return tuple(taken) or (MOST_STRAIN if failed else 0.0,)


def is_kept(outcome: Outcome, contract: Contract) -> bool:
    """Return whether a request kept the whole contract."""
    return max(strains_of(outcome, contract)) <= 1


def most_strains(contract: Contract) -> tuple[float, ...]:
    """Return the strains of a failed request."""
    promised = (contract.ttft_seconds, contract.itl_seconds, contract.e2e_seconds)
    return (MOST_STRAIN,) * max(1, sum(limit is not None for limit in promised))


def look_confidence(contract: Contract, look: int) -> float:
    """
    Return the confidence of the two-sided interval at a look, counted from 0.

    Both directions and both tries have an equal part of 1 - confidence.
    """
    return 1 - (1 - contract.confidence) / 2 * 0.5 ** (LOOKS - look)


def fewest_requests(contract: Contract) -> int:
    """
    Return the number of requests that prove that a level is kept, if all of them are kept.

    The requests must be independent, and must arrive after the warm-up. Levels close to the limit
    need 50 to 100 times as many requests. In simulated queues, levels within 5 % of the limit
    needed about 10,000 requests, for any server.

    >>> fewest_requests(Contract(share=0.95, confidence=0.95))
    130
    """
    confidence = look_confidence(contract, LOOKS - 1)
    requests = FEWEST_DEGREES * REQUESTS_PER_DEGREE
    while (
        wilson(requests, requests, confidence, requests / REQUESTS_PER_DEGREE).low <= contract.share
    ):
        requests += 1
    return requests


def fewest_seconds(contract: Contract, rate: float, request_seconds: float) -> float:
    """
    Return the seconds of arrivals that prove that a level far below the limit is kept.

    `rate` is in arrivals per second; `request_seconds` is one request's time in the server. Give a
    level at least twice this time, because estimating the correlation costs part of it.
    """
    requests = fewest_requests(contract)
    blocks = requests / BLOCKS_PER_REQUEST_TIME
    return request_seconds + max(requests / rate, blocks * request_seconds)


def judge_share(
    contract: Contract,
    strains: Sequence[tuple[float, tuple[float, ...]]],
    request_seconds: float,
    end: float,
    look: int,
) -> Judgement:
    """
    Judge a level by the (due, strains) pairs of all requests due before `end`, sorted by due time.

    `request_seconds` is one request's time in the server; `look` counts the looks from 0.
    """
    full = [each for each in strains if each[0] >= request_seconds]
    steady = _find_steady(full)
    counted = [parts for _, parts in full[steady.start :]]
    start = min(end, full[steady.start][0] if steady.start else request_seconds)
    kept = sum(max(parts) <= 1 for parts in counted)
    request_times = (end - start) / request_seconds if request_seconds else len(counted)
    worth = _independent(counted, request_times)
    interval = Interval(0.0, 1.0)
    degrees = worth / REQUESTS_PER_DEGREE
    if degrees >= FEWEST_DEGREES:
        share, confidence = kept / len(counted), look_confidence(contract, look)
        interval = wilson(share * worth, worth, confidence, degrees)
    verdict, doubt = _verdict(contract, interval, steady)
    why = (
        f"{kept} of {len(counted)} requests met the contract. As evidence, they count as "
        f"{worth:.0f} independent requests. The true share is between {interval.low:.1%} and "
        f"{interval.high:.1%}, and {contract.share:.1%} is required{doubt}"
    )
    return Judgement(verdict, start, end, len(counted), kept, interval, why)


def _find_steady(strains: Sequence[tuple[float, tuple[float, ...]]]) -> _Steady:
    """Return the point from which no limit's strain has a trend, and the remaining trends."""
    times = [due for due, _ in strains]
    found = [
        find_steady(times, each) for each in zip(*(parts for _, parts in strains), strict=True)
    ]
    return _Steady(
        max((each.start for each in found), default=0),
        frozenset(each.drift for each in found),
    )


def _independent(counted: Sequence[tuple[float, ...]], request_times: float) -> float:
    """Return the number of independent requests that these count as."""
    blocks = min(len(counted), round(BLOCKS_PER_REQUEST_TIME * request_times))
    if blocks < 1:
        return 0.0
    missed = [float(max(parts) > 1) for parts in counted]
    return blocks / max(
        autocorrelation_time(batch_means(each, blocks))
        for each in (missed, *zip(*counted, strict=True))
    )


def _verdict(contract: Contract, interval: Interval, steady: _Steady) -> tuple[Verdict, str]:
    """Return the verdict, and the doubt that prevents a verdict by the interval alone."""
    if interval.low > contract.share:
        rises = "rising" in steady.drifts
        return ("not known", ", but latencies still rise") if rises else ("kept", "")
    if interval.high < contract.share:
        falls = "falling" in steady.drifts
        return ("not known", ", but latencies still fall") if falls else ("missed", "")
    return "not known", ""
