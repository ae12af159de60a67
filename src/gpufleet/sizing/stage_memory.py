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
"""--all2all-backend: the default, and the two that newer releases take for it
(ParallelConfig.__post_init__ in vllm/config/parallel.py of 0.33.0)."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one pipeline stage's smallest rank."""

    weights: int
    start: StartMemory
    available: int
    """Bytes for the KV cache; negative if the weights leave none."""
    error: int
    """Error of `available`, in bytes."""


def requested_length(description: Description, options: Options) -> int:
    """Return the requested length; without one, and for `auto`, the release's default."""
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
    Return the model's dtype like vLLM: no float32 and, before Ampere, no bfloat16.

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
    # A kernel's name beside the method's ("awq_marlin"), alone, or the method itself.
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
    """Return the memory of each pipeline stage, and the layers of each."""
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
    # Without experts, engines of data parallelism know nothing of each other's memory.
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
    # A server that pools samples nothing, and the pooler's run is small beside the forward pass.
    pools = options.pooling or architecture.pooling
    last = inner if pools else start_memory(architecture, description.config, run, ranges)
    inexact = _weight_error(description, quantization)
    stages = []
    for number, stage in enumerate(weighed):
        is_last = number == len(weighed) - 1
        start = last if is_last else inner
        # Layers stay in the node's memory, a parameter at a time, until that many bytes are there:
        # UVAOffloader in vllm/model_executor/offloader/uva.py of 0.31.0.
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
    """Return the bytes between an adapter's two matrices: float32, for three outputs at once."""
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
"""A worker's resident memory without weights: 0.43 to 0.54 GiB before torch compiles, 1.6 with a
model compiled (measured with 0.32.0 on CPU)."""


def _cpu_cache(options: Options, chosen: Defaults, weights: int, total: float) -> tuple[int, int]:
    """
    Return the default bytes of the KV cache on a CPU node, and their error.

    The default is 4 GiB up to 0.11, half of the memory up to 0.20 (platforms/cpu.py), and since
    0.21 the utilization's share without the worker's memory in use (v1/worker/cpu_worker.py).
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
    Return the bytes of a draft model, or of the checkpoint's own draft layers, if they are loaded.

    Draft layers are loaded for speculation, and quantized like layers after the decoder's last one,
    on one stage.
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

    It is a separate model, divided like the target (draft_tensor_parallel_size in
    vllm/config/speculative.py). The size of EAGLE and similar drafts is unknown, because the parts
    that they share with their target differ by class.
    """
    draft = description.draft
    if not options.draft_model or options.speculative_method not in (None, "draft_model"):
        return None
    return draft if isinstance(draft, Description) else None


_TOWER_ERROR = 0.35
"""Error of a tower that is estimated from its config: 10 to 31 % for models with such towers."""


def _weight_error(description: Description, quantization: Quantization | None) -> float:
    """
    Return the error of the weights, as a share.

    The estimate is within 0.5 % of `Model loading took` in nine of ten start-up logs, quantized or
    not, and within 2 % in all (docs/measured/sizing-accuracy.md).
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
