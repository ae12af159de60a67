"""Judge whether requests met the contract, with the required confidence. Pure.

Four corrections keep a verdict about a level of load valid:

- **Warm-up.** Requests do not count if they arrive before the server is full, which takes the time
  of one request. They also do not count while latencies have a trend. While latencies still rise, a
  level cannot be judged "kept" (the contract is met). While latencies still fall, a level cannot be
  judged "missed" (the contract is not met).
- **Queues.** Requests that share a queue are often late together. Wilson's interval is therefore
  computed with their number of independent requests, and with Student's t. Without this
  correction, verdicts are often wrong. Example: a simulated M/D/c queue exactly at its limit, 300
  to 10,000 requests, a confidence of 99.4 %. One evaluation with the plain interval gives the
  verdict kept or missed in 26 to 100 % of runs. Here, all evaluations together do so in 1 to 3 %.
- **Each promise by itself.** A latency divided by its limit is called strain. Trends and
  correlation are computed for the strain of each promised latency separately. If only the highest
  strain were used, a constant strain would hide the others. Example: with ITL at 94 % of its limit,
  a queue that was still filling up looked steady, and 11 % of searches with a small budget were
  wrong.
- **Repeated evaluation.** If an interval is evaluated after each request, at some time it does not
  contain the true value by chance. An interval is therefore evaluated ("looked at") at most `LOOKS`
  times, at fixed fractions of the budget. Each look has its part of the allowed error. The last
  look has a half of it, and each earlier look has half of the part of the next look. The allowed
  error is 1 - confidence. It is shared by both directions and by a second try.
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
"""The number of looks. They are at 1, 1/sqrt(2), 1/2, ... of the budget. The first is at 9 %."""
MOST_STRAIN = 2.0
"""
The strain of a failed request, and of a latency of twice its limit or more.

The strain is limited so that an outlier does not hide a trend.
"""
BLOCKS_PER_REQUEST_TIME = 3
"""The number of independent blocks in the time of one request.

Requests that are in the server together depend on the same state. So all requests within a third of
a request's time count as at most one independent request. Correlation is measured over the means of
such blocks. The means show a slow queue that the noise of single requests hides. Without these
blocks, a simulated server of 64 slots at its limit, which has not queued requests yet, is judged
"kept" in 22 % of runs. With blocks, it is 1 %.
"""


REQUESTS_PER_DEGREE = 3
"""The number of independent requests for each degree of freedom.

The correlation is also an estimate. It uses lags up to a few times the length of the correlation.
"""


class _Steady(NamedTuple):
    """The point from which no series of a level shows a trend."""

    start: int
    drifts: frozenset[str]
    """The remaining trends of the series: "none", "rising" or "falling"."""


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
    """The interval that contains the true share of requests that meet the contract."""
    why: str


NO_JUDGEMENT = Judgement("not known", 0.0, 0.0, 0, 0, Interval(0.0, 1.0), "not evaluated yet")


def is_answered(outcome: Outcome) -> bool:
    """Return whether a request has a complete answer."""
    return not outcome.error and outcome.done is not None


def strains_of(outcome: Outcome, contract: Contract) -> tuple[float, ...]:
    """
    Return the ratio of a request's latency to its limit, for each promised latency.

    Above 1, the limit is exceeded. Each ratio is limited to `MOST_STRAIN`. For a failed request,
    all ratios are `MOST_STRAIN`. If no latency is promised, the result is a single number, which is
    0 for an answered request.
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
    """Return whether a request met all limits of the contract."""
    return max(strains_of(outcome, contract)) <= 1


def most_strains(contract: Contract) -> tuple[float, ...]:
    """Return the result of `strains_of` for a failed request."""
    promised = (contract.ttft_seconds, contract.itl_seconds, contract.e2e_seconds)
    return (MOST_STRAIN,) * max(1, sum(limit is not None for limit in promised))


def look_confidence(contract: Contract, look: int) -> float:
    """
    Return the confidence of the two-sided interval at a look, counted from 0.

    The two directions and the two tries each have an equal part of the error 1 - confidence.
    """
    return 1 - (1 - contract.confidence) / 2 * 0.5 ** (LOOKS - look)


def fewest_requests(contract: Contract) -> int:
    """
    Return how many requests are enough to judge a level "kept" if all of them meet the contract.

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
    Return the seconds of arrivals that are enough to judge a level far below the limit "kept".

    `rate` is in arrivals per second. `request_seconds` is the time of one request in the server.
    Give a level at least twice the returned time, because a part of it is needed to estimate the
    correlation.
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
    Judge a level by all requests due before `end`.

    `strains` has a pair of due time and strains for each request, sorted by due time.
    `request_seconds` is the time of one request in the server. `look` is the number of the look,
    counted from 0.
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
    """Return the point from which no series of strains has a trend, and the remaining trends."""
    times = [due for due, _ in strains]
    found = [
        find_steady(times, each) for each in zip(*(parts for _, parts in strains), strict=True)
    ]
    return _Steady(
        max((each.start for each in found), default=0),
        frozenset(each.drift for each in found),
    )


def _independent(counted: Sequence[tuple[float, ...]], request_times: float) -> float:
    """Return as how many independent requests these requests count."""
    blocks = min(len(counted), round(BLOCKS_PER_REQUEST_TIME * request_times))
    if blocks < 1:
        return 0.0
    missed = [float(max(parts) > 1) for parts in counted]
    return blocks / max(
        autocorrelation_time(batch_means(each, blocks))
        for each in (missed, *zip(*counted, strict=True))
    )


def _verdict(contract: Contract, interval: Interval, steady: _Steady) -> tuple[Verdict, str]:
    """
    Return the verdict.

    Also return why latencies prevent the verdict that the interval alone would give, or "".
    """
    if interval.low > contract.share:
        rises = "rising" in steady.drifts
        return ("not known", ", but latencies still rise") if rises else ("kept", "")
    if interval.high < contract.share:
        falls = "falling" in steady.drifts
        return ("not known", ", but latencies still fall") if falls else ("missed", "")
    return "not known", ""
