"""The ranges of what a start takes: where they come from, and how often they hold elsewhere."""

from __future__ import annotations

from statistics import median
from typing import Any

from gpufleet.sizing.dummy_run import DummyRun
from gpufleet.sizing.startup_ranges import AT_ONCE, RANGES, Estimate, parts
from tests.support.rows import each_row
from tests.support.start_up import GIB, sized, started_logs, whole_logs
from tests.support.start_up_fit import WAYS, at_once, fit, held_out, judge, newer


def test_ranges_are_added_end_to_end() -> None:
    """Low to low and high to high: no root of squares."""
    whole = Estimate(10, 20) + Estimate(-3, 5)

    assert (whole.low, whole.high) == (7, 25)
    assert whole.bytes - whole.error_bytes <= whole.low
    assert whole.bytes + whole.error_bytes >= whole.high


def test_a_narrowed_range_keeps_its_middle_and_errs_on_the_wide_side() -> None:
    assert Estimate(100, 300).narrowed(0.25) == Estimate(175, 225)
    assert Estimate(0, 10).narrowed(0.25) == Estimate(3, 7)
    assert Estimate(7, 7).narrowed(0.25) == Estimate(7, 7)


@each_row(
    ("vllm", "shape", "has"),
    [
        ((0, 9, 0), {"compute_capability": (9, 0)}, ("process before 0.9.1",)),
        ((0, 19, 1), {"compute_capability": (9, 0)}, ("process up to 0.19",)),
        (
            (0, 19, 1),
            {"compute_capability": (9, 0), "tensor": 4},
            ("process up to 0.19", "switched links from 0.17"),
        ),
        (
            (0, 33, 0),
            {"compute_capability": (10, 0), "tensor": 8},
            ("process from 0.20", "switched links, over 4 GPUs"),
        ),
        (
            (0, 33, 0),
            {"compute_capability": (12, 0), "tensor": 2, "pipeline": 2},
            ("process from 0.20", "PCIe from 0.27", "pipeline"),
        ),
        (
            (0, 20, 0),
            {"compute_capability": (12, 1)},
            ("process from 0.20", "unified memory"),
        ),
    ],
)
def test_a_start_has_the_parts_of_its_release_and_its_hardware(
    vllm: tuple[int, ...], shape: dict[str, Any], has: tuple[str, ...]
) -> None:
    """A dense model without images."""
    dense = next(log for log in whole_logs() if log.family == "dense").description
    run = DummyRun(vllm=vllm, max_num_seqs=256, max_num_batched_tokens=2048, **shape)

    assert parts(dense.architecture, dense.config, run) == has


def test_an_encoder_beside_a_larger_run_is_not_the_peak() -> None:
    """It is over by then: with 1,024 sequences the sampler takes more, with four it does not."""
    found = next(log for log in whole_logs() if "Qwen3-VL" in log.record["model"]).description

    def images(sequences: int) -> str:
        run = DummyRun(vllm=(0, 13, 0), max_num_seqs=sequences, max_num_batched_tokens=8192)
        return parts(found.architecture, found.config, run)[1]

    assert images(1024) == "images"
    assert images(4) == "images, many tokens"


def test_the_ranges_are_what_the_starts_say() -> None:
    """`python -m tests.support.start_up_fit` prints them."""
    assert fit(started_logs()) == RANGES
    assert at_once(started_logs()) == AT_ONCE


def test_what_is_judged_is_what_is_said() -> None:
    """With the ranges of the release, the judgement has the figures of `gpufleet size`."""
    for log in whole_logs():
        judged, said = judge(log, RANGES, AT_ONCE), sized(log)

        assert abs(max(0, judged.foretold) - said.kv_cache_bytes_per_gpu / GIB) <= 0.001, log
        assert abs(judged.error - said.estimate_error_bytes_per_gpu / GIB) <= 0.001, log


@each_row("way", list(WAYS))
def test_ranges_hold_for_starts_that_they_are_not_fitted_to(way: str) -> None:
    """95 % of the starts of a laboratory, a kind of GPU and a release that are left out."""
    judged = held_out(way)

    assert len(judged) == len(started_logs())
    assert sum(one.holds for one in judged) >= 0.95 * len(judged)
    assert not [str(one.log) for one in judged if one.wrong]
    assert median(one.error for one in judged) <= 1.0


def test_ranges_of_the_earlier_starts_hold_for_the_later_ones() -> None:
    """Also fitted as they would have been before the newest records came."""
    judged = newer()

    assert len(judged) >= 25
    assert sum(one.holds for one in judged) >= 0.95 * len(judged)
    assert not [str(one.log) for one in judged if one.wrong]
