"""Define rules on tensor, pipeline, expert and context parallelism, with remedies. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gpufleet.catalog import vllm_support
from gpufleet.sizing.architectures.components import FullCache, LatentCache
from gpufleet.sizing.launch_rules.choice import Refused
from gpufleet.sizing.launch_rules.divisibility_rules import (
    check_attention_heads,
    check_expert_size,
    check_kv_heads,
    check_layer_sizes,
    check_ranks_over_experts,
    check_state_heads,
    check_vocabulary,
)
from gpufleet.sizing.launch_rules.launch_case import Fault, LaunchCase, shape_of
from gpufleet.sizing.launch_rules.quantization_rules import (
    check_bitsandbytes,
    check_expert_groups,
    check_fp8_blocks,
    check_fp8_expert_blocks,
    check_groups,
    check_quantized_state,
)

_TENSOR_RULES: tuple[Callable[[LaunchCase, int, bool], Iterator[Fault]], ...] = (
    check_attention_heads,
    check_kv_heads,
    check_vocabulary,
    check_state_heads,
    check_quantized_state,
    check_layer_sizes,
    check_expert_size,
    check_ranks_over_experts,
    check_fp8_blocks,
    check_fp8_expert_blocks,
    check_groups,
    check_expert_groups,
    check_bitsandbytes,
)


def _tensor_faults(case: LaunchCase, tensor: int, expert: bool | None = None) -> Iterator[Fault]:
    """
    Yield the reasons why this tensor-parallel size is refused.

    `expert` replaces the value of `--enable-expert-parallel` if it is not None.
    """
    split = case.choice.expert if expert is None else expert
    for rule in _TENSOR_RULES:
        yield from rule(case, tensor, split)


_OF_EXPERTS = {"expert-size", "fp8-expert-block", "expert-group"}


def check_tensor_parallel(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a tensor-parallel size that breaks one of the tensor rules."""
    wanted = case.choice.tensor
    faults = list(_tensor_faults(case, wanted))
    if not faults:
        return
    nearest = next(
        (size for size in range(wanted - 1, 0, -1) if not any(_tensor_faults(case, size))), None
    )
    for fault in faults:
        smaller = nearest or _smaller(case, fault.name)
        of_experts = fault.name in _OF_EXPERTS and not case.choice.expert
        if of_experts and not _names(_tensor_faults(case, wanted, expert=True)) & {fault.name}:
            also = "divide whole experts with --enable-expert-parallel"
        else:
            also = ""
        if smaller is not None:
            yield Refused(fault.name, "tensor", wanted, fault.found, fault.rule, smaller, also)
        elif also:
            yield Refused(fault.name, "expert", False, fault.found, fault.rule, nearest=True)
        else:
            yield Refused(fault.name, "checkpoint", case.method, fault.found, fault.rule, None)


def _smaller(case: LaunchCase, name: str) -> int | None:
    """
    Return the largest tensor-parallel size below the requested one that this rule allows, or None.
    """
    sizes = range(case.choice.tensor - 1, 0, -1)
    return next((size for size in sizes if name not in _names(_tensor_faults(case, size))), None)


def _names(faults: Iterable[Fault]) -> set[str]:
    return {fault.name for fault in faults}


def check_pipeline(case: LaunchCase) -> Iterator[Refused]:
    """Refuse pipeline stages for a class that does not support them."""
    if case.choice.pipeline == 1:
        return
    said = vllm_support.supports_pipeline(case.model, case.vllm)
    if said is None:
        said = case.architecture.pipeline
    if not said and vllm_support.supports_architecture(case.model, case.vllm) is not False:
        yield Refused(
            "pipeline",
            "pipeline",
            case.choice.pipeline,
            f"{case.release} cannot divide {case.model} into pipeline stages",
            "vllm/config/model.py: ModelConfig.verify_with_parallel_config",
            1,
        )


def check_expert_parallel(case: LaunchCase) -> Iterator[Refused]:
    """Refuse expert parallelism for a model without experts."""
    if case.choice.expert and not case.architecture.experts:
        yield Refused(
            "expert-parallel",
            "expert",
            value=True,
            found=f"{case.model} has no experts to divide with --enable-expert-parallel",
            rule="vllm/config/model.py: ModelConfig._verify_with_expert_parallelism",
            nearest=False,
        )


def check_expert_balance(case: LaunchCase) -> Iterator[Refused]:
    """Refuse balanced experts if the GPUs cannot all have the same number of experts and copies."""
    copies, experts = case.choice.redundant_experts, case.architecture.experts
    ranks = case.choice.tensor * case.choice.data
    if copies is None or not case.choice.expert or not experts or ranks == 1:
        return
    if (over := (experts + copies) % ranks) == 0:
        return
    also = f" and {copies} copies" if copies else ""
    yield Refused(
        "expert-balance",
        "redundant_experts",
        copies,
        f"--enable-eplb needs the same number of experts on each of {ranks} GPUs, but "
        f"{case.model} has {experts} experts{also}",
        "vllm/model_executor/layers/fused_moe/layer.py: FusedMoE",
        copies + ranks - over,
    )


_CONTEXT_SINCE = (0, 10, 2)
_CONTEXT_OF_HEADS_SINCE = (0, 11, 1)
_CONTEXT_WHOLE_UNTIL = (0, 25)


def check_decode_context(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a decode context parallel size that the release does not accept."""
    wanted = case.choice.decode_context
    fault = _context_fault(case, wanted)
    if fault is None:
        return
    nearest = next(size for size in range(wanted - 1, 0, -1) if _context_fault(case, size) is None)
    yield Refused(fault.name, "decode_context", wanted, fault.found, fault.rule, nearest)


def _context_fault(case: LaunchCase, size: int) -> Fault | None:
    if size == 1:
        return None
    name, tensor = "decode-context", case.choice.tensor
    given = f"--decode-context-parallel-size {size}"
    parallel = "vllm/config/parallel.py: ParallelConfig"
    model = "vllm/config/model.py: ModelConfig.verify_with_parallel_config"
    if case.vllm < _CONTEXT_SINCE:
        return Fault(name, f"{case.release} has no --decode-context-parallel-size", parallel)
    if tensor % size:
        found = f"{given} does not divide --tensor-parallel-size {tensor}, but uses the same GPUs"
        return Fault(name, found, parallel)
    caches = shape_of(case.architecture).caches
    whole = all(isinstance(cache, FullCache | LatentCache) for cache in caches)
    if case.vllm[:2] < _CONTEXT_WHOLE_UNTIL and not whole:
        return Fault(
            name,
            f"{case.release} can divide only caches of the whole context, but {case.model} also "
            "has other caches",
            "vllm/v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py",
        )
    if case.architecture.has_latent_cache:
        if case.choice.kv_cache_dtype.startswith("fp8") and case.vllm[:2] < _CONTEXT_WHOLE_UNTIL:
            found = f"{case.release} cannot divide an FP8 cache of latent attention with {given}"
            return Fault(name, found, "MLA's forward: assert on fp8_attention")
        return None
    kv_heads = case.architecture.kv_heads
    if case.vllm < _CONTEXT_OF_HEADS_SINCE or not kv_heads:
        return None
    if tensor <= kv_heads:
        found = (
            f"{given} needs a --tensor-parallel-size above the number of {case.model}'s KV heads "
            f"({kv_heads}), but the size is {tensor}"
        )
        return Fault(name, found, model)
    most = tensor // kv_heads
    if size > most:
        found = f"{given} is above the number of copies of each KV head of {case.model} ({most})"
        return Fault(name, found, model)
    group = case.architecture.heads // kv_heads
    if group % size:
        found = f"{given} does not divide {case.model}'s {group} query heads per KV head"
        return Fault(name, found, model)
    return None
