"""Estimate the memory of a pipeline stage's smallest rank: weights, start-up, KV cache.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.description import Description
from gpufleet.sizing.architectures.quantization import (
    LOADS_OTHERS,
    canonical_method,
    online_methods,
    online_quantization,
)
from gpufleet.sizing.architectures.quantization_scheme import Quantization
from gpufleet.sizing.dummy_run import GIB, DummyRun
from gpufleet.sizing.lora_memory import ERROR, Lora, lora_bytes, why_not_counted
from gpufleet.sizing.options import AUTO_LENGTH, NEWEST, Options
from gpufleet.sizing.rank_weights import SIZES, Sharding
from gpufleet.sizing.startup_memory import Defaults, StartMemory, batch_defaults, start_memory
from gpufleet.sizing.startup_ranges import RANGES, Ranges
from gpufleet.sizing.weights import weight_bytes

_GATHER = {None, "allgather_reducescatter", "naive", "pplx"}
"""
Values of --all2all-backend: the default (None or its name), and two older values that newer
releases replace by the default (ParallelConfig.__post_init__ in vllm/config/parallel.py of 0.33.0).
"""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one pipeline stage's smallest rank."""

    weights: int
    start: StartMemory
    available: int
    """Bytes that are left for the KV cache; negative if the weights and the start need too much."""
    error: int
    """Maximum error of `available`, in bytes."""


def requested_length(description: Description, options: Options) -> int:
    """Return the requested length. If it is missing or `auto`, return the release's default."""
    asked = options.max_model_len
    if asked is None or asked == AUTO_LENGTH:
        return description.architecture.default_length(options.vllm)
    return asked


def resolve_defaults(options: Options, length: int) -> Defaults:
    return batch_defaults(
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


def resolve_dtype(description: Description, options: Options) -> str:
    """
    Return the dtype that vLLM uses for the model's weights.

    With `auto`, vLLM replaces float32, and on GPUs before Ampere also bfloat16.

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


def resolve_quantization(description: Description, options: Options) -> Quantization | None:
    found, asked = description.quantization, options.quantization
    if asked is None:
        return found
    if found is None:
        by_vllm = online_quantization(asked, options.vllm)
        if by_vllm is None:
            names = ", ".join(online_methods(options.vllm))
            raise FleetError(
                f"--quantization {asked}: the checkpoint is not quantized, and vLLM "
                f"{'.'.join(map(str, options.vllm))} can quantize weights while loading only "
                f"with {names}. Write one of these methods, remove the flag, or use a quantized "
                "checkpoint"
            )
        return by_vllm
    # The flag may name the method, a kernel ("marlin"), or a method and its kernel ("awq_marlin").
    method = canonical_method(asked)
    if method != found.method and not {method, found.method} & LOADS_OTHERS:
        raise FleetError(
            f"--quantization {asked}: the method in the checkpoint's own config is "
            f"{found.method}, and vLLM refuses a different one: remove the flag"
        )
    return found


def stage_memory(
    description: Description, options: Options, chosen: Defaults, ranges: Ranges = RANGES
) -> tuple[list[StageMemory], list[range]]:
    """Return the memory of each pipeline stage, and the layers of each stage."""
    architecture = description.architecture
    dtype = resolve_dtype(description, options)
    quantization = resolve_quantization(description, options)
    weighed = weight_bytes(
        architecture,
        quantization,
        sharding(options),
        dtype=dtype,
        stored=description.stored or description.stored_bytes,
        vllm=options.vllm,
        compute_capability=options.compute_capability,
    )
    if not all(stage.layers for stage in weighed):
        raise FleetError(
            f"--pipeline-parallel-size {options.pipeline_parallel}: the model has "
            f"{len(architecture.layers)} layers, but every stage needs at least one layer: lower "
            "the value"
        )
    # In a model without experts, the engines of data parallelism do not share memory.
    most = max(len(stage.layers) for stage in weighed)
    run = DummyRun(
        vllm=options.vllm,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        tensor=options.tensor_parallel,
        data=options.data_parallel if architecture.experts else 1,
        pipeline=options.pipeline_parallel,
        expert=options.expert_parallel,
        dispatches=options.all2all_backend not in _GATHER,
        layers=most,
        dtype_bytes=SIZES[dtype],
        mxfp4=quantization is not None and quantization.method == "mxfp4",
        nvfp4=quantization is not None and "nvfp4" in quantization.kinds,
        enforce_eager=options.enforce_eager,
        compute_capability=options.compute_capability,
    )
    inner = start_memory(architecture, description.config, replace(run, last_stage=False), ranges)
    # A pooling server has no sampler, and the pooler needs much less memory than the forward pass.
    pools = options.pooling or architecture.pooling
    last = inner if pools else start_memory(architecture, description.config, run, ranges)
    inexact = _weight_error(description, quantization)
    stages = []
    for number, stage in enumerate(weighed):
        is_last = number == len(weighed) - 1
        start = last if is_last else inner
        # vLLM keeps parameters of layers in the node's memory, one after the other, until it holds
        # that many bytes: UVAOffloader in vllm/model_executor/offloader/uva.py of 0.31.0.
        weights = stage.bytes - min(int(options.cpu_offload_gib * GIB), stage.layer_bytes)
        if is_last:
            weights += _draft_bytes(description, options, dtype)
        error = start.budget.error_bytes + inexact * weights
        if options.lora and not why_not_counted(architecture):
            adapters = lora_bytes(
                architecture,
                options.lora,
                sharding(options),
                stage.layers,
                dtype=dtype,
                first=number == 0,
                last=is_last,
            )
            weights += adapters
            error += ERROR * adapters + _adapters_in_a_run(options.lora, chosen)
        stages.append(_stage(options, chosen, weights, start, int(error)))
    return stages, [stage.layers for stage in weighed]


def _adapters_in_a_run(lora: Lora, chosen: Defaults) -> int:
    """
    Return the working memory of a run with adapters, in bytes.

    It holds the results of an adapter's first matrix: float32 numbers, for three outputs at once.
    """
    return 3 * 4 * chosen.max_num_batched_tokens * lora.max_rank


def _stage(
    options: Options, chosen: Defaults, weights: int, start: StartMemory, error: int
) -> StageMemory:
    total = options.gpu_memory_gib * GIB
    if options.kv_cache_memory_bytes is not None:
        return StageMemory(weights, start, options.kv_cache_memory_bytes, 0)
    if options.device == "cpu":
        return StageMemory(weights, start, *_cpu_cache(options, chosen, weights, total))
    if options.vllm > (*NEWEST, 1 << 30):
        error *= 2
    budget = math.ceil(total * chosen.gpu_memory_utilization)
    return StageMemory(weights, start, budget - weights - start.budget.bytes, error)


_CPU_PROCESS = int(1.2 * GIB)
"""
A worker's resident memory without weights. Measured with 0.32.0 on CPU: 0.43 to 0.54 GiB before
torch compiles the model, and 1.6 GiB after that.
"""


def _cpu_cache(options: Options, chosen: Defaults, weights: int, total: float) -> tuple[int, int]:
    """
    Return the default bytes of the KV cache on a CPU node, and their error.

    The default is 4 GiB up to 0.11, and half of the node's memory from 0.12 to 0.20
    (platforms/cpu.py). Since 0.21, it is the share of `--gpu-memory-utilization` without the memory
    that the worker already uses (v1/worker/cpu_worker.py).
    """
    if options.vllm < (0, 12):
        return 4 * GIB, 0
    if options.vllm < (0, 21):
        return int(total / 2), 0
    budget = math.ceil(total * chosen.gpu_memory_utilization)
    return budget - weights - _CPU_PROCESS, int(0.6 * GIB)


def sharding(options: Options) -> Sharding:
    return Sharding(
        options.tensor_parallel,
        options.pipeline_parallel,
        options.data_parallel,
        options.expert_parallel,
    )


def _draft_bytes(description: Description, options: Options, dtype: str) -> int:
    """
    Return the bytes of the loaded draft model or draft layers, or 0 if none are loaded.

    The checkpoint's own draft layers are loaded only for speculative decoding. They are all on one
    stage, and are quantized like layers after the last layer of the decoder.
    """
    if (draft := counted_draft(description, options)) is not None:
        return weight_bytes(
            draft.architecture,
            draft.quantization,
            replace(sharding(options), pipeline=1),
            dtype=dtype if options.dtype != "auto" else "auto",
            stored=draft.stored or draft.stored_bytes,
            vllm=options.vllm,
            compute_capability=options.compute_capability,
        )[0].bytes
    architecture = description.architecture
    if not options.speculative_tokens or not architecture.draft_layers:
        return 0
    longer = replace(
        architecture, layers=architecture.layers + architecture.draft_layers, draft_layers=()
    )
    quantization = resolve_quantization(description, options)
    whole = replace(sharding(options), pipeline=1)
    with_drafts, without = (
        weight_bytes(each, quantization, whole, dtype=dtype, vllm=options.vllm)[0].bytes
        for each in (longer, architecture)
    )
    return with_drafts - without


def counted_draft(description: Description, options: Options) -> Description | None:
    """
    Return the draft model whose weights and cache are counted, or None.

    Only a separate draft model is counted. It is divided over the GPUs like the served model
    (draft_tensor_parallel_size in vllm/config/speculative.py). The size of EAGLE and similar drafts
    is unknown, because it depends on the class which parts they share with the served model.
    """
    draft = description.draft
    if not options.draft_model or options.speculative_method not in (None, "draft_model"):
        return None
    return draft if isinstance(draft, Description) else None


_TOWER_ERROR = 0.35
"""
Assumed error of a tower that is estimated from its config, as a share. The measured errors of such
towers are 10 to 31 %.
"""


def _weight_error(description: Description, quantization: Quantization | None) -> float:
    """
    Return the error of the weights, as a share of their bytes.

    In nine of ten start-up logs, the estimate differs from `Model loading took` by at most 0.5 %,
    with or without quantization. In all logs it differs by at most 2 %
    (docs/measured/sizing-accuracy.md).
    """
    architecture = description.architecture
    if architecture.tower_estimated and architecture.parameters:
        tower = sum(
            weight.parameters
            for part in architecture.parts
            if part.name == "tower"
            for weight in part.weights
        )
        return 0.01 + _TOWER_ERROR * tower / architecture.parameters
    if architecture.notes:
        return 0.02
    return 0.01 if quantization is not None and description.stored is None else 0.005
