"""
Explain why a KV cache is too small, and suggest changes with which the server starts. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gpufleet.sizing import kv_cache
from gpufleet.sizing.dummy_run import GIB
from gpufleet.sizing.options import Options, Sizing
from gpufleet.sizing.stage_memory import StageMemory
from gpufleet.sizing.startup_memory import Defaults

FEW_SEQUENCES = 256
"""
Value of `--max-num-seqs` to suggest if the dummy run needs too much memory. It is vLLM's default on
small GPUs.
"""


def round_down(blocks: int) -> int:
    """
    Return the number rounded down to a multiple of 64, or of 16 if it is below 256.

    >>> round_down(856), round_down(108), round_down(7)
    (832, 96, 7)
    """
    step = 64 if blocks >= 256 else 16 if blocks >= 16 else 1
    return blocks // step * step


@dataclass(frozen=True)
class SmallCache:
    """A KV cache that is too small or may be too small, with the values of the estimate."""

    options: Options
    chosen: Defaults
    stage: StageMemory
    report: kv_cache.CacheReport
    largest: int
    length: int


def explain(case: SmallCache) -> Iterator[str]:
    """Yield a sentence on why the cache is too small or may be too small."""
    options, stage, report = case.options, case.stage, case.report
    given = options.kv_cache_memory_bytes is not None or options.device == "cpu"
    if given:
        left = f"the KV cache has {gib(max(0, stage.available))}"
    else:
        share, total = case.chosen.gpu_memory_utilization, options.gpu_memory_gib
        left = (
            f"of {gib(total * share * GIB)} ({share:g} x {total:g} GiB), the weights need "
            f"{gib(stage.weights)} and vLLM's start needs about {gib(stage.start.budget.bytes)}"
        )
        if stage.available <= 0:
            yield f"{left}, so nothing is left for the KV cache"
            return
        left += f", which leaves {gib(stage.available)} for the KV cache"
    needs = f"one request of {case.length:,} tokens needs {gib(report.needed_bytes)}"
    if report.starts:
        yield (
            f"{left}, and {needs}. The error of the estimate is up to {gib(stage.error)}, so the "
            "model may not start"
        )
        return
    if not report.needed_bytes:  # the release cannot serve these layers together
        yield report.why
        return
    fits = "no context fits"
    if case.largest:
        fits = f"{case.largest:,} tokens is the maximum context"
    yield f"{left}, and {needs}: {fits}"


def suggest(
    options: Options, found: Sizing, smallest: int | None, starts: Callable[[Options], bool]
) -> str:
    """
    Return a sentence with the single changes with which the model certainly starts.

    The changes are in the order of `_possible_changes`.
    """
    ways: dict[str, str] = {}
    for flag, value, changed in _possible_changes(options, found):
        if flag not in ways and starts(changed):
            ways[flag] = f"{flag} {value}"
    if ways:
        return f"the model would start with {', or with '.join(ways.values())}"
    if smallest is not None:
        return f"the model would start on {smallest} GPUs of this model"
    return (
        "the model would not start on GPUs of this type with any single setting: use GPUs with "
        "more memory, or a smaller or quantized checkpoint"
    )


def _possible_changes(options: Options, found: Sizing) -> Iterator[tuple[str, object, Options]]:
    """Yield (flag, value, resulting options) for each change that an operator can make."""
    # Whether the longest length starts may be uncertain, so shorter lengths are tried as well.
    for share in (1, 0.95, 0.8, 0.5):
        length = int(found.largest_max_model_len * share) // 16 * 16
        if 0 < length < found.max_model_len:
            yield "--max-model-len", length, replace(options, max_model_len=length)
    if found.max_num_seqs > FEW_SEQUENCES:
        yield "--max-num-seqs", FEW_SEQUENCES, replace(options, max_num_seqs=FEW_SEQUENCES)
    if options.kv_cache_dtype == "auto":
        yield "--kv-cache-dtype", "fp8", replace(options, kv_cache_dtype="fp8")
    if options.kv_cache_memory_bytes is not None:
        # Some releases reserve one block.
        block = found.kv_bytes_per_token_per_gpu * found.block_size_tokens
        for more in (0, block):
            needed = found.kv_bytes_for_max_model_len_per_gpu + more
            yield "--kv-cache-memory-bytes", needed, replace(options, kv_cache_memory_bytes=needed)
    for tensor in (2, 4, 8, 16):
        if tensor > options.tensor_parallel:
            yield "--tensor-parallel-size", tensor, replace(options, tensor_parallel=tensor)


def gib(count: float) -> str:
    """Format a number of bytes in GiB, or in MiB below 0.1 GiB."""
    small = 0 < count < GIB / 10
    return f"{count / (1 << 20):.2f} MiB" if small else f"{count / GIB:.2f} GiB"
