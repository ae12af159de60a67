"""
How far what is said lies from the published start-ups, as a page.

`python -m tests.support.start_up_report` prints docs/measured/sizing-accuracy.md.
"""

from __future__ import annotations

from statistics import median, quantiles

from gpufleet.sizing.startup_ranges import AT_ONCE
from tests.support.start_up import GIB, ROUNDING, Log, cached, logs, sized, weighed, whole_logs
from tests.support.start_up_fit import WAYS, Judged, held_out, newer

_HEAD = """# How accurately sizing predicts vLLM's start

This page compares gpufleet's predictions with {logs} starts of vLLM whose logs others have
published. The starts are of {models} models, of releases {first} to {last}, and on one to sixteen
GPUs. The starts and their sources are in `tests/data/start_up_logs.json`.
`tests/unit/sizing/test_startup_logs.py` tests the figures, and
`python -m tests.support.start_up_report` prints this page.

Three values are compared, because their predictions can be wrong for different reasons:

1. **Weights**: the weights of the largest rank are compared with `Model loading took`. The
   prediction follows from the config alone.
2. **Cache**: tokens and concurrency are computed from the memory that the log prints as available.
   The result follows from the config and from the release's arithmetic, so it must be exact. But
   the logs print the memory with two decimals, so the true memory may be 0.005 GiB more or less.
   With tensor parallelism, the memory of the smallest rank may be a little less; the logs do not
   print it.
3. **Whole chain**: the memory of the cache is computed from config, flags and GPU, and compared
   with `Available KV cache memory`. Activations, NCCL and CUDA graphs are estimates
   (docs/plan/sizing.md). So the prediction has an error, and states how large the error may be.
"""

_FOOT = """
## What this does not show

- More than half of the starts of the whole chain come from one laboratory, with 0.19.0 on H100. So
  the median over all starts is nearly the median of that laboratory. The median of the
  laboratories' medians shows what other users can expect.
- Some choices were made with all of these starts in sight. These are the parts of a start, the
  assumptions about a part that too few starts show (`PARTS` in `sizing/startup_ranges.py`), the
  margins, and the shares of the formulas (`sizing/dummy_run.py`). Only the fitted numbers were
  tested by leaving starts out. Here no start lies outside the range if its laboratory is left out,
  but starts of a new laboratory may.
- Up to 0.19, and with the second model runner up to 0.28, the memory of CUDA graphs is not a part
  of the budget. gpufleet uses the middle of the estimate to decide whether the memory beside the
  budget is enough for the graphs. No start here shows how often this is right.
- Most logs are of one node with NVLink. There are hardly any measurements of NCCL's buffers over
  PCIe or between nodes.
- Up to 0.11.0, the activation peak depends on whether FlashInfer is installed. It was installed in
  vLLM's images, but this cannot be known before the start. The estimate lies between both cases,
  and its error covers both.
- There are few logs of 0.28 and newer, and none of them has the whole chain. For these releases the
  arithmetic follows vLLM's source, and there is little evidence that confirms it.
- Some configs were put together from a model's card and the file of a similar model. The record of
  the log states this.
- After the estimate for encoders was written, two starts of encoders were found. Both are in the
  table of weights. Encoders keep no cache and log no activations, so nothing confirms the estimate
  of their activations. On lab nodes (CPU), an embedder, a reranker and a classifier keep no cache,
  as planned. A model that accepts images keeps the planned tokens
  (`tests/lab/test_model_kinds.py`).
- One start of Whisper was found (whisper-large-v3, 0.15.1). Its weights and cache are in the
  tables. The log does not print the GPU, so nothing confirms the whole chain. The memory of the
  encoder's own run is not counted.
- Starts with LoRA or CPU offloading are left out of the whole chain. So are starts with a separate
  draft model, besides the model's own prediction layers.
"""


_HELD_OUT = """
To test the ranges, they are fitted again without the starts of one laboratory (or kind of GPU, or
minor release), and tested on the starts that were left out. In the last row they are fitted to the
starts before 2026-11-25, and tested on the later starts. `tests/support/start_up_fit.py` has the
method.

The stated error is a share of the sum of all ranges. The whole sum is not needed, because in no
start were all parts at the same end of their ranges. The share is the largest one that a start
needed in a laboratory to which no range was fitted. In each row below, this share too is computed
only from the starts that were not left out. For this, laboratories are left out a second time.
"""
_BEFORE = """
Before this method, the constants were written by hand, and the errors were combined as the root of
the sum of their squares. At that time, 16 of the newest 25 starts lay in the stated range, and for
8 starts too much memory was predicted. The median of the stated errors was 0.61 GiB.

17 more starts (`blind` in the data) were read after parts, margins and shares had been fixed. 16 of
them lay in the range. One, a Qwen3.6-35B in four bits over 16,384 tokens, had 0.05 GiB less than
the end of the range. The median of the stated errors was 1.83 GiB. After that, three parts got
separate ranges: NVFP4's experts, graphs of no size, and encoders beside a larger run. Then all
ranges were fitted again.

If the whole sum were stated as the error, the median would be 1.16 to 1.27 GiB. With the share,
which is {share:.2f}, the median is {least:.2f} to {most:.2f} GiB. If ranges are wide, more verdicts
are "near the edge"."""


def _row(name: str, errors: list[float], within: float, unit: str) -> str:
    size = sorted(abs(error) for error in errors)
    ninth = quantiles(size, n=10, method="inclusive")[-1] if len(size) > 1 else size[0]
    held = sum(error <= within for error in size)
    figures = " | ".join(f"{figure:.2f}{unit}" for figure in (median(size), ninth, size[-1]))
    return f"| {name} | {len(size)} | {figures} | {held} of {len(size)} |"


def _minor(group: str) -> tuple[int, str]:
    """Return what puts "0.8 to 0.10" before "0.11 to 0.15"."""
    first = group.partition(" ")[0].removeprefix("0.")
    return (int(first) if first.isdigit() else 0), group


def _table(title: str, errors: dict[Log, float], within: float, unit: str) -> list[str]:
    lines = [
        "",
        f"| {title} | starts | median | 90 % below | worst | within {within:g}{unit} |",
        "|---|---|---|---|---|---|",
        _row("all", list(errors.values()), within, unit),
    ]
    for of in ("family", "band"):
        groups: dict[str, list[float]] = {}
        for log, error in errors.items():
            groups.setdefault(getattr(log, of), []).append(error)
        lines += [_row(group, groups[group], within, unit) for group in sorted(groups, key=_minor)]
    return lines


def weight_errors() -> dict[Log, float]:
    """Return by how many percent the weights are off."""
    return {
        log: 100 * (max(stage.bytes for stage in weighed(log)) / GIB / log.loaded_gib - 1)
        for log in logs()
        if log.loaded_gib and not log.only_cache and not log.weighs_as_logged
    }


def token_errors() -> dict[Log, float]:
    """Return by how many percent the tokens lie outside what the printed memory allows."""
    found = {}
    for log in logs():
        if log.available_gib and "kv_tokens" in log.lines:
            tokens = log.lines["kv_tokens"]
            least, most = cached(log, -ROUNDING).tokens, cached(log, ROUNDING).tokens
            found[log] = 100 * (max(0, least - tokens) + max(0, tokens - most)) / tokens
    return found


def refusal_errors() -> dict[Log, float]:
    """Return by how many percent the estimated length lies outside what the memory allows."""
    found = {}
    for log in logs():
        if log.refusal and log.refusal.estimate:
            asked = log.refusal.estimate
            least = cached(log, -ROUNDING).estimated_max_model_len
            most = cached(log, ROUNDING).estimated_max_model_len
            found[log] = 100 * (max(0, least - asked) + max(0, asked - most)) / asked
    return found


def memory_errors() -> dict[Log, float]:
    """Return by how many GiB the cache's memory is off."""
    return {
        log: sized(log).kv_cache_bytes_per_gpu / GIB - min(log.available_gib or [])
        for log in whole_logs()
    }


def class_errors() -> dict[str, list[float]]:
    """Return by how many percent ranks are off that vLLM 0.32.0's own classes were asked for."""
    from gpufleet.sizing.rank_weights import Sharding
    from gpufleet.sizing.weights import weight_bytes
    from tests.unit.sizing.architectures.test_published_sizes import (
        DIVIDED,
        ORACLE,
        STAGED,
        VLLM,
        WEIGHED,
        described,
    )

    def off(name: str, sharding: Sharding, kept: list[dict[str, int]]) -> list[float]:
        description = described(name)
        found = weight_bytes(
            description.architecture, description.quantization, sharding, vllm=VLLM
        )
        return [
            100 * (stage.bytes / one["allocated"] - 1)
            for stage, one in zip(found, kept, strict=True)
        ]

    def ranks(name: str, tensor: int) -> list[float]:
        return off(name, Sharding(tensor=tensor), [ORACLE[name]["tp"][str(tensor)]])

    found = {
        f"TP {tensor}": [
            one for name, size in WEIGHED if size == tensor for one in ranks(name, size)
        ]
        for tensor in (1, 2, 4, 8)
    }
    found["TP 8 with expert parallelism"] = [
        one
        for name in DIVIDED
        for one in off(name, Sharding(tensor=8, expert=True), [ORACLE[name]["ep"]["8"]])
    ]
    found["two pipeline stages"] = [
        one for name in STAGED for one in off(name, Sharding(pipeline=2), ORACLE[name]["pp"])
    ]
    return found


def _held_row(name: str, judged: tuple[Judged, ...]) -> str:
    by_laboratory: dict[str, list[float]] = {}
    for one in judged:
        by_laboratory.setdefault(one.log.laboratory, []).append(one.error)
    laboratories = [median(errors) for errors in by_laboratory.values()]
    held = sum(one.holds for one in judged)
    optimistic = sum(one.foretold - one.error > one.logged for one in judged)
    wrong = sum(one.wrong for one in judged)
    return (
        f"| {name} | {len(judged)} | {held} | {optimistic} | {wrong} | "
        f"{median(abs(one.foretold - one.logged) for one in judged):.2f} GiB | "
        f"{median(one.error for one in judged):.2f} GiB | {median(laboratories):.2f} GiB | "
        f"{max(one.error for one in judged):.2f} GiB |"
    )


def _held_out() -> list[str]:
    """Return the judgement of starts that no range was fitted to."""
    judged = [held_out(way) for way in WAYS]
    stated = [median(one.error for one in each) for each in judged]
    before = _BEFORE.format(least=min(stated), most=max(stated), share=AT_ONCE)
    return [
        "",
        "## Held out",
        _HELD_OUT,
        "| left out | starts | in the range | too optimistic | certain and wrong | median off | "
        "median stated error | of laboratories' medians | largest |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_held_row(f"each {way} in turn", held_out(way)) for way in WAYS),
        _held_row("those of 2026-11-25", newer()),
        before,
    ]


def report() -> str:
    """Return docs/measured/sizing-accuracy.md."""
    releases = [log.vllm for log in logs()]
    first, last = (".".join(map(str, one[:2])) for one in (min(releases), max(releases)))
    weights, tokens, memory = weight_errors(), token_errors(), memory_errors()
    inside = [
        log
        for log, error in memory.items()
        if abs(error) <= sized(log).estimate_error_bytes_per_gpu / GIB
    ]
    lines = [
        _HEAD.format(
            logs=len(logs()),
            models=len({log.record["model"] for log in logs()}),
            first=first,
            last=last,
        ),
        "## Weights",
        *_table("weights", weights, 2, " %"),
        "",
        "## Cache",
        "",
        (
            "The table shows how far the logged number of tokens is outside the range that "
            "follows from the\n"
            "printed memory. 0 means that it is inside the range."
        ),
        *_table("tokens", tokens, 0.1, " %"),
        "",
        f"vLLM refused {len(refusal_errors())} starts and logged an estimated length; "
        f"{sum(not error for error in refusal_errors().values())} of gpufleet's estimates are "
        "exact.",
        "",
        "## Whole chain",
        "",
        f"In {len(inside)} of {len(memory)} starts, the cache has the predicted "
        "memory, within the stated error. If a start\n"
        "succeeded, gpufleet never predicted that it fails with certainty. If vLLM "
        "refused a start, gpufleet\n"
        "never predicted that it fits.",
        *_table("cache memory", memory, 0.5, " GiB"),
        "",
        "The ten starts with the largest errors:",
        "",
        "| start | predicted | logged | stated error |",
        "|---|---|---|---|",
    ]
    for log in sorted(memory, key=lambda log: -abs(memory[log]))[:10]:
        figures = sized(log)
        lines.append(
            f"| {log} | {figures.kv_cache_bytes_per_gpu / GIB:.2f} GiB | "
            f"{min(log.available_gib or []):.2f} GiB | "
            f"{figures.estimate_error_bytes_per_gpu / GIB:.2f} GiB |"
        )
    lines += _held_out()
    classes = class_errors()
    lines += [
        "",
        "## Beside vLLM's own classes",
        "",
        "The published logs are only of the most-served models. To test more models,",
        "`tests/data/models_oracle.py` built the classes of vLLM 0.32.0 without memory for their",
        "tensors, and added up the tensors of each rank. `test_published_sizes.py` has the reason",
        "for each difference above 0.1 %. The predicted cache of each layer is exactly, to the",
        "byte, the one that its class requests.",
        "",
        "| ranks | compared | median | 90 % below | worst | within 2 % |",
        "|---|---|---|---|---|---|",
        *(_row(name, errors, 2, " %") for name, errors in classes.items()),
    ]
    return "\n".join(lines) + "\n" + _FOOT


if __name__ == "__main__":
    print(report(), end="")
