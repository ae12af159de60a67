"""A clip that a model reads in one step is known to be too large for the step."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.sizing.fit import size
from gpufleet.sizing.options import video_frames
from tests.support.rows import each_row
from tests.unit.sizing.test_fit import model, options

GEMMA = "google--gemma-4-31B"
RULE = "is less than the 2496 tokens of one clip"


def refused(name: str, gpu: str, vllm: tuple[int, ...], **given: Any) -> list[str]:
    """Return what is refused of clips on two GPUs."""
    found = size(model(name), options(gpu, vllm=vllm, tensor_parallel=2, **given))
    return [reason for reason in found.reasons if " of one clip" in reason]


@each_row(
    ("vllm", "gpu", "given", "is_refused"),
    [
        ((0, 19, 0), "L40S", None, False),
        ((0, 20, 0), "L40S", None, True),
        ((0, 21, 0), "A100-80GB", None, True),
        ((0, 21, 0), "H100", None, False),
        ((0, 22, 0), "L40S", None, False),
        ((0, 33, 0), "H100", 2495, True),
        ((0, 33, 0), "H100", 2496, False),
    ],
)
def test_a_default_is_refused_until_vllm_raises_it_and_a_given_number_always(
    vllm: tuple[int, ...], gpu: str, given: int | None, is_refused: bool
) -> None:
    """The default of an L40S and of any A100 is 2,048 tokens; vLLM 0.20.0 ended with it."""
    found = refused(GEMMA, gpu, vllm, max_num_batched_tokens=given)
    assert [RULE in reason for reason in found] == ([True] if is_refused else [])


@pytest.mark.parametrize("name", ["google--gemma-4-E4B", "google--gemma-3-27b-it"])
def test_a_model_that_reads_an_image_in_parts_or_a_small_one_is_not_refused(name: str) -> None:
    assert refused(name, "L40S", (0, 21, 0)) == []


@each_row(
    "given",
    [
        {"language_model_only": True},
        {"modalities_off": frozenset({"video"})},
        {"video_frames": 8},
    ],
)
def test_without_clips_or_with_short_ones_it_starts(given: dict[str, Any]) -> None:
    assert refused(GEMMA, "L40S", (0, 21, 0), **given) == []


def test_the_release_that_counts_no_frames_refuses_short_clips_too() -> None:
    assert len(refused(GEMMA, "L40S", (0, 20, 0), video_frames=8)) == 1


def test_frames_are_read_where_a_limit_has_them() -> None:
    assert video_frames({"video": {"count": 1, "num_frames": 8}}) == 8
    for limits in ({}, {"video": 2}, {"video": {"count": 1}}, {"video": {"num_frames": "8"}}):
        assert video_frames(limits) is None


@each_row(
    ("gpu", "given", "tokens"),
    [
        ("L40S", {}, 2496),
        ("L40S", {"video_frames": 8}, 2048),
        ("L40S", {"max_num_batched_tokens": 4096}, 4096),
        ("H100", {}, 8192),
    ],
)
def test_a_default_that_vllm_raises_is_sized_as_raised(
    gpu: str, given: dict[str, Any], tokens: int
) -> None:
    asked = options(gpu, vllm=(0, 22, 0), tensor_parallel=4, max_model_len=8192, **given)
    assert size(model(GEMMA), asked).max_num_batched_tokens == tokens


@each_row(
    ("vllm", "given", "is_refused"),
    [
        ((0, 32, 0), {"max_num_batched_tokens": 2048}, True),
        ((0, 32, 0), {}, True),
        ((0, 32, 0), {"max_num_batched_tokens": 2496}, False),
        (
            (0, 32, 0),
            {"max_num_batched_tokens": 2048, "modalities_off": frozenset({"video"})},
            False,
        ),
    ],
)
def test_a_model_that_is_told_to_read_whole_items_is_judged_like_one_that_does(
    vllm: tuple[int, ...], given: dict[str, Any], is_refused: bool
) -> None:
    """No default is raised for the flag: vLLM does that for image tokens that see each other."""
    found = refused("google--gemma-4-E4B", "L40S", vllm, chunked_media=False, **given)
    assert [RULE in reason for reason in found] == ([True] if is_refused else [])


@each_row(
    ("name", "given", "is_said"),
    [
        ("Qwen--Qwen2.5-VL-7B-Instruct", {"chunked_media": False}, True),
        ("Qwen--Qwen2.5-VL-7B-Instruct", {}, False),
        (
            "Qwen--Qwen2.5-VL-7B-Instruct",
            {"chunked_media": False, "language_model_only": True},
            False,
        ),
        ("google--gemma-4-E4B", {"chunked_media": False}, False),
        ("Qwen--Qwen3-8B", {"chunked_media": False}, False),
    ],
)
def test_an_item_of_unknown_size_is_said(name: str, given: dict[str, Any], is_said: bool) -> None:
    found = size(model(name), options("H100", **given))
    assert any("--disable-chunked-mm-input" in note for note in found.notes) == is_said
