"""Compute confidence intervals, percentiles, trends and correlation of measurements. Pure.

Requests that share a queue are not independent: a request that waits too long delays its
neighbours. An interval that ignores this dependence is far too narrow. `autocorrelation_time` is
the number of consecutive requests that count as one independent request: divide counts by this
number before you compute an interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import mul
from statistics import NormalDist, fmean, stdev
from typing import Literal, NamedTuple

PERCENTILES = (50, 90, 95, 99)
"""The reported percentiles, as in `vllm bench serve`, guidellm and llm-d's Benchmark Report."""

FEWEST_DEGREES = 5
"""The minimum degrees of freedom for `t_quantile`. With fewer degrees, its error exceeds 0.5 %."""

BATCHES = 20
"""
Batches into which a series is split for a trend. Between 10 and 30, more batches narrow the
interval only a little (Schmeiser, "Batch size effects in the analysis of simulation output", 1982).
"""

HEAD_CONFIDENCE = 0.99
"""
Confidence of a difference between the first batch of a series and the others.

It is high because waiting times are skewed.
"""

SAME = 1e-9
"""Relative tolerance for rounding errors in the means of equal numbers."""

CORRELATION_BATCHES = 200
"""
The number of blocks into which a series is split to compute its correlation.

The number limits the work. It still shows correlation over 0.5 % of the series or more.
"""


class Interval(NamedTuple):
    """An interval that contains the true value with the requested confidence."""

    low: float
    high: float


class Slope(NamedTuple):
    """The rise of a straight line per unit of x, with the t-interval of the rise."""

    value: float
    low: float
    high: float


class Steadiness(NamedTuple):
    """The point from which a series shows no trend."""

    start: int
    """
    Index of the first value that counts.

    If a trend remains even in the second half, it is the index of the middle.
    """
    drift: Literal["none", "rising", "falling"]
    """The remaining trend from `start`."""


def percentile(values: Sequence[float], percent: float) -> float:
    """
    Return a percentile of values in any order. It is interpolated between the two nearest values.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 50)
    2.5
    """
    return _percentile(sorted(values), percent)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """
    Return the mean, p50, p90, p95 and p99 of values in any order, or {} if there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        return {}
    return {"mean": fmean(ordered)} | {
        f"p{each}": _percentile(ordered, each) for each in PERCENTILES
    }


def _percentile(ordered: Sequence[float], percent: float) -> float:
    at = (len(ordered) - 1) * percent / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def t_quantile(probability: float, degrees: float) -> float:
    """
    Return a quantile of Student's t distribution.

    The function uses Fisher and Cornish's series in 1 / degrees (Abramowitz and Stegun, 26.7.5).
    The error is below 0.5 % for five degrees of freedom or more and probabilities up to 0.999. With
    fewer degrees, the function raises `ValueError`.

    >>> round(t_quantile(0.975, 10), 3)
    2.228
    """
    if degrees < FEWEST_DEGREES:
        raise ValueError(f"degrees is {degrees}, but must be {FEWEST_DEGREES} or more")
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def wilson(
    kept: float, requests: float, confidence: float, degrees: float | None = None
) -> Interval:
    """
    Return Wilson's interval of a share (Wilson 1927).

    It stays within 0 and 1, even for 0 of n requests. `requests` must be independent. Otherwise,
    divide both counts by `autocorrelation_time`, and give the remaining `degrees` of freedom of
    this estimate, so that Student's t is used.

    >>> [round(bound, 4) for bound in wilson(95, 100, 0.95)]
    [0.8882, 0.9785]
    """
    if requests <= 0:
        return Interval(0.0, 1.0)
    upper = (1 + confidence) / 2
    z = NormalDist().inv_cdf(upper) if degrees is None else t_quantile(upper, degrees)
    share, scale = kept / requests, 1 + z * z / requests
    middle = (share + z * z / (2 * requests)) / scale
    spread = share * (1 - share) / requests + z * z / (4 * requests**2)
    half = z * math.sqrt(spread) / scale
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def slope(xs: Sequence[float], ys: Sequence[float], confidence: float) -> Slope | None:
    """
    Return the least-squares slope of y over x with its t-interval.

    The result is None if there are fewer than seven points, or if all points have the same x. The
    points' errors must be independent. For a correlated series, give means of batches.
    """
    if len(xs) < FEWEST_DEGREES + 2:
        return None
    mean_x, mean_y = fmean(xs), fmean(ys)
    squares = math.fsum((x - mean_x) ** 2 for x in xs)
    if squares == 0:
        return None
    value = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / squares
    left = math.fsum((y - mean_y - value * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    degrees = len(xs) - 2
    half = t_quantile((1 + confidence) / 2, degrees) * math.sqrt(left / degrees / squares)
    return Slope(value, value - half, value + half)


def batch_means(values: Sequence[float], batches: int = BATCHES) -> list[float]:
    """Return the means of at most `batches` consecutive batches of nearly equal size."""
    count = min(batches, len(values))
    edges = [at * len(values) // count for at in range(count + 1)] if count else []
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def find_steady(
    times: Sequence[float], values: Sequence[float], confidence: float = 0.95
) -> Steadiness:
    """
    Return the index from which a series has no trend. This is the end of the warm-up.

    The function drops one twentieth of the series after another from the front, while one of two
    tests shows a trend. It drops at most half of the series. In the first test, the slope of the
    remaining batch means has an interval without zero. In the second, the first batch mean differs
    from the others at `HEAD_CONFIDENCE`. (A slope hardly detects a short cold start.) `times` must
    be in ascending order.

    MSER (White 1997), recommended by simulation studies, is not used. It keeps the part with the
    least variance, which for waiting times is the quiet part. On a stationary M/D/8 queue (500
    requests), it drops a quarter of the series, and its share of requests within the limit is one
    percentage point too high. The slope adds no such bias. On average, the function drops less than
    5 % of a stationary series that is 20 times as long as its autocorrelation time. It drops a
    tenth of a series that is 8 times as long.
    """
    xs, ys = batch_means(times), batch_means(values)
    if _are_same(ys):
        return Steadiness(0, "none")
    trend = 0.0
    for dropped in range(len(ys) // 2 + 1):
        trend = _trend(xs[dropped:], ys[dropped:], confidence)
        if trend == 0:
            return Steadiness(dropped * len(values) // len(ys), "none")
    return Steadiness(len(values) // 2, "rising" if trend > 0 else "falling")


def _trend(xs: Sequence[float], ys: Sequence[float], confidence: float) -> float:
    """Return a number above 0 if batch means rise, below 0 if they fall, and 0 for no trend."""
    line = slope(xs, ys, confidence)
    if line is None:
        return 0.0
    if not line.low <= 0 <= line.high:
        return line.value
    rest = ys[1:]
    error = stdev(rest) * math.sqrt(1 + 1 / len(rest))
    rise = fmean(rest) - ys[0]
    return rise if abs(rise) > t_quantile((1 + HEAD_CONFIDENCE) / 2, len(rest) - 1) * error else 0.0


def autocorrelation_time(values: Sequence[float]) -> float:
    """
    Return how many consecutive values count as one independent value. The number is at least 1.

    The number is 1 + 2 x the sum of the autocorrelations, summed as Geyer's initial monotone
    sequence (Geyer, "Practical Markov chain Monte Carlo", 1992, 3.3): pairs of lags until one is
    not positive. The series is first shortened to `CORRELATION_BATCHES` means, so that the work is
    the same for a series of any length. For a constant series, the result is 1.
    """
    size = max(1, len(values) // CORRELATION_BATCHES)
    whole = len(values) // size
    if whole < 4 or _are_same(values):
        return 1.0
    mean = sum(values) / len(values)
    spread = sum([(value - mean) ** 2 for value in values]) / len(values)
    means = batch_means(values, whole)
    middle = sum(means) / whole
    return max(1.0, size * _long_run_variance([each - middle for each in means]) / spread)


def _are_same(values: Sequence[float]) -> bool:
    return not values or max(values) - min(values) <= SAME * max(map(abs, values))


def _long_run_variance(errors: Sequence[float]) -> float:
    """Return n times the variance of the mean, for a series of n errors around zero."""
    total = -_covariance(errors, 0)
    smallest = math.inf
    for lag in range(0, len(errors) // 2, 2):
        pair = _covariance(errors, lag) + _covariance(errors, lag + 1)
        if pair <= 0:
            break
        smallest = min(smallest, pair)
        total += 2 * smallest
    return total


def _covariance(errors: Sequence[float], lag: int) -> float:
    total: float = sum(map(mul, errors[lag:], errors))
    return total / len(errors)
