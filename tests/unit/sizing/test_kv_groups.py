"""DeepSeek V4's caches of several lengths, against the code of every release that has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import CompressedCache
from gpufleet.sizing.kv_bytes import Kind, Layout, compressed_pages
from gpufleet.sizing.kv_cache import CacheReport, cache
from tests.support.checkout import ROOT
from tests.support.rows import each_row

RECORD = json.loads((ROOT / "tests/data/kv_compressed.json").read_text())
ASKED = [
    (release, number)
    for release, answers in RECORD["releases"].items()
    for number, answer in enumerate(answers)
]
GIB = 1 << 30


def layer(ratio: int) -> CompressedCache:
    """Return DeepSeek V4's cache of a layer that makes one of `ratio` tokens."""
    return CompressedCache(512, 128, ratio, index_dim=128 if ratio == 4 else 0)


def layout(ratios: list[int], vllm: tuple[int, ...] = (0, 33, 0), **changes: Any) -> Layout:
    """Return such layers on one stage."""
    given = {"max_model_len": 4096, "max_num_batched_tokens": 8192} | changes
    return Layout(stages=(tuple(map(layer, ratios)),), vllm=vllm, **given)


def report(release: str, number: int) -> CacheReport:
    """Return what is said here of a recorded case."""
    case = RECORD["cases"][number]
    asked = layout(
        RECORD["ratios"][case["v4"]],
        tuple(map(int, release.split("."))),
        max_model_len=case["max_model_len"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
    )
    return cache(asked, case["available"][0])


@each_row(("release", "number"), ASKED)
def test_it_is_what_the_releases_own_code_says(release: str, number: int) -> None:
    """Blocks, tokens and concurrency, or the refusal with its figures, to the digit."""
    said, found = RECORD["releases"][release][number], report(release, number)

    if "refused" in said:
        assert not found.starts
        assert found.needed_bytes / GIB == pytest.approx(said["needed_gib"], abs=0.00501)
        assert found.estimated_max_model_len == said["estimated"]
    else:
        assert found.starts
        assert found.blocks == said["blocks"]
        assert found.tokens == said["tokens"]
        assert found.max_concurrency == pytest.approx(said["concurrency"], abs=0.00501)


def test_the_record_has_every_time_of_it() -> None:
    """Releases that changed the arithmetic are there, with starts and with refusals."""
    assert {"0.20.0", "0.22.0", "0.23.0", "0.26.0", "0.27.0", "0.29.0", "0.33.0"} <= set(
        RECORD["releases"]
    )
    for answers in RECORD["releases"].values():
        assert 0 < sum("refused" in answer for answer in answers) < len(answers)


@pytest.mark.parametrize(("ratio", "sizes"), [(0, [37440]), (128, [37440, 1728, 32832])])
def test_pages_are_rows_of_576_bytes(ratio: int, sizes: list[int]) -> None:
    """A page is what FlashMLA reads: 584 bytes a token, rounded up."""
    found = [page.bytes for page in compressed_pages(layout([ratio]), layer(ratio))]

    assert found == sizes


def test_only_what_is_kept_of_all_tokens_grows() -> None:
    """Windows and states stop growing; of four tokens one is kept, and its index."""
    found = compressed_pages(layout([4]), layer(4))

    assert [page.kind for page in found if page.grows] == [Kind.FULL, Kind.FULL]
    assert sum(page.grows for page in found) == 146 + 33


def test_another_kv_dtype_is_not_guessed() -> None:
    """Of other formats than the packed one no release's bytes are known here."""
    with pytest.raises(FleetError, match="--kv-cache-dtype bfloat16"):
        cache(layout([4, 128], kv_dtype="bfloat16"), GIB)


def test_stages_have_blocks_of_their_own_layers() -> None:
    """Half of the layers on each stage takes about half of the bytes of a block."""
    ratios = RECORD["ratios"]["Flash"]
    whole = cache(layout(ratios), 30 * GIB)
    stages = tuple(tuple(map(layer, part)) for part in (ratios[:22], ratios[22:]))
    half = cache(
        Layout(stages=stages, vllm=(0, 33, 0), max_model_len=4096, max_num_batched_tokens=8192),
        30 * GIB,
    )

    assert 1.8 < half.blocks / whole.blocks < 2.1


def test_a_published_refusal_is_foretold() -> None:
    """
    Two GH200 with 0.22 and 16,384 tokens a batch: of 30,000 tokens 6.66 GiB, and 5.44 are there.

    Source: a comment on github.com/vllm-project/vllm/issues/44376; it says 13,528 tokens would fit.
    """
    asked = layout(
        RECORD["ratios"]["Flash"],
        (0, 22, 0),
        max_model_len=30000,
        max_num_batched_tokens=16384,
        kv_dtype="fp8",
    )
    least, most = (cache(asked, int(memory * GIB)) for memory in (5.435, 5.445))

    assert not most.starts
    assert least.needed_bytes / GIB == pytest.approx(6.66, abs=0.005)
    assert least.estimated_max_model_len <= 13528 <= most.estimated_max_model_len
