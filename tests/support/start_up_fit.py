"""
What the start-ups say of the parts of sizing/startup_ranges.py, and how well that holds elsewhere.

`python -m tests.support.start_up_fit` prints the RANGES and AT_ONCE that all of the starts give.
The judgement of them (`held_out`) leaves out whole laboratories, kinds of GPU and releases, and
takes both from the rest: for AT_ONCE, laboratories are left out of that rest in turn once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache as once

from gpufleet.sizing import kv_cache
from gpufleet.sizing.dummy_run import GIB
from gpufleet.sizing.stage_memory import requested_length, resolve_defaults, stage_memory
from gpufleet.sizing.startup_ranges import PARTS, Ranges
from tests.support.start_up import Log, asked, layout, started_logs, weighed

ENOUGH_STARTS, ENOUGH_LABORATORIES = 3, 2
_WITH_OTHERS = {"unified memory"}
"""Fitted to all that have it: the one that had most has images, too."""
MARGIN, SHARE = 0.1, 0.1
"""GiB, and of the spread, that a range has beyond the least and the most that it is fitted to."""


@dataclass(frozen=True)
class Structure:
    """What is said of a start before anything of PARTS is."""

    parts: tuple[str, ...]
    available: float
    """GiB for the cache if no part took anything."""
    spread: float
    """GiB from the middle to either end of what the budget holds without PARTS."""
    error: float
    """GiB of the rest: of the weights."""
    sampler: float
    """GiB between the middle and either end of the activations."""


@once
def structure(log: Log) -> Structure:
    """Return what follows from the config, the flags and the GPU."""
    description, options = asked(log)
    chosen = resolve_defaults(options, requested_length(description, options))
    stages, _ = stage_memory(description, options, chosen, dict.fromkeys(PARTS, (0.0, 0.0)))
    tightest = min(stages, key=lambda stage: stage.available)
    available = tightest.available / GIB
    error = (tightest.error - tightest.start.budget.error_bytes) / GIB
    if log.weighs_as_logged:
        assert log.loaded_gib is not None
        available += max(stage.bytes for stage in weighed(log)) / GIB - log.loaded_gib
        error = 0.005 * log.loaded_gib
    return Structure(
        tightest.start.parts,
        available,
        tightest.start.whole_range.error_bytes / GIB,
        error,
        tightest.start.activation.error_bytes / GIB,
    )


def logged(log: Log) -> float:
    """Return the memory for the cache that the log prints, in GiB."""
    assert log.available_gib
    return min(log.available_gib)


def _middle(one: tuple[float, float]) -> float:
    return (one[0] + one[1]) / 2


def _remainder(log: Log, part: str, known: Ranges) -> float:
    """Return what of a start is the part's: what the others leave, taken at their middles."""
    found = structure(log)
    others = sum(_middle(known[other]) for other in found.parts if other != part)
    remainder = found.available - others - logged(log)
    if log.vllm >= (0, 11, 1):
        return remainder
    # Before, it had one of two samplers (dummy_run.py), and is taken for what it is nearer to.
    expected = _middle(PARTS[part])
    return min(
        (remainder - found.sampler, remainder + found.sampler),
        key=lambda each: abs(each - expected),
    )


def fit(logs: Iterable[Log]) -> dict[str, tuple[float, float]]:
    """
    Return each part's range, from these starts alone, in hundredths of a GiB.

    One part after the other: from the starts that have no part later in the list, and if there are
    enough, from those that have it alone beside the process. A part that fewer starts or
    laboratories show has what PARTS assumes, and at least what was seen.
    """
    known = dict(PARTS)
    order = list(PARTS)
    for at, part in enumerate(order):
        near = [
            log
            for log in logs
            if part in structure(log).parts
            and all(order.index(other) <= at for other in structure(log).parts)
        ]
        alone = [log for log in near if len(structure(log).parts) <= 2]
        chosen = alone if _enough(alone) and part not in _WITH_OTHERS else near
        remainders = [_remainder(log, part, known) for log in chosen]
        if _enough(chosen):
            margin = MARGIN + SHARE * (max(remainders) - min(remainders))
            low, high = min(remainders) - margin, max(remainders) + margin
        else:
            low, high = min([*remainders, PARTS[part][0]]), max([*remainders, PARTS[part][1]])
        known[part] = round(low, 2), round(high, 2)
    return known


def _enough(logs: list[Log]) -> bool:
    laboratories = {log.laboratory for log in logs}
    return len(logs) >= ENOUGH_STARTS and len(laboratories) >= ENOUGH_LABORATORIES


@dataclass(frozen=True)
class Judged:
    """A start, beside what ranges say that it was no part of."""

    log: Log
    foretold: float
    logged: float
    error: float

    @property
    def holds(self) -> bool:
        """Say whether the log lies in the range."""
        return abs(self.foretold - self.logged) <= self.error

    @property
    def wrong(self) -> bool:
        """Say whether a verdict that would be certain is not what happened."""
        kinds = layout(self.log)

        def starts(by: float) -> bool:
            bytes_each = max(0, int((self.foretold + by) * GIB))
            return kv_cache.cache(kinds, [bytes_each] * len(kinds.stages)).starts

        if self.log.refusal is None:
            return not starts(self.error)
        return starts(-self.error)


def judge(log: Log, ranges: Ranges, share: float) -> Judged:
    """Return what these ranges say of a start, with this share of their sum."""
    found = structure(log)
    middles = sum(_middle(ranges[part]) for part in found.parts)
    return Judged(
        log,
        found.available - middles,
        logged(log),
        found.error + share * _spread(found, ranges),
    )


def _spread(found: Structure, ranges: Ranges) -> float:
    return found.spread + sum((ranges[part][1] - ranges[part][0]) / 2 for part in found.parts)


WAYS: dict[str, Callable[[Log], str]] = {
    "laboratory": lambda log: log.laboratory,
    "kind of GPU": lambda log: log.host,
    "release": lambda log: ".".join(map(str, log.vllm[:2])),
}


def at_once(logs: Iterable[Log]) -> float:
    """Return the largest share of its ranges that a start needs in a laboratory left out."""
    logs, needed = list(logs), 0.0
    for laboratory in sorted({log.laboratory for log in logs}):
        ranges = fit([log for log in logs if log.laboratory != laboratory])
        for log in logs:
            if log.laboratory == laboratory:
                found, judged = structure(log), judge(log, ranges, 0.0)
                off = abs(judged.foretold - judged.logged) - judged.error
                needed = max(needed, off / _spread(found, ranges))
    return math.ceil(100 * needed) / 100


@once
def held_out(way: str) -> tuple[Judged, ...]:
    """Return every start, judged by what the starts of all other groups say."""
    of = WAYS[way]
    found = []
    for group in sorted({of(log) for log in started_logs()}):
        rest = [log for log in started_logs() if of(log) != group]
        ranges, share = fit(rest), at_once(rest)
        found += [judge(log, ranges, share) for log in started_logs() if of(log) == group]
    return tuple(found)


@once
def newer() -> tuple[Judged, ...]:
    """Return the starts of the last day, judged by what those before them say."""
    before = [log for log in started_logs() if log.seen]
    ranges, share = fit(before), at_once(before)
    return tuple(
        judge(log, ranges, share) for log in started_logs() if not log.seen and not log.blind
    )


if __name__ == "__main__":
    for name, (low, high) in fit(started_logs()).items():
        print(f'    "{name}": ({low:g}, {high:g}),')
    print(f"AT_ONCE = {at_once(started_logs()):g}")
