"""
Does a model fit, and how many tokens does its KV cache hold: vLLM's start-up arithmetic.  Pure.

vLLM gives the KV cache what is left of its budget on the smallest rank:

    utilization x total - weights - activation peak - non-torch [- CUDA graphs]

and refuses to start where one request of `--max-model-len` does not fit into that. Weights and
cache follow from the model's config; the other terms are estimates with an error of their own
(`sizing/startup_memory.py`). A verdict within that error of the limit is "near the edge" and never
a fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from gpufleet.errors import FleetError
from gpufleet.sizing import kv_bytes, kv_cache
from gpufleet.sizing.architectures.components import LatentCache
from gpufleet.sizing.architectures.description import Description
from gpufleet.sizing.architectures.max_length import text_part
from gpufleet.sizing.architectures.quantization import Quantization, canonical, online
from gpufleet.sizing.launch_rules.rules import Choice, refusals
from gpufleet.sizing.startup_memory import (
    GIB,
    Defaults,
    DummyRun,
    StartMemory,
    defaults,
    start_memory,
)
from gpufleet.sizing.weights import SIZES, Sharding, weight_bytes

FEW_SEQUENCES = 256
"""What is proposed where the dummy run of many sequences takes the room; vLLM's default on small
GPUs."""

Confidence: TypeAlias = Literal["certain", "near the edge"]

_GATHER = {None, "allgather_reducescatter", "naive", "pplx"}
"""--all2all-backend: the default, and the two that newer releases take for it
(ParallelConfig.__post_init__ in vllm/config/parallel.py of 0.33.0)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the model would be served: vLLM's flags by their names, and the GPU."""

    gpu_memory_gib: float
    """The total that CUDA reports of one GPU in GiB, not its nominal size; of the node's memory
    with `device` "cpu"."""
    vllm: tuple[int, ...]
    """The release, such as (0, 19, 0)."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    decode_context_parallel: int = 1
    max_model_len: int | None = None
    """None: what the model's config says."""
    gpu_memory_utilization: float | None = None
    """None: the release's default."""
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    """None: the checkpoint's own."""
    dtype: str = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    """Given: the cache is exactly this, and no estimate is made."""
    block_size: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool | None = None
    speculative_tokens: int = 0
    hybrid_manager: bool = True
    compute_capability: tuple[int, int] | None = None
    """(9, 0) is Hopper; None: unknown, and what depends on it is not judged."""
    throughput: bool = False
    """`--performance-mode throughput`, which doubles the defaults of sequences and
    batched tokens."""
    all2all_backend: str | None = None
    """None: the release's default, by which every GPU gets the tokens of all engines."""
    gpu: str | None = None
    """NVML's name of it, which some releases look at for their defaults; None: not known."""
    device: Literal["cuda", "cpu"] = "cuda"


@dataclass(frozen=True)
class Sizing:
    """What one GPU of the replica holds, and the verdict. Bytes are of the smallest rank."""

    fits: bool
    """Starts, beyond the estimates' error, and nothing in vLLM refuses it."""
    confidence: Confidence
    reasons: tuple[str, ...]
    """Sentences: why it does not fit, and what was not counted exactly."""
    weights_bytes_per_gpu: int
    """Of the largest rank."""
    kv_bytes_per_token_per_gpu: int
    """What one more token of a long context takes, on the largest stage: windows and states have
    stopped growing. Where all layers have windows: of a token inside of them."""
    kv_bytes_for_max_model_len_per_gpu: int
    """Of one request of `max_model_len`, with windows and states."""
    kv_cache_bytes_per_gpu: int
    """What is left for the KV cache; 0 where the weights leave nothing."""
    kv_cache_tokens: int
    """As the release logs it at start."""
    max_concurrency: float
    """Requests of `max_model_len` that fit at once, as the release logs it."""
    largest_max_model_len: int
    """The longest `--max-model-len` that starts; 0: none."""
    smallest_gpus: int | None
    """GPUs of this kind that the model needs with these options; None: no number up to 64 does."""
    activation_bytes_per_gpu: int
    non_torch_bytes_per_gpu: int
    cuda_graph_bytes_per_gpu: int
    """Estimate; whether it is part of the budget, `cuda_graphs_in_budget` says."""
    estimate_error_bytes_per_gpu: int
    """How far the three estimates together may be off."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    block_size_tokens: int
    vllm: tuple[int, ...]
    cuda_graphs_in_budget: bool = True
    """Or on top of it: up to 0.19, and with the second model runner up to 0.28."""
    remedy: str = ""
    """Which single changes are certain to make room; "" where memory is not what is missing."""

    def as_json(self) -> dict[str, Any]:
        """Return it as `gpufleet size --json` prints it: units in the names."""
        document = asdict(self)
        document["reasons"] = [*self.reasons, *([self.remedy] if self.remedy else [])]
        del document["remedy"]
        document["vllm"] = ".".join(map(str, self.vllm))
        return document


FIRST = (0, 8)
"""The oldest release that is sized: the first whose engine is V1 by default."""
NEWEST = (0, 33)
"""The newest whose arithmetic was read."""

CONTEXT = GIB // 2
"""What a process has on the GPU before it is asked for anything: free memory at start was 0.45 to
0.6 GiB below the total in most start-up logs."""

MOST_GIB = 1 << 20
"""Of one GPU, or of a node with `device` "cpu": a slip of the pen must not be reckoned with."""
MOST_GPUS = 10_000
"""In one direction of a division; the same."""

_WHOLE_REQUEST = 0.99
"""Below, a request does not fit. Not 1: what the pool sets aside may round it down a little."""

AUTO_LENGTH = -1
"""`--max-model-len auto`: as long as fits."""


def size(description: Description, options: Options) -> Sizing:
    """
    Return what `description` takes on one GPU with `options`, and whether it starts.

    What vLLM refuses whatever the memory stands in `reasons`. Raises `FleetError` where the release
    is older than V1's engine, or a dtype or quantization is unknown.
    """
    found, too_small = _judged(description, options)
    smallest = smallest_gpus(description, options)
    remedy = _remedy(description, options, found, smallest) if too_small else ""
    return replace(found, smallest_gpus=smallest, remedy=remedy)


def smallest_gpus(description: Description, options: Options) -> int | None:
    """
    Return how many GPUs a replica needs at least, or None if 64 are too few.

    Looked for in powers of two, tensor parallelism of up to 8 before pipeline stages. The other
    options stay.
    """
    return _smallest(description, replace(options, tensor_parallel=1, pipeline_parallel=1))


@lru_cache(maxsize=4096)
def _smallest(description: Description, options: Options) -> int | None:
    whole = _sized(description, options).weights_bytes_per_gpu
    # Wider groups have the more room; but a latent cache is on every rank, whatever their number.
    latent = any(
        isinstance(cache, LatentCache)
        for layer in description.architecture.layers
        for cache in layer.caches
    )
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        if whole / gpus > options.gpu_memory_gib * GIB:
            continue  # not even the weights, and dividing them never takes less than a share
        divided = (
            replace(options, tensor_parallel=tensor, pipeline_parallel=gpus // tensor)
            for tensor in (8, 4, 2, 1)
            if 1 <= gpus // tensor <= min(8, len(description.architecture.layers))
        )
        allowed = [each for each in divided if not _refused(description, each)]
        if any(_sized(description, each).fits for each in allowed[: None if latent else 1]):
            return gpus * options.data_parallel
    return None


@dataclass(frozen=True)
class _Stage:
    """One pipeline stage's smallest rank."""

    weights: int
    start: StartMemory
    available: int
    """For the KV cache; negative where the weights leave nothing."""
    error: int
    """How far `available` may be off."""


def _sized(description: Description, options: Options) -> Sizing:
    return _judged(description, options)[0]


@lru_cache(maxsize=8192)
def _judged(description: Description, options: Options) -> tuple[Sizing, bool]:
    """Return the sizing, and whether the cache is too small, or may be."""
    _check(options)
    architecture = description.architecture
    longest = architecture.untold_length(options.vllm)
    asked = options.max_model_len
    length = _length(description, options)
    chosen = _defaults(options, length)
    stages, layers = _stages(description, options, chosen)
    heaviest = max(stage.weights for stage in stages)
    layout = _layout(description, options, chosen, layers, length)
    # A stage without a cache (Nemotron's layers without attention) needs no room for one.
    if any(layout.stages):
        stages = [stage for stage, own in zip(stages, layout.stages, strict=True) if own]
        layout = replace(layout, stages=tuple(own for own in layout.stages if own))
    available = [max(0, stage.available) for stage in stages]
    largest = kv_cache.largest_max_model_len(
        replace(layout, max_model_len=max(length, longest)), available
    )
    if asked == AUTO_LENGTH:
        length = max(1, largest)
        layout = replace(layout, max_model_len=length)
    report = kv_cache.cache(layout, available)
    refused = _refused(description, options)
    worst = best = report
    if any(stage.error for stage in stages):
        worst = kv_cache.cache(layout, [max(0, stage.available - stage.error) for stage in stages])
        best = kv_cache.cache(layout, [max(0, stage.available + stage.error) for stage in stages])
    beyond = _beyond_budget(options, chosen, stages) or _while_loading(description, options)
    sequences = _blocks_for_states(layout, options, chosen)
    certain = worst.starts and not beyond and sequences <= worst.blocks
    impossible = bool(refused) or not best.starts or sequences > best.blocks
    tightest = min(stages, key=lambda stage: stage.available)
    reasons = list(refused)
    too_small = not worst.starts and not refused
    if too_small:
        reasons += _why(_Case(description, options, chosen, tightest, report, largest, length))
    if not refused:
        reasons += beyond
        if worst.starts and sequences > worst.blocks:
            reasons.append(
                f"--max-num-seqs {sequences}: the states of each sequence need a block, and there "
                f"are about {report.blocks}: vLLM refuses to capture CUDA graphs; lower it to "
                f"{_fewer(worst.blocks)}"
            )
    if worst.starts and not refused and report.max_concurrency < _WHOLE_REQUEST:
        reasons.append(
            f"this release starts and cannot serve one request of {length:,} tokens: its check "
            f"asks for less than the request takes, and {report.max_concurrency:.2f} of one fit"
        )
    reasons += _notes(description, options)
    sizing = Sizing(
        fits=certain and not impossible,
        confidence="certain" if certain or impossible else "near the edge",
        reasons=tuple(reasons),
        weights_bytes_per_gpu=heaviest,
        kv_bytes_per_token_per_gpu=report.bytes_per_token_per_gpu or _window_bytes(layout),
        kv_bytes_for_max_model_len_per_gpu=report.bytes_for_max_model_len_per_gpu,
        kv_cache_bytes_per_gpu=min(available),
        kv_cache_tokens=report.tokens,
        max_concurrency=report.max_concurrency,
        largest_max_model_len=largest,
        smallest_gpus=None,
        activation_bytes_per_gpu=tightest.start.activation.bytes,
        non_torch_bytes_per_gpu=tightest.start.non_torch.bytes,
        cuda_graph_bytes_per_gpu=tightest.start.cuda_graphs.bytes,
        cuda_graphs_in_budget=tightest.start.graphs_in_budget,
        estimate_error_bytes_per_gpu=tightest.error,
        max_model_len=length,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        gpu_memory_utilization=chosen.gpu_memory_utilization,
        block_size_tokens=report.block_size,
        vllm=options.vllm,
    )
    return sizing, too_small


# -- what there is ---------------------------------------------------------------------------------


def _check(options: Options) -> None:
    problems = []
    if options.vllm < FIRST:
        release = ".".join(map(str, options.vllm))
        problems.append(
            f"--vllm {release}: releases before 0.8 size their cache in another way (the V0 "
            "engine) and are not known here; give 0.8.0 or newer"
        )
    if options.dtype not in ("auto", "half", "float16", "bfloat16", "float", "float32"):
        problems.append(
            f"--dtype {options.dtype}: vLLM knows auto, half, float16, bfloat16, float and float32"
        )
    if not 0 < options.gpu_memory_gib <= MOST_GIB:
        problems.append(
            f"--gpu-memory-gib {options.gpu_memory_gib:g}: has to be more than 0, and not more "
            f"than {MOST_GIB:,}"
        )
    groups = {
        "--tensor-parallel-size": options.tensor_parallel,
        "--pipeline-parallel-size": options.pipeline_parallel,
        "--data-parallel-size": options.data_parallel,
        "--decode-context-parallel-size": options.decode_context_parallel,
    }
    problems += (
        f"{flag} {count}: has to be at least 1, and not more than {MOST_GPUS:,}"
        for flag, count in groups.items()
        if not 1 <= count <= MOST_GPUS
    )
    if options.max_model_len is not None and not (
        options.max_model_len > 0 or options.max_model_len == AUTO_LENGTH
    ):
        problems.append(f"--max-model-len {options.max_model_len}: has to be more than 0, or auto")
    share = options.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        problems.append(f"--gpu-memory-utilization {share:g}: has to be above 0 and at most 1")
    if problems:
        raise FleetError(*problems)


def _length(description: Description, options: Options) -> int:
    """Return the length that is asked for, or that the release takes; for `auto` the latter."""
    asked = options.max_model_len
    if asked is None or asked == AUTO_LENGTH:
        return description.architecture.untold_length(options.vllm)
    return asked


def _defaults(options: Options, length: int) -> Defaults:
    return defaults(
        vllm=options.vllm,
        gpu_memory_gib=options.gpu_memory_gib,
        max_model_len=length,
        world=options.tensor_parallel * options.pipeline_parallel,
        compute_capability=options.compute_capability,
        gpu=options.gpu,
        device=options.device,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        throughput=options.throughput,
    )


def _dtype(description: Description, options: Options) -> str:
    """
    Return the model's dtype as vLLM resolves it: no float32 and, before Ampere, no bfloat16.

    Source: _resolve_auto_dtype in vllm/config/model.py.
    """
    dtype = {"half": "float16", "float": "float32"}.get(options.dtype, options.dtype)
    if dtype != "auto":
        return dtype
    dtype = description.architecture.dtype
    capability = options.compute_capability
    if dtype == "float32":
        dtype = "bfloat16" if options.vllm >= (0, 9, 1) else "float16"
    if dtype == "bfloat16" and capability is not None and capability < (8, 0):
        return "float16"
    return dtype


def _quantization(description: Description, options: Options) -> Quantization | None:
    found, asked = description.quantization, options.quantization
    if asked is None:
        return found
    if found is None:
        by_vllm = online(asked, options.vllm)
        if by_vllm is None:
            raise FleetError(
                f"--quantization {asked}: the checkpoint is not quantized, and vLLM "
                f"{'.'.join(map(str, options.vllm))} does not quantize by that name when it loads; "
                "leave the flag out, or take a checkpoint that is quantized"
            )
        return by_vllm
    # A kernel's name beside the method's ("awq_marlin") or the method itself.
    if canonical(asked) != found.method and asked != "moe_wna16":
        raise FleetError(
            f"--quantization {asked}: the checkpoint's own config says {found.method}, and vLLM "
            "refuses another; leave the flag out"
        )
    return found


def _stages(
    description: Description, options: Options, chosen: Defaults
) -> tuple[list[_Stage], list[range]]:
    """Return what each pipeline stage has, and its layers."""
    architecture = description.architecture
    dtype = _dtype(description, options)
    quantization = _quantization(description, options)
    weighed = weight_bytes(
        architecture,
        quantization,
        _sharding(options),
        dtype=dtype,
        stored=description.stored or description.stored_bytes,
        vllm=options.vllm,
        compute_capability=options.compute_capability,
    )
    if not all(stage.layers for stage in weighed):
        raise FleetError(
            f"--pipeline-parallel-size {options.pipeline_parallel}: the model has "
            f"{len(architecture.layers)} layers, and every stage needs one; lower it"
        )
    # Without experts, engines of data parallelism know nothing of each other's memory.
    most = max(len(stage.layers) for stage in weighed)
    run = DummyRun(
        vllm=options.vllm,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        tensor=options.tensor_parallel,
        data=options.data_parallel if architecture.experts else 1,
        expert=options.expert_parallel,
        dispatches=options.all2all_backend not in _GATHER,
        layers=most,
        dtype_bytes=SIZES[dtype],
        mxfp4=quantization is not None and quantization.method == "mxfp4",
        enforce_eager=options.enforce_eager,
        compute_capability=options.compute_capability,
    )
    inner = start_memory(architecture, description.config, replace(run, last_stage=False))
    last = start_memory(architecture, description.config, run)
    inexact = _inexact(description, quantization)
    stages = []
    for number, stage in enumerate(weighed):
        start = last if number == len(weighed) - 1 else inner
        weights = stage.bytes
        if start is last:
            weights += _draft_bytes(description, options, dtype)
        error = math.hypot(start.error, inexact * weights)
        stages.append(_stage(options, chosen, weights, start, int(error)))
    return stages, [stage.layers for stage in weighed]


def _stage(
    options: Options, chosen: Defaults, weights: int, start: StartMemory, error: int
) -> _Stage:
    total = options.gpu_memory_gib * GIB
    if options.kv_cache_memory_bytes is not None:
        return _Stage(weights, start, options.kv_cache_memory_bytes, 0)
    if options.device == "cpu":
        return _Stage(weights, start, *_cpu_space(options, chosen, weights, total))
    if options.vllm > (*NEWEST, 1 << 30):
        error *= 2
    budget = math.ceil(total * chosen.gpu_memory_utilization)
    return _Stage(weights, start, budget - weights - start.in_budget, error)


_CPU_PROCESS = int(1.2 * GIB)
"""A worker's resident memory without weights: 0.43 to 0.54 GiB before torch compiles, 1.6 with a
model compiled (measured with 0.32.0 on CPU)."""


def _cpu_space(options: Options, chosen: Defaults, weights: int, total: float) -> tuple[int, int]:
    """
    Return the KV cache's bytes on a CPU node that is told none, and their error.

    4 GiB up to 0.11, half of the memory up to 0.20 (platforms/cpu.py), since 0.21 the utilization's
    share without what the worker has in use (v1/worker/cpu_worker.py).
    """
    if options.vllm < (0, 12):
        return 4 * GIB, 0
    if options.vllm < (0, 21):
        return int(total / 2), 0
    budget = math.ceil(total * chosen.gpu_memory_utilization)
    return budget - weights - _CPU_PROCESS, int(0.6 * GIB)


def _sharding(options: Options) -> Sharding:
    return Sharding(
        options.tensor_parallel,
        options.pipeline_parallel,
        options.data_parallel,
        options.expert_parallel,
    )


def _draft_bytes(description: Description, options: Options, dtype: str) -> int:
    """
    Return the weights of the checkpoint's own draft layers, loaded where tokens are guessed.

    They are quantized as layers after the decoder's last one, on one stage.
    """
    architecture = description.architecture
    if not options.speculative_tokens or not architecture.draft_layers:
        return 0
    longer = replace(
        architecture, layers=architecture.layers + architecture.draft_layers, draft_layers=()
    )
    quantization = _quantization(description, options)
    sharding = replace(_sharding(options), pipeline=1)
    with_drafts, without = (
        weight_bytes(each, quantization, sharding, dtype=dtype, vllm=options.vllm)[0].bytes
        for each in (longer, architecture)
    )
    return with_drafts - without


def _layout(
    description: Description,
    options: Options,
    chosen: Defaults,
    layers: list[range],
    length: int,
) -> kv_bytes.Layout:
    architecture = description.architecture
    caches = list(kv_bytes.caches(architecture, layers))
    if options.speculative_tokens:
        caches[-1] += kv_bytes.draft_caches(architecture)
    return kv_bytes.Layout(
        stages=tuple(caches),
        vllm=options.vllm,
        max_model_len=length,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        dtype=_dtype(description, options),
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
    """Return what a token takes in a model of windows alone, as long as it is inside of them."""
    return max(
        sum(
            page.bytes // page.block
            for page in kv_bytes.pages(layout, stage)
            if page.kind is not kv_bytes.Kind.STATE
        )
        for stage in layout.stages
    )


def _state_chunk(description: Description) -> int:
    """Return Mamba's chunk: `chunk_size` under its several names, 256 where a config has none."""
    text = text_part(description.config) if description.config else {}
    for key in ("mamba_chunk_size", "chunk_size"):
        if isinstance(found := text.get(key), int):
            return found
    return 256


# -- the verdict -----------------------------------------------------------------------------------


def _refused(description: Description, options: Options) -> tuple[str, ...]:
    """Return what vLLM refuses whatever the memory."""
    chosen = _defaults(options, _length(description, options))
    choice = Choice(
        tensor=options.tensor_parallel,
        pipeline=options.pipeline_parallel,
        data=options.data_parallel,
        expert=options.expert_parallel,
        decode_context=options.decode_context_parallel,
        max_model_len=None if options.max_model_len == AUTO_LENGTH else options.max_model_len,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        quantization=options.quantization,
        # One that is given is compared with the other's default.
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
    )
    found = refusals(
        description.architecture,
        description.quantization,
        choice,
        options.compute_capability if options.device == "cuda" else None,
        options.vllm,
    )
    return tuple(refused.sentence for refused in found)


def _beyond_budget(options: Options, chosen: Defaults, stages: list[_Stage]) -> list[str]:
    """Return what may fail although the budget holds: what lies outside of it."""
    if options.device == "cpu":
        return []
    total = options.gpu_memory_gib * GIB
    worst = max(stages, key=lambda stage: stage.weights + stage.start.in_budget)
    start = worst.start
    graphs = start.cuda_graphs.bytes
    if options.kv_cache_memory_bytes is not None:
        taken = worst.weights + start.activation.bytes + start.non_torch.bytes + graphs
        taken += options.kv_cache_memory_bytes + CONTEXT
        if taken + start.error > total:
            return [
                f"--kv-cache-memory-bytes is taken without a look at the rest: with it the GPU "
                f"needs about {_gib(taken)} of {_gib(total)}, and nothing of vLLM's checks that"
            ]
        return []
    left = total * (1 - chosen.gpu_memory_utilization)
    if left < CONTEXT:
        return [
            f"--gpu-memory-utilization {chosen.gpu_memory_utilization:g} leaves {_gib(left)} for "
            f"what is on the GPU before vLLM measures, about {_gib(CONTEXT)}: vLLM refuses to "
            "start if less than its budget is free"
        ]
    if not start.graphs_in_budget and left < CONTEXT + graphs:
        return [
            f"this release takes the CUDA graphs, about {_gib(graphs)}, from outside its budget, "
            f"where --gpu-memory-utilization {chosen.gpu_memory_utilization:g} leaves "
            f"{_gib(left)}: it may run out of memory while it captures them"
        ]
    return []


_STATES_CHECKED = (0, 20)
"""Before, fewer graphs are captured instead."""


def _blocks_for_states(layout: kv_bytes.Layout, options: Options, chosen: Defaults) -> int:
    """
    Return the sequences that need a block each before vLLM captures graphs; 0: none do.

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


def _fewer(blocks: int) -> int:
    """
    Return a rounder number that is not larger.

    >>> _fewer(856), _fewer(108), _fewer(7)
    (832, 96, 7)
    """
    step = 64 if blocks >= 256 else 16 if blocks >= 16 else 1
    return blocks // step * step


_LAYERWISE = (0, 16)
"""Since then each layer is quantized as it is loaded (layers/quantization/fp8.py); before that all
are on the GPU first."""


def _while_loading(description: Description, options: Options) -> list[str]:
    """Return what loading needs more than the loaded model, if that is too much."""
    quantization = _quantization(description, options)
    if quantization is None or not quantization.online or options.vllm >= _LAYERWISE:
        return []
    loaded = weight_bytes(
        description.architecture,
        None,
        _sharding(options),
        dtype=_dtype(description, options),
        vllm=options.vllm,
    )
    most = max(stage.bytes for stage in loaded)
    if most + CONTEXT <= options.gpu_memory_gib * GIB:
        return []
    return [
        f"--quantization {options.quantization}: this release loads all of it, {_gib(most)} of a "
        f"GPU's {options.gpu_memory_gib:g} GiB, before it quantizes; take vLLM 0.16 or newer, or a "
        "checkpoint that is quantized"
    ]


@dataclass(frozen=True)
class _Case:
    """A cache that is too small, or may be, and what it was made of."""

    description: Description
    options: Options
    chosen: Defaults
    stage: _Stage
    report: kv_cache.CacheReport
    largest: int
    length: int


def _why(case: _Case) -> Iterator[str]:
    """Say why the cache is too small, or may be."""
    options, stage, report = case.options, case.stage, case.report
    given = options.kv_cache_memory_bytes is not None or options.device == "cpu"
    if given:
        left = f"the KV cache has {_gib(max(0, stage.available))}"
    else:
        share, total = case.chosen.gpu_memory_utilization, options.gpu_memory_gib
        left = (
            f"of {_gib(total * share * GIB)} ({share:g} x {total:g} GiB) the weights take "
            f"{_gib(stage.weights)} and vLLM's start about {_gib(stage.start.in_budget)}"
        )
        if stage.available <= 0:
            yield f"{left}: nothing is left for the KV cache"
            return
        left += f", which leaves {_gib(stage.available)} for the KV cache"
    needs = f"one request of {case.length:,} tokens needs {_gib(report.needed_bytes)}"
    if report.starts:
        yield (
            f"{left}, and {needs}: the estimate may be off by {_gib(stage.error)}, so it is not "
            f"certain to start"
        )
        return
    if not report.needed_bytes:  # the release cannot serve these layers together
        yield report.why
        return
    fits = "no length fits"
    if case.largest:
        fits = f"{case.largest:,} tokens fit at most"
    yield f"{left}, and {needs}: {fits}"


def _remedy(description: Description, options: Options, found: Sizing, smallest: int | None) -> str:
    """Say which single changes are certain to start, those that cost least first."""
    ways: dict[str, str] = {}
    for flag, value, changed in _changes(options, found):
        if flag in ways or _refused(description, changed):
            continue
        if _sized(description, changed).fits:
            ways[flag] = f"{flag} {value}"
    if ways:
        return f"it would start with {', or with '.join(ways.values())}"
    if smallest is not None:
        return f"it would start on {smallest} GPUs of this kind"
    return (
        "no single setting makes it start on GPUs of this kind: take GPUs with more memory, or a "
        "smaller or quantized checkpoint"
    )


def _changes(options: Options, found: Sizing) -> Iterator[tuple[str, object, Options]]:
    """Yield what an operator may change, a flag and its value, with the options that it gives."""
    # The longest that may start is at the estimates' edge: the first shorter one that is certain.
    for share in (1, 0.95, 0.8, 0.5):
        length = int(found.largest_max_model_len * share) // 16 * 16
        if 0 < length < found.max_model_len:
            yield "--max-model-len", length, replace(options, max_model_len=length)
    if found.max_num_seqs > FEW_SEQUENCES:
        yield "--max-num-seqs", FEW_SEQUENCES, replace(options, max_num_seqs=FEW_SEQUENCES)
    if options.kv_cache_dtype == "auto":
        yield "--kv-cache-dtype", "fp8", replace(options, kv_cache_dtype="fp8")
    if options.kv_cache_memory_bytes is not None:
        # Some releases keep a block for themselves.
        block = found.kv_bytes_per_token_per_gpu * found.block_size_tokens
        for more in (0, block):
            needed = found.kv_bytes_for_max_model_len_per_gpu + more
            yield "--kv-cache-memory-bytes", needed, replace(options, kv_cache_memory_bytes=needed)
    for tensor in (2, 4, 8, 16):
        if tensor > options.tensor_parallel:
            yield "--tensor-parallel-size", tensor, replace(options, tensor_parallel=tensor)


def _notes(description: Description, options: Options) -> Iterator[str]:
    """Say what was not counted exactly."""
    yield from description.architecture.notes
    yield from description.notes
    if options.vllm > (*NEWEST, 1 << 30):
        release = ".".join(map(str, options.vllm))
        yield (
            f"vLLM {release} is newer than what is known here: counted as "
            f"{'.'.join(map(str, NEWEST))}, with twice the error"
        )
    if options.speculative_tokens and not description.architecture.draft_layers:
        yield "a draft model's own weights and cache are not counted"


def _inexact(description: Description, quantization: Quantization | None) -> float:
    """
    Return by which share the weights may be off.

    Within 0.5 % of `Model loading took` in nine of ten start-up logs, quantized or not, and within
    2 % in all (docs/measured/sizing-accuracy.md).
    """
    if description.architecture.notes:
        return 0.02
    return 0.01 if quantization is not None and description.stored is None else 0.005


def _gib(count: float) -> str:
    """Say a number of bytes in GiB; in MiB where two digits of GiB would say nothing."""
    small = 0 < count < GIB / 10
    return f"{count / (1 << 20):.2f} MiB" if small else f"{count / GIB:.2f} GiB"
