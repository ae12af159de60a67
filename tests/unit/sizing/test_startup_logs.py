"""What is said of weights and KV cache, against the start-up logs that others published."""

from __future__ import annotations

import pytest

from gpufleet.sizing import kv_cache
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.support.start_up import (
    GIB,
    ROUNDING,
    Log,
    cached,
    layout,
    logs,
    sized,
    weighed,
    whole_logs,
)
from tests.support.start_up_report import report

LOADED = 0.02
"""How far the weights may be off, as a share. Most are within a thousandth; the rest is what a load
leaves allocated beside the weights."""
OF_ANOTHER_RANK = 0.001
"""The log prints rank 0's memory, and the smallest rank's tokens."""


def ids(log: Log) -> str:
    """Return the name of a case."""
    return str(log).replace(" ", "-")


LOADED_LOGS = [
    log for log in logs() if log.loaded_gib and not log.only_cache and not log.weighs_as_logged
]
CACHE_LOGS = [log for log in logs() if log.available_gib and "kv_tokens" in log.lines]
REFUSED_LOGS = [log for log in logs() if log.refusal]
STATE_LOGS = [log for log in logs() if "state_blocks" in log.lines]
WHOLE_LOGS = whole_logs()


def test_there_are_enough_logs() -> None:
    """The logs are many, of all kinds of cache, and from every time of V1's."""
    bands = {log.band for log in logs()}

    assert len(logs()) >= 80
    assert len({log.record["model"] for log in logs()}) >= 40
    assert bands == {"0.8 to 0.10", "0.11 to 0.15", "0.16 to 0.20", "0.21 to 0.27", "0.28 to 0.33"}


@each_row("log", LOADED_LOGS, ids=ids)
def test_the_weights_are_what_loading_takes(log: Log) -> None:
    """The largest rank weighs what `Model loading took` says, within 2 %."""
    assert log.loaded_gib is not None
    weight = max(stage.bytes for stage in weighed(log)) / GIB

    assert abs(weight / log.loaded_gib - 1) <= LOADED, f"{weight:.2f} for {log.loaded_gib} GiB"


@each_row("log", CACHE_LOGS, ids=ids)
def test_tokens_and_concurrency_follow_from_the_memory(log: Log) -> None:
    """From the memory that the log prints follow its tokens and its concurrency, to the digit."""
    least, most = cached(log, -ROUNDING), cached(log, ROUNDING)
    tokens, concurrency = log.lines["kv_tokens"], log.lines.get("max_concurrency")
    lower = 1 - (OF_ANOTHER_RANK if log.tensor > 1 else 0)

    assert least.starts
    assert least.tokens * lower <= tokens <= most.tokens
    if concurrency is not None:
        assert least.max_concurrency * lower - ROUNDING <= concurrency
        assert concurrency <= most.max_concurrency + ROUNDING


@each_row("log", REFUSED_LOGS, ids=ids)
def test_a_refusal_is_foretold_with_its_numbers(log: Log) -> None:
    """Where vLLM refused to start, so is it said, with what is needed and what would start."""
    refusal = log.refusal
    assert refusal is not None
    least, most = cached(log, -ROUNDING), cached(log, ROUNDING)

    assert not most.starts
    assert least.needed_bytes / GIB == pytest.approx(refusal.needed_gib, abs=ROUNDING + 1e-6)
    if refusal.estimate:
        assert least.estimated_max_model_len <= refusal.estimate <= most.estimated_max_model_len


@pytest.mark.parametrize("log", STATE_LOGS, ids=ids)
def test_more_sequences_than_blocks_for_their_states_are_refused(log: Log) -> None:
    """The blocks are foretold from the config, the flags and the GPU, within the stated error."""
    sizing = sized(log)
    least, most = (
        kv_cache.cache(layout(log), [sizing.kv_cache_bytes_per_gpu + by]).blocks
        for by in (-sizing.estimate_error_bytes_per_gpu, sizing.estimate_error_bytes_per_gpu)
    )

    assert least <= log.lines["state_blocks"] <= most
    assert not sizing.fits
    assert any(f"--max-num-seqs {sizing.max_num_seqs}: " in reason for reason in sizing.reasons)


@each_row("log", WHOLE_LOGS, ids=ids)
def test_no_certain_verdict_is_wrong(log: Log) -> None:
    """What started is never certain not to fit, and what did not is never said to fit."""
    sizing = sized(log)

    if log.refusal is None:
        assert sizing.fits or sizing.confidence == "near the edge", sizing.reasons
    else:
        assert not sizing.fits


def test_the_estimates_hold_as_often_as_they_promise() -> None:
    """Nine of ten starts that it is fitted to had the cache that is foretold, within its error."""
    fitted = [log for log in WHOLE_LOGS if log.seen]
    off = [
        f"{log}: {sized(log).kv_cache_bytes_per_gpu / GIB:.2f} for {min(log.available_gib or [])}"
        for log in fitted
        if abs(sized(log).kv_cache_bytes_per_gpu / GIB - min(log.available_gib or []))
        > sized(log).estimate_error_bytes_per_gpu / GIB
    ]

    assert len(off) <= len(fitted) / 10, "\n".join(off)


def test_the_page_says_what_is_measured_now() -> None:
    """`python -m tests.support.start_up_report > docs/measured/sizing-accuracy.md` writes it."""
    assert (ROOT / "docs/measured/sizing-accuracy.md").read_text() == report()
