"""Find differences between two measurements that exceed their noise. Pure.

Only the following count as a difference:

- Found rates, if their intervals do not overlap. The interval of a result reaches from the highest
  rate at which the contract was met to the lowest rate at which it was not met.
- The share of requests that met the contract at an equal load, if the levels' Wilson intervals do
  not overlap. This condition is stricter than a test of the difference: two 95 % intervals of equal
  width are disjoint by chance in less than 1 % of comparisons.
- A latency at an equal load, if a percentile of one result is above a higher percentile of the
  other result, and if the Wilson intervals of the two shares do not overlap. Example: if p95 of A
  is above p99 of B, at most 95 % of A's requests are as fast as 99 % of B's. Only percentiles are
  stored, so a smaller difference is not detected.

Requests that share a queue are not independent. The width of a level's interval shows as how many
independent requests its requests count. Latencies are judged with that number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from gpufleet.errors import FleetError
from gpufleet.load_test.foreign_values import ForeignResult
from gpufleet.load_test.intervals import wilson
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.result import Measurement, RateBracket, unequal_contract

NOTHING = "these measurements show no difference"

CONFIDENCE = 0.95
"""The confidence of the intervals of shares."""

# Rates that a search computes twice may differ in their last digits.
_SAME_RATE = 1e-6

# The highest percentile first, because contracts are about the slowest requests.
_PERCENTILES = {"p99": 0.99, "p95": 0.95, "p90": 0.9, "p50": 0.5}
_LATENCIES = (("TTFT", "ttft"), ("ITL", "itl"), ("e2e", "e2e"))


@dataclass(frozen=True)
class Comparison:
    """The differences between two measurements."""

    changed: tuple[str, ...]
    """Differences between the measured subjects: the possible causes."""
    differences: tuple[str, ...]
    """The differences that exceed noise, as sentences."""
    same: tuple[str, ...]
    """The compared values for which no difference could be shown."""
    not_compared: tuple[str, ...]
    """Values that were not compared, with the reason."""
    unlike: tuple[str, ...] = ()
    """
    Differences in the conditions of the two measurements.

    They alone may explain the differences in the results.
    """

    @property
    def verdict(self) -> str:
        """Return one line with the differences in conditions and in results, or `NOTHING`."""
        return "; ".join([*self.unlike, *(self.differences or (NOTHING,))])

    def lines(self) -> Iterator[str]:
        """Yield the lines of the comparison for a terminal."""
        for heading, found in (
            ("not the same conditions", self.unlike),
            ("changed", self.changed),
            ("differences beyond noise", self.differences or (NOTHING,)),
            ("no difference seen", self.same),
            ("not compared", self.not_compared),
        ):
            if found:
                yield f"{heading}:"
                yield from (f"  {each}" for each in found)


def compare(a: Measurement, b: Measurement) -> Comparison:
    """
    Return the differences of `b` from `a` that exceed noise.

    Raises `FleetError` with a sentence for each field if workloads, contracts or loops differ,
    because the results are then not comparable.
    """
    if problems := [*_unlike(a, b)]:
        raise FleetError(*problems)
    differences: list[str] = []
    same: list[str] = []
    not_compared: list[str] = []
    unit = "requests/s" if a.loop == "open" else "concurrent requests"
    shown = _rates(a.found, b.found, unit)
    (differences if shown else same).append(shown or "the load at which the contract is met")
    if a.closed and b.closed:
        shown = _rates(a.closed.found, b.closed.found, "concurrent requests")
        (differences if shown else same).append(
            f"in a closed loop: {shown}"
            if shown
            else "the concurrency of a closed loop at which the contract is met"
        )
    unlike = tuple(_unequal_counts(a, b))
    if unlike:
        each = _rates(_a_replica(a), _a_replica(b), f"{unit} a replica")
        (differences if each else same).append(
            f"of one replica: {each}" if each else "the load that one replica can serve"
        )
    pairs = [*_equal_levels(a, b)]
    if not pairs:
        not_compared.append("levels: the two results have no load in common")
    for one, other in pairs:
        at = _load(one)
        found = [*_at_level(one, other)]
        differences += [f"at {at}: {each}" for each in found]
        if not found:
            same.append(f"latencies, and the share of requests that met the contract, at {at}")
    return Comparison(
        tuple(_changes(a, b)), tuple(differences), tuple(same), tuple(not_compared), unlike
    )


def carries_more(a: Measurement, b: Measurement) -> bool:
    """
    Return whether the rate per GPU of `b` is higher than that of `a`.

    Rates count as different only if their intervals do not overlap. Raises `FleetError` like
    `compare`.
    """
    if problems := [*_unlike(a, b)]:
        raise FleetError(*problems)
    low, high = (_part(each, sum(each.subject.gpus.values()) or 1) for each in (a, b))
    return low.missed is not None and high.kept is not None and low.missed <= high.kept


def compare_foreign(ours: Measurement, theirs: Iterable[ForeignResult]) -> Comparison:
    """
    Return the latencies in another tool's results that differ from `ours` at an equal load.

    The shares of requests that met the contract are never compared, because the tools count them
    differently. The reservations about the other tool's values are part of `not_compared`.
    """
    differences: list[str] = []
    same: list[str] = []
    not_compared: list[str] = []
    if ours.replicas_of is not None and ours.replicas < ours.replicas_of:
        not_compared.append(f"the number of replicas: in this result, {ours.served_by} served")
    for result in theirs:
        not_compared += [f"{result.tool}: {each}" for each in result.reservations]
        level = next((each for each in _last(ours) if _equal_load(each, result)), None)
        if level is None:
            not_compared.append(
                f"{result.tool} at {_foreign_load(result)}: no level of this result has this load"
            )
            continue
        # Requests of another tool queue in the same way. So the same share of them counts as
        # independent.
        part = independent_requests(level) / level.requests if level.requests else 0.0
        pair = (
            (level, independent_requests(level)),
            (result, part * (result.completed or 0)),
        )
        found = [*_latencies(*pair, ("here", "there"))]
        at = f"at {_load(level)}, {result.tool}"
        differences += [f"{at}: {each}" for each in found]
        if not found:
            same.append(f"latencies {at}")
    return Comparison((), tuple(differences), tuple(same), tuple(dict.fromkeys(not_compared)))


def independent_requests(level: LevelSummary) -> float:
    """
    Return how many independent requests the requests of a level count as.

    The number is computed from the width of the level's interval. It is never higher than the
    number of answered requests. The level's interval has a higher confidence than `CONFIDENCE`, so
    the number is too small rather than too large.
    """
    answered = level.requests - sum(level.errors.values())
    if not level.requests or answered <= 0:
        return 0.0
    share, width = level.kept / level.requests, level.high - level.low
    low, high = 0.0, float(answered)
    for _ in range(50):
        middle = (low + high) / 2
        bounds = wilson(share * middle, middle, CONFIDENCE)
        low, high = (middle, high) if bounds.high - bounds.low > width else (low, middle)
    return high


# -- comparability


def _unlike(a: Measurement, b: Measurement) -> Iterator[str]:
    for name in sorted({*a.workload, *b.workload} - {"seed"}):
        one, other = a.workload.get(name, "none"), b.workload.get(name, "none")
        if one != other:
            yield (
                f"they cannot be compared: workload.{name} is {one} in the first result, but "
                f"{other} in the second"
            )
    for each in unequal_contract(a.contract, b.contract):
        yield (
            "they cannot be compared: "
            f"contract.{each.replace(', now', ' in the first result, but')} in the second"
        )
    if a.loop != b.loop:
        yield (
            f"they cannot be compared: the loop is {a.loop} in the first result, but {b.loop} in "
            "the second"
        )


def _unequal_counts(a: Measurement, b: Measurement) -> Iterator[str]:
    if a.replicas != b.replicas:
        why = "the total rates differ even if each replica is equally fast"
    elif None not in (a.replicas_of, b.replicas_of) and a.replicas_of != b.replicas_of:
        why = "a different part of the fleet, of equal size"
    else:
        return
    yield f"{a.served_by} served before, {b.served_by} now: {why}"


def _a_replica(of: Measurement) -> RateBracket:
    """Return the found loads per replica."""
    return _part(of, of.replicas)


def _part(of: Measurement, parts: int) -> RateBracket:
    """Return the found loads, divided into equal parts."""
    kept, missed = of.found.kept, of.found.missed
    return replace(
        of.found,
        kept=None if kept is None else kept / parts,
        missed=None if missed is None else missed / parts,
    )


def _changes(a: Measurement, b: Measurement) -> Iterator[str]:
    if a.model != b.model:
        yield f"model {a.model}, now {b.model}"
    if a.target != b.target:
        yield f"target {a.target}, now {b.target}"
    if a.replicas != b.replicas:
        yield f"replicas that served {a.served_by}, now {b.served_by}"
    if a.client.place != b.client.place:
        yield (
            f"clients on {a.client.place}, now on {b.client.place}, with a different network "
            "path to the servers"
        )
    yield from a.subject.fingerprint.differences(b.subject.fingerprint)
    if a.subject.driver != b.subject.driver:
        yield f"driver {a.subject.driver or 'unknown'}, now {b.subject.driver or 'unknown'}"
    if set(a.subject.nodes) != set(b.subject.nodes):
        yield f"nodes {' '.join(a.subject.nodes)}, now {' '.join(b.subject.nodes)}"


def _equal_levels(a: Measurement, b: Measurement) -> Iterator[tuple[LevelSummary, LevelSummary]]:
    """
    Yield the pairs of levels with equal load.

    If a level was measured twice, its last measurement counts.
    """
    for one, other in product(_last(a), _last(b)):
        if one.concurrency == other.concurrency and _same_rate(one.rate, other.rate):
            yield one, other


def _last(found: Measurement) -> list[LevelSummary]:
    return [*{(each.rate, each.concurrency): each for each in found.levels}.values()]


def _same_rate(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_SAME_RATE)


def _equal_load(level: LevelSummary, result: ForeignResult) -> bool:
    if level.rate is not None:
        # If the other tool limits concurrency, its load differs, even if the rate is equal.
        return result.concurrency is None and _same_rate(level.rate, result.rate)
    return result.rate is None and level.concurrency == result.concurrency


# -- differences


def _rates(a: RateBracket, b: RateBracket, unit: str) -> str | None:
    """Return how the found loads differ beyond their intervals, or None."""
    for low, high, word in ((a, b, "more"), (b, a, "less")):
        if low.missed is not None and high.kept is not None and low.missed <= high.kept:
            least = high.kept - low.missed
            return (
                f"it can serve {word}: {_interval(a)} {unit} before, {_interval(b)} now (at "
                f"least {least:.3g} {word})"
            )
    return None


def _interval(found: RateBracket) -> str:
    low = "0" if found.kept is None else f"{found.kept:.3g}"
    return f"{low} or more" if found.missed is None else f"{low} to {found.missed:.3g}"


def _at_level(a: LevelSummary, b: LevelSummary) -> Iterator[str]:
    if a.high < b.low or b.high < a.low:
        yield f"{_share(a)} of requests met the contract before, {_share(b)} now"
    yield from _latencies((a, independent_requests(a)), (b, independent_requests(b)))


def _share(level: LevelSummary) -> str:
    share = level.kept / level.requests if level.requests else 0.0
    return f"{share:.1%} ({level.low:.1%} to {level.high:.1%})"


def _latencies(
    a: tuple[LevelSummary | ForeignResult, float],
    b: tuple[LevelSummary | ForeignResult, float],
    names: tuple[str, str] = ("before", "now"),
) -> Iterator[str]:
    """
    Yield a sentence for each latency that differs.

    `a` and `b` have a result and its number of independent requests.
    """
    for name, key in _LATENCIES:
        one, other = getattr(a[0], key), getattr(b[0], key)
        if pair := _above(other, b[1], one, a[1]):
            word, (p, q) = "slower", pair
        elif pair := _above(one, a[1], other, b[1]):
            word, (q, p) = "faster", pair
        else:
            continue
        yield (
            f"{name} is {word}: {p} of {_time(other[p])} {names[1]}, "
            f"{q} of {_time(one[q])} {names[0]}"
        )


def _above(
    slow: Mapping[str, float], of_slow: float, fast: Mapping[str, float], of_fast: float
) -> tuple[str, str] | None:
    """
    Return the names of two percentiles, or None.

    The second percentile is a higher one than the first. Nevertheless, the value of `slow` at the
    first percentile significantly exceeds the value of `fast` at the second.
    """
    for (one, p), (other, q) in product(_PERCENTILES.items(), repeat=2):
        if p < q and one in slow and other in fast and slow[one] > fast[other]:
            most = wilson(p * of_slow, of_slow, CONFIDENCE).high
            least = wilson(q * of_fast, of_fast, CONFIDENCE).low
            if most < least:
                return one, other
    return None


def _load(level: LevelSummary) -> str:
    if level.rate is not None:
        return f"{level.rate:.4g} requests/s"
    return f"{level.concurrency} concurrent requests"


def _foreign_load(result: ForeignResult) -> str:
    rate = "" if result.rate is None else f"{result.rate:.4g} requests/s"
    many = "" if result.concurrency is None else f"{result.concurrency} concurrent requests"
    return " with at most ".join(filter(None, (rate, many))) or "an unknown load"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
