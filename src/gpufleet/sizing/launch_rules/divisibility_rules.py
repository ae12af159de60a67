"""
Check the sizes that the tensor-parallel size must divide: heads, vocabulary, layers, experts. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpufleet.catalog import vllm_support
from gpufleet.sizing.architectures.components import (
    ChunkCache,
    FullCache,
    Split,
    StateCache,
    WindowCache,
)
from gpufleet.sizing.launch_rules.launch_case import Fault, LaunchCase, shape_of
from gpufleet.sizing.rank_weights import VOCABULARY_PADDING


def check_attention_heads(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find attention heads that the tensor-parallel size does not divide."""
    heads = case.architecture.heads
    if heads % tensor:
        yield Fault(
            "attention-heads",
            f"--tensor-parallel-size {tensor} does not divide {case.model}'s {heads} attention "
            "heads",
            "vllm/config/model.py: ModelConfig.verify_with_parallel_config",
        )


def check_kv_heads(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find KV heads that the tensor-parallel size neither divides nor is a multiple of."""
    counts = {
        cache.kv_heads
        for cache in shape_of(case.architecture).caches
        if isinstance(cache, FullCache | WindowCache | ChunkCache)
    }
    for heads in sorted(counts):
        if tensor > heads and case.model in _NEVER_COPIED:
            yield Fault(
                "kv-heads",
                f"--tensor-parallel-size {tensor} is more than {case.model}'s {heads} KV heads, "
                "and vLLM does not copy the KV heads of this class",
                "vllm/model_executor/models/gpt_oss.py: OAIAttention",
            )
        elif tensor % heads and heads % tensor:
            yield Fault(
                "kv-heads",
                f"--tensor-parallel-size {tensor} neither divides the number of {case.model}'s KV "
                f"heads ({heads}) nor is a multiple of this number",
                "vllm/model_executor/layers/linear.py: QKVParallelLinear",
            )


_NEVER_COPIED = {"GptOssForCausalLM"}


def check_vocabulary(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find a padded vocabulary that the tensor-parallel size does not divide."""
    for part in case.architecture.parts:
        for weight in part.weights:
            if weight.split is not Split.VOCABULARY:
                continue
            padded = math.ceil(weight.rows / VOCABULARY_PADDING) * VOCABULARY_PADDING
            if padded % tensor:
                yield Fault(
                    "vocabulary",
                    f"--tensor-parallel-size {tensor} does not divide {case.model}'s vocabulary of "
                    f"{weight.rows} tokens, which vLLM pads to {padded}",
                    "vllm/model_executor/layers/vocab_parallel_embedding.py: "
                    "VocabParallelEmbedding",
                )
                return


def check_state_heads(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find states of linear-attention layers that the tensor-parallel size does not divide."""
    for cache in shape_of(case.architecture).caches:
        if not isinstance(cache, StateCache):
            continue
        for size, what in _state_sizes(cache):
            if size % tensor:
                yield Fault(
                    "state-heads",
                    f"--tensor-parallel-size {tensor} does not divide the {size} {what} of "
                    f"{case.model}'s {cache.kind} layers",
                    "vllm/model_executor/layers/mamba/mamba_utils.py: MambaStateShapeCalculator",
                )
                return


def _state_sizes(cache: StateCache) -> Iterator[tuple[int, str]]:
    """Yield the sizes of a state that tensor parallelism must divide, each with its unit."""
    for shape, split in zip(cache.shapes, cache.split, strict=True):
        if split is None:
            continue
        if cache.kind not in _OF_HEADS:
            yield shape[split], "channels"
        elif shape is cache.shapes[-1]:
            yield shape[split], "heads"
        elif len(shape) == len(cache.shapes[-1]) and shape[split] > 1:
            yield shape[split], "groups"  # a single group is copied to all ranks: MambaMixer2


_OF_HEADS = {"mamba2", "gdn", "kda"}
"""Kinds whose last state has the shape (heads, ...)."""


def check_layer_sizes(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find matrices of the layers that the tensor-parallel size does not divide."""
    heads = case.architecture.heads
    found: dict[int, str] = {}
    for weight, _layers in shape_of(case.architecture).linear:
        if weight.expert or weight.split is Split.HEADS:
            continue
        size = weight.rows if weight.split is Split.ROWS else weight.columns
        # If the heads cannot be divided either, that fault is clearer.
        by_heads = heads and heads % tensor and size % heads == 0
        if size % tensor and not by_heads:
            found.setdefault(size, weight.name)
    if found:
        sizes = ", ".join(f"{size} ({name})" for size, name in sorted(found.items()))
        yield Fault(
            "layer-sizes",
            f"--tensor-parallel-size {tensor} does not divide the sizes of {case.model}'s layers: "
            f"{sizes}",
            "vllm/model_executor/layers/linear.py: ColumnParallelLinear, RowParallelLinear",
        )


def expert_ranks(case: LaunchCase, tensor: int, expert: bool) -> int:
    """
    Return the number of ranks over which each expert is divided.

    Data parallelism also divides experts, unless whole experts are distributed. Source:
    FusedMoEParallelConfig.make in vllm/model_executor/layers/fused_moe/config.py.
    """
    return 1 if expert else tensor * case.choice.data


def check_expert_size(case: LaunchCase, tensor: int, expert: bool) -> Iterator[Fault]:
    """Find experts whose inner size the number of ranks does not divide."""
    ranks = expert_ranks(case, tensor, expert)
    sizes = {
        weight.columns
        for weight, _ in shape_of(case.architecture).linear
        if weight.expert and weight.split is Split.COLUMNS
    }
    for size in sorted(sizes):
        if size % ranks:
            yield Fault(
                "expert-size",
                f"{ranks_flag(case, tensor, ranks)} does not divide the intermediate size {size} "
                f"of {case.model}'s experts",
                "vllm/model_executor/layers/fused_moe: FusedMoEConfig, assert on intermediate_size",
            )


def ranks_flag(case: LaunchCase, tensor: int, ranks: int) -> str:
    """Return the flags with which there are `ranks` ranks, for messages."""
    if ranks == tensor:
        return f"--tensor-parallel-size {tensor}"
    return f"--tensor-parallel-size {tensor} times --data-parallel-size {case.choice.data}"


def check_ranks_over_experts(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find a tensor-parallel size above the number of experts, if the class refuses it."""
    experts = case.architecture.experts
    if experts and tensor > experts and vllm_support.limits_by_experts(case.model, case.vllm):
        yield Fault(
            "ranks-over-experts",
            f"--tensor-parallel-size {tensor} is more than {case.model}'s {experts} experts",
            "vllm/model_executor/models: the class's block of experts",
        )
