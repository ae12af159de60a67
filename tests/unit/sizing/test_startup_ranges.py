"""The ranges of what a start takes: where they come from, and how often they hold elsewhere."""

from __future__ import annotations

from statistics import median

from gpufleet.sizing.startup_ranges import RANGES, Estimate
from tests.support.rows import each_row
from tests.support.start_up import GIB, sized, whole_logs
from tests.support.start_up_fit import WAYS, blind, fit, held_out, judge, known_logs, newer


def test_ranges_are_added_end_to_end() -> None:
    """Low to low and high to high: no root of squares."""
    whole = Estimate(10, 20) + Estimate(-3, 5)

    assert (whole.low, whole.high) == (7, 25)
    assert whole.bytes - whole.error_bytes <= whole.low
    assert whole.bytes + whole.error_bytes >= whole.high


def test_the_ranges_are_what_the_starts_say() -> None:
    """`python -m tests.support.start_up_fit` prints them."""
    assert fit(known_logs()) == RANGES


def test_what_is_judged_is_what_is_said() -> None:
    """With the ranges of the release, the judgement has the figures of `gpufleet size`."""
    for log in whole_logs():
        judged, said = judge(log, RANGES), sized(log)

        assert abs(max(0, judged.foretold) - said.kv_cache_bytes_per_gpu / GIB) <= 0.001, log
        assert abs(judged.error - said.estimate_error_bytes_per_gpu / GIB) <= 0.001, log


@each_row("way", list(WAYS))
def test_ranges_hold_for_starts_that_they_are_not_fitted_to(way: str) -> None:
    """95 % of the starts of a laboratory, a kind of GPU and a release that are left out."""
    judged = held_out(way)

    assert len(judged) == len(known_logs())
    assert sum(one.holds for one in judged) >= 0.95 * len(judged)
    assert not [str(one.log) for one in judged if one.wrong]
    assert median(one.error for one in judged) <= 1.0


def test_ranges_of_the_earlier_starts_hold_for_the_later_ones() -> None:
    """Also fitted as they would have been before the newest records came."""
    judged = newer()

    assert len(judged) >= 25
    assert sum(one.holds for one in judged) >= 0.95 * len(judged)
    assert not [str(one.log) for one in judged if one.wrong]


def test_of_starts_that_were_read_last_none_makes_a_certain_verdict_wrong() -> None:
    """They were read when all that the estimates are made of was fixed: one in 17 is outside."""
    judged = blind()

    assert len(judged) >= 17
    assert sum(one.holds for one in judged) >= 0.9 * len(judged)
    assert not [str(one.log) for one in judged if one.wrong]
