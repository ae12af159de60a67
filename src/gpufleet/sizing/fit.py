"""
Compute whether a model fits, and its KV cache in tokens: vLLM's start-up arithmetic. Pure.

vLLM gives the KV cache the rest of its budget on the smallest rank:

    utilization x total - weights - activation peak - non-torch [- CUDA graphs]

and refuses to start if one request of `--max-model-len` does not fit into it. Weights and cache are
computed from the model's config. The other terms are estimates, each with its own error
(`sizing/startup_memory.py`). If the result is closer to the limit than these errors, the verdict is
"near the edge", and the model does not count as fitting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from gpufleet.sizing import kv_bytes, kv_cache
from gpufleet.sizing.architectures.description import Description
from gpufleet.sizing.architectures.max_length import text_part
from gpufleet.sizing.dummy_run import GIB
from gpufleet.sizing.fit_suggestions import SmallCache, explain, gib, round_down, suggest
from gpufleet.sizing.launch_rules.rules import Choice, refusals
from gpufleet.sizing.media_items import is_item_unknown, whole_item_tokens, with_raised_default
from gpufleet.sizing.not_counted import counted_options, not_counted
from gpufleet.sizing.options import AUTO_LENGTH, NEWEST, Confidence, Options, Sizing, check_options
from gpufleet.sizing.served_parts import as_served, is_text_only
from gpufleet.sizing.stage_memory import (
    StageMemory,
    counted_draft,
    requested_length,
    resolve_defaults,
    resolve_dtype,
    resolve_quantization,
    sharding,
    stage_memory,
)
from gpufleet.sizing.startup_memory import CONTEXT, Defaults
from gpufleet.sizing.weights import weight_bytes

_WHOLE_REQUEST = 0.99
"""
If the cache holds less than this share of one request, the request does not fit. The share is below
1 because the blocks that vLLM reserves for itself may reduce the result slightly.
"""


def size(description: Description, options: Options) -> Sizing:
    """
    Estimate a model's memory on one GPU with `options`, and whether the model starts.

    `reasons` of the result also lists vLLM's refusals that do not depend on memory, and the
    features whose memory is unknown. In both cases `fits` is False. If the memory of a feature is
    unknown, `confidence` is "unknown". Raises `FleetError` if the release is older than the V1
    engine, or if a dtype or quantization is unknown.
    """
    description = as_served(description, options)
    options = with_raised_default(description, options)
    found, too_small = _judge(description, options)
    smallest = smallest_gpus(description, counted_options(description, options))
    remedy = ""
    if too_small:

        def starts(changed: Options) -> bool:
            known = counted_options(description, changed)
            return not _refusals(description, changed) and _sizing_of(description, known).fits

        remedy = suggest(options, found, smallest, starts)
    return replace(found, smallest_gpus=smallest, remedy=remedy)


def smallest_gpus(description: Description, options: Options) -> int | None:
    """
    Return the minimum number of GPUs of a replica, or None if 64 are too few.

    Only powers of two are tried. GPUs are used for tensor parallelism up to 8, and then for
    pipeline stages. The other options are not changed.
    """
    return _smallest(description, replace(options, tensor_parallel=1, pipeline_parallel=1))


@lru_cache(maxsize=4096)
def _smallest(description: Description, options: Options) -> int | None:
    whole = _sizing_of(description, options).weights_bytes_per_gpu
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        if whole / gpus > options.gpu_memory_gib * GIB:
            continue  # the weights alone do not fit; each GPU needs at least its share of them
        divided = (
            replace(options, tensor_parallel=tensor, pipeline_parallel=gpus // tensor)
            for tensor in (8, 4, 2, 1)
            if 1 <= gpus // tensor <= min(8, len(description.architecture.layers))
        )
        allowed = [each for each in divided if not _refusals(description, each)]
        if any(_sizing_of(description, each).fits for each in allowed):
            return gpus * options.data_parallel
    return None


def _sizing_of(description: Description, options: Options) -> Sizing:
    return _judge(description, options)[0]


@dataclass(frozen=True)
class _Estimate:
    """The memory of the pipeline stages, and the KV cache that vLLM creates in it."""

    chosen: Defaults
    length: int
    """Value of `--max-model-len`. With `auto`, it is the longest length that fits."""
    stages: list[StageMemory]
    """The stages that have a cache. If no stage has one, all stages."""
    heaviest: int
    """Bytes of weights on the largest rank."""
    layout: kv_bytes.Layout
    largest: int
    """The longest `--max-model-len` that fits."""
    report: kv_cache.CacheReport
    worst: kv_cache.CacheReport
    """The report if all estimates are too low by their errors."""
    best: kv_cache.CacheReport
    """The report if all estimates are too high by their errors."""

    @property
    def tightest(self) -> StageMemory:
        """Return the stage with the least memory for the cache."""
        return min(self.stages, key=lambda stage: stage.available)

    @property
    def available(self) -> list[int]:
        """Return the bytes for the cache on each stage."""
        return [max(0, stage.available) for stage in self.stages]


def _estimate(description: Description, options: Options) -> _Estimate:
    """
    Return each stage's memory and KV cache, with the worst and the best case of the estimates.
    """
    longest = description.architecture.default_length(options.vllm)
    length = requested_length(description, options)
    chosen = resolve_defaults(options, length)
    stages, layers = stage_memory(description, options, chosen)
    heaviest = max(stage.weights for stage in stages)
    layout = _kv_layout(description, options, chosen, layers, length)
    # A stage without a cache (Nemotron's layers without attention) needs no room for one.
    if any(layout.stages):
        stages = [stage for stage, own in zip(stages, layout.stages, strict=True) if own]
        layout = replace(layout, stages=tuple(own for own in layout.stages if own))
    available = [max(0, stage.available) for stage in stages]
    largest = kv_cache.largest_max_model_len(
        replace(layout, max_model_len=max(length, longest)), available
    )
    if options.max_model_len == AUTO_LENGTH:
        length = max(1, largest)
        layout = replace(layout, max_model_len=length)
    report = kv_cache.cache(layout, available)
    worst = best = report
    if any(stage.error for stage in stages):
        worst = kv_cache.cache(layout, [max(0, stage.available - stage.error) for stage in stages])
        best = kv_cache.cache(layout, [max(0, stage.available + stage.error) for stage in stages])
    return _Estimate(chosen, length, stages, heaviest, layout, largest, report, worst, best)


@lru_cache(maxsize=8192)
def _judge(description: Description, options: Options) -> tuple[Sizing, bool]:
    """Return the sizing, and whether the KV cache is too small or may be too small."""
    check_options(options)
    estimate = _estimate(description, options)
    refused = _refusals(description, options)
    beyond = _beyond_budget(options, estimate.chosen, estimate.stages)
    beyond = beyond or _loading_faults(description, options)
    sequences = _blocks_for_states(estimate.layout, options, estimate.chosen)
    worst, best = estimate.worst, estimate.best
    # A model without a cache needs no room for one. Its weights and start must certainly fit.
    if not any(estimate.layout.stages) and not refused:
        beyond = beyond or _no_room(options, estimate)
    certain = worst.starts and not beyond and sequences <= worst.blocks
    impossible = bool(refused) or not best.starts or sequences > best.blocks
    unknown = () if impossible else tuple(not_counted(description, options))
    confidence: Confidence = "certain" if certain or impossible else "near the edge"
    sizing = _sizing(
        options,
        estimate,
        fits=certain and not impossible and not unknown,
        confidence="unknown" if unknown else confidence,
        reasons=(*(refused or _doubts(options, estimate, beyond, sequences)), *unknown),
        notes=tuple(_notes(description, options)),
    )
    return sizing, not worst.starts and not refused


def _no_room(options: Options, estimate: _Estimate) -> list[str]:
    """
    Return why a model without a cache may not start.

    The reason is that its weights and start-up memory may need more than vLLM's budget.
    """
    stage = estimate.tightest
    if stage.available > stage.error or options.device == "cpu":
        return []
    total, share = options.gpu_memory_gib * GIB, estimate.chosen.gpu_memory_utilization
    return [
        f"of {gib(total * share)} ({share:g} x {options.gpu_memory_gib:g} GiB), the weights need "
        f"{gib(stage.weights)} and vLLM's start needs about {gib(stage.start.budget.bytes)}, so "
        "it is not certain that both fit"
    ]


def _doubts(
    options: Options,
    estimate: _Estimate,
    beyond: list[str],
    sequences: int,
) -> Iterator[str]:
    """Yield the reasons why an accepted model may not start, or may not serve its whole context."""
    report, worst = estimate.report, estimate.worst
    if not worst.starts:
        yield from explain(
            SmallCache(
                options,
                estimate.chosen,
                estimate.tightest,
                report,
                estimate.largest,
                estimate.length,
            )
        )
    yield from beyond
    if worst.starts and sequences > worst.blocks:
        yield (
            f"--max-num-seqs {sequences}: the states of each sequence need a block, but the "
            f"cache has only about {report.blocks} blocks, so vLLM refuses to capture CUDA "
            f"graphs: lower --max-num-seqs to {round_down(worst.blocks)}"
        )
    keeps = any(estimate.layout.stages)  # an encoder keeps nothing of a request
    if worst.starts and keeps and report.max_concurrency < _WHOLE_REQUEST:
        yield (
            f"the server starts, but cannot serve one request of {estimate.length:,} tokens. The "
            "own check of this vLLM release requires less memory than the request needs, and only "
            f"{report.max_concurrency:.2f} of a request fits"
        )


def _sizing(
    options: Options,
    estimate: _Estimate,
    *,
    fits: bool,
    confidence: Confidence,
    reasons: tuple[str, ...],
    notes: tuple[str, ...],
) -> Sizing:
    """Return the `Sizing` of one GPU with the values of the estimate and this verdict."""
    chosen, report, start = estimate.chosen, estimate.report, estimate.tightest.start
    keeps = any(estimate.layout.stages)
    return Sizing(
        fits=fits,
        confidence=confidence,
        reasons=reasons,
        notes=notes,
        weights_bytes_per_gpu=estimate.heaviest,
        kv_bytes_per_token_per_gpu=report.bytes_per_token_per_gpu or _window_bytes(estimate.layout),
        kv_bytes_for_max_model_len_per_gpu=report.bytes_for_max_model_len_per_gpu,
        kv_cache_bytes_per_gpu=min(estimate.available),
        kv_cache_tokens=report.tokens,
        max_concurrency=report.max_concurrency if keeps else float(chosen.max_num_seqs),
        largest_max_model_len=estimate.largest,
        smallest_gpus=None,
        activation_bytes_per_gpu=start.activation.bytes,
        non_torch_bytes_per_gpu=start.non_torch.bytes,
        cuda_graph_bytes_per_gpu=start.cuda_graphs.bytes,
        cuda_graphs_in_budget=start.graphs_in_budget,
        estimate_error_bytes_per_gpu=estimate.tightest.error,
        max_model_len=estimate.length,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        gpu_memory_utilization=chosen.gpu_memory_utilization,
        block_size_tokens=report.block_size,
        vllm=options.vllm,
    )


def _kv_layout(
    description: Description,
    options: Options,
    chosen: Defaults,
    layers: list[range],
    length: int,
) -> kv_bytes.Layout:
    architecture = description.architecture
    caches = list(kv_bytes.caches(architecture, layers))
    if draft := counted_draft(description, options):
        whole = range(len(draft.architecture.layers))
        caches[-1] += kv_bytes.caches(draft.architecture, [whole])[0]
    elif options.speculative_tokens:
        caches[-1] += kv_bytes.draft_caches(architecture)
    return kv_bytes.Layout(
        stages=tuple(caches),
        vllm=options.vllm,
        max_model_len=length,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        dtype=resolve_dtype(description, options),
        kv_dtype=kv_bytes.kv_dtype(
            description.config or {},
            options.kv_cache_dtype,
            options.vllm,
            options.compute_capability,
        ),
        tensor=options.tensor_parallel,
        decode_context_parallel=options.decode_context_parallel,
        block_size=options.block_size,
        prefix_caching=options.prefix_caching,
        speculative_tokens=options.speculative_tokens,
        hybrid_manager=options.hybrid_manager,
        state_chunk=_state_chunk(description),
        compute_capability=options.compute_capability,
        device=options.device,
    )


def _window_bytes(layout: kv_bytes.Layout) -> int:
    """
    Return the bytes of one token inside the window, for a model with only sliding windows.
    """
    return max(
        sum(
            page.bytes // page.block
            for page in kv_bytes.pages(layout, stage)
            if page.kind is not kv_bytes.Kind.STATE
        )
        for stage in layout.stages
    )


def _state_chunk(description: Description) -> int:
    """
    Return Mamba's chunk size from the config, under any of its names, or 256 if it is missing.
    """
    text = text_part(description.config) if description.config else {}
    for key in ("mamba_chunk_size", "chunk_size"):
        if isinstance(found := text.get(key), int):
            return found
    return 256


def _refusals(description: Description, options: Options) -> tuple[str, ...]:
    """Return vLLM's refusals that do not depend on memory."""
    chosen = resolve_defaults(options, requested_length(description, options))
    choice = Choice(
        tensor=options.tensor_parallel,
        pipeline=options.pipeline_parallel,
        data=options.data_parallel,
        expert=options.expert_parallel,
        redundant_experts=options.redundant_experts,
        decode_context=options.decode_context_parallel,
        max_model_len=None if options.max_model_len == AUTO_LENGTH else options.max_model_len,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        quantization=options.quantization,
        lora_rank=options.lora.max_rank if options.lora else None,
        # If only one of the two flags is given, vLLM compares it with the default of the other.
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        whole_item=whole_item_tokens(description, options),
        draft_vocabulary=_draft_vocabulary(description, options),
    )
    found = refusals(
        description.architecture,
        description.quantization,
        choice,
        options.compute_capability if options.device == "cuda" else None,
        options.vllm,
    )
    return tuple(refused.sentence for refused in found)


_NAMES_OF_DRAFTS = ("eagle", "dflash", "dspark")
"""
If `method` is missing and the draft model's name has one of these words, vLLM derives the method
from the word.
"""


def _draft_vocabulary(description: Description, options: Options) -> int | None:
    """Return the draft model's vocabulary size if it must equal the served model's, else None."""
    draft = counted_draft(description, options)
    if draft is None or options.mixed_vocabularies:
        return None
    name = (options.draft_model or "").lower()
    if options.speculative_method is None and any(word in name for word in _NAMES_OF_DRAFTS):
        return None
    return draft.architecture.vocab_size


def _beyond_budget(options: Options, chosen: Defaults, stages: list[StageMemory]) -> list[str]:
    """Return sentences on failures that are possible because of memory outside vLLM's budget."""
    if options.device == "cpu":
        return []
    total = options.gpu_memory_gib * options.gpu_share * GIB
    of = "" if options.gpu_share == 1 else f", {options.gpu_share:g} of the GPU"
    worst = max(stages, key=lambda stage: stage.weights + stage.start.budget.bytes)
    start = worst.start
    graphs = start.cuda_graphs
    if options.kv_cache_memory_bytes is not None:
        estimate = start.activation + start.non_torch + graphs
        given = worst.weights + options.kv_cache_memory_bytes + CONTEXT
        taken = given + estimate.bytes
        if given + estimate.high > total:
            return [
                "--kv-cache-memory-bytes sets the size of the KV cache, and vLLM does not check "
                f"the rest of the memory. With this value, the model needs about {gib(taken)} of "
                f"{gib(total)}{of}, and may not fit"
            ]
        return []
    left = total - options.gpu_memory_gib * GIB * chosen.gpu_memory_utilization
    if left < CONTEXT:
        return [
            f"--gpu-memory-utilization {chosen.gpu_memory_utilization:g} leaves {gib(left)} "
            f"outside vLLM's budget, but about {gib(CONTEXT)} are used there before vLLM "
            "measures the free memory. vLLM refuses to start if less than its budget is free"
        ]
    if not start.graphs_in_budget and left < CONTEXT + graphs.bytes:
        share = f"--gpu-memory-utilization {chosen.gpu_memory_utilization:g}"
        return [
            f"this release stores the CUDA graphs, about {gib(graphs.bytes)}, outside its "
            f"budget, but {share} leaves only {gib(left)} there{of}. vLLM may run out of memory "
            "while it captures the graphs"
        ]
    return []


_STATES_CHECKED = (0, 20)
"""
Since this release, vLLM refuses to start if the cache has too few blocks for the states. Earlier
releases capture fewer CUDA graphs instead.
"""


def _blocks_for_states(layout: kv_bytes.Layout, options: Options, chosen: Defaults) -> int:
    """
    Return how many sequences need a block each before vLLM captures CUDA graphs, or 0.

    Source: resolve_cudagraph_mode_and_sizes in vllm/config/compilation.py of 0.21.0 to 0.33.0.
    """
    if options.enforce_eager or options.device == "cpu" or options.vllm < _STATES_CHECKED:
        return 0
    stateful = any(
        page.kind is kv_bytes.Kind.STATE
        for stage in layout.stages
        for page in kv_bytes.pages(layout, stage)
    )
    return chosen.max_num_seqs if stateful else 0


_LAYERWISE = (0, 16)
"""
Since this release, each layer is quantized while it is loaded (layers/quantization/fp8.py). Earlier
releases first load all layers onto the GPU.
"""


def _loading_faults(description: Description, options: Options) -> list[str]:
    """Return why loading fails, if the weights need too much memory before they are quantized."""
    quantization = resolve_quantization(description, options)
    if quantization is None or not quantization.online or options.vllm >= _LAYERWISE:
        return []
    loaded = weight_bytes(
        description.architecture,
        None,
        sharding(options),
        dtype=resolve_dtype(description, options),
        vllm=options.vllm,
    )
    most = max(stage.bytes for stage in loaded)
    if most + CONTEXT <= options.gpu_memory_gib * GIB:
        return []
    return [
        f"--quantization {options.quantization}: this release loads all weights before it "
        f"quantizes them. They need {gib(most)}, but a GPU has {options.gpu_memory_gib:g} GiB: "
        "use vLLM 0.16 or newer, or a quantized checkpoint"
    ]


_NATIVE = {"fp8": ("FP8", (8, 9)), "nvfp4": ("FP4", (10, 0))}
"""
Number formats, each with its name and the lowest compute capability of GPUs that can multiply such
numbers. On older GPUs, vLLM's Marlin kernels convert the weights to 16 bits when they read them
(marlin_utils_fp8.py and kernels/linear/nvfp4/marlin.py in model_executor of 0.32.0).
"""


def _weight_only(description: Description, options: Options) -> Iterator[str]:
    """Yield a note if the weights' quantization saves memory on this GPU, but no compute time."""
    quantization = resolve_quantization(description, options)
    capability = options.compute_capability
    if quantization is None or capability is None or options.device == "cpu":
        return
    for name, since in (_NATIVE[kind] for kind in sorted(_NATIVE.keys() & quantization.kinds)):
        if capability >= since:
            continue
        yield (
            f"{name} weights save memory on this GPU, but no compute time. {name} arithmetic "
            f"needs a compute capability of at least {since[0]}.{since[1]}, but the GPU's is "
            f"{capability[0]}.{capability[1]}, so vLLM's Marlin kernels compute in 16 bits"
        )


def _notes(description: Description, options: Options) -> Iterator[str]:
    """Yield the notes of a sizing: sentences on parts that were only estimated or not counted."""
    yield from description.architecture.notes
    yield from description.notes
    if options.vllm > (*NEWEST, 1 << 30):
        release = ".".join(map(str, options.vllm))
        yield (
            f"vLLM {release} is newer than the releases that gpufleet knows, so the estimate is "
            f"that of {'.'.join(map(str, NEWEST))} with twice the error"
        )
    if options.pooling or description.architecture.pooling:
        yield (
            "--runner pooling: the memory of the pooler's run is not counted separately from "
            "that of the forward pass"
        )
    if is_text_only(description, options):
        release = ".".join(map(str, options.vllm))
        yield (
            f"vLLM {release} may not load the tower (the encoder of images or sound), but the "
            "estimate includes it, because only from 0.17 on do all classes leave it out"
        )
    if is_item_unknown(description, options):
        yield (
            "--disable-chunked-mm-input: vLLM refuses to start if the largest image or clip has "
            "more tokens than --max-num-batched-tokens, and gpufleet does not know the number of "
            "tokens of that item. Set --max-num-batched-tokens above the number in the model's "
            "card, or remove the flag"
        )
    yield from _weight_only(description, options)
    if options.cpu_offload_gib:
        yield (
            f"--cpu-offload-gb {options.cpu_offload_gib:g}: the process of each GPU needs this "
            "many GiB of the node's memory, and each step reads them over PCIe"
        )
