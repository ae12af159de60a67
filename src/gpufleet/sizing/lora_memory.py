"""
Compute the memory of LoRA adapters: two thin matrices for each linear layer.  Pure.

vLLM allocates the matrices when it loads the model: always for `--max-loras` adapters of rank
`--max-lora-rank`, even if fewer or smaller adapters are used. Source: create_lora_weights in
vllm/lora/layers of 0.31.0: base_linear.py, column_parallel_linear.py, row_parallel_linear.py,
vocab_parallel_embedding.py and logits_processor.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpufleet.sizing.architectures.components import (
    Architecture,
    LatentCache,
    Split,
    StateCache,
    Weight,
)
from gpufleet.sizing.rank_weights import SIZES, Sharding

_WITH_EMBEDDING = {
    "ApertusForCausalLM",
    "DeciLMForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneForCausalLM",
    "GraniteForCausalLM",
    "HyperCLOVAXForCausalLM",
    "Jais2ForCausalLM",
    "LlamaForCausalLM",
    "MiniCPMForCausalLM",
    "NemotronForCausalLM",
    "Qwen3ForCausalLM",
    "SolarForCausalLM",
}
"""
Classes for which vLLM also loads adapters of the embedding and the head. `embedding_modules` of
these classes contains both (vllm/model_executor/models of 0.31.0).
"""

ERROR = 0.05
"""
Error, as a share of the adapters' bytes. The reasons are differences between releases (256 more
tokens in the vocabulary up to 0.11), and rounding by the allocator.
"""


@dataclass(frozen=True)
class Lora:
    """vLLM's flags for LoRA adapters."""

    max_loras: int = 1
    """Maximum number of adapters in one batch."""
    max_rank: int = 16
    fully_sharded: bool = False
    dtype: str = "auto"
    """Dtype of the adapters; "auto" for the model's dtype."""


def why_not_counted(architecture: Architecture) -> str:
    """Return why the memory of this class's adapters is unknown; "" if it is known."""
    if architecture.multimodal:
        return (
            "which layers of a multimodal model get LoRA matrices depends on the class and the "
            "release"
        )
    if architecture.experts:
        return "the LoRA matrices of a layer of experts depend on the release"
    kinds = {type(cache) for layer in architecture.layers for cache in layer.caches}
    if kinds & {LatentCache, StateCache}:
        return "gpufleet does not know which layers other than attention and MLP get LoRA matrices"
    return ""


def lora_bytes(
    architecture: Architecture,
    lora: Lora,
    sharding: Sharding,
    layers: range,
    *,
    dtype: str,
    first: bool,
    last: bool,
) -> int:
    """
    Return the bytes of the adapters' matrices on one rank of a pipeline stage.

    `dtype` is the model's dtype. `first` and `last` state whether the stage is the first or the
    last stage. The first stage has the embedding, and the last stage has the head.
    """
    numbers = sum(
        _layer_numbers(architecture.layers[number].weights, lora, sharding) for number in layers
    )
    if architecture.name in _WITH_EMBEDDING:
        wide = architecture.vocab_size + architecture.hidden_size
        numbers += lora.max_rank * wide * (first + last)
    size = SIZES[dtype if lora.dtype == "auto" else lora.dtype]
    return numbers * lora.max_loras * size


def _layer_numbers(weights: Iterable[Weight], lora: Lora, sharding: Sharding) -> int:
    """Return the number of parameters of one adapter in one layer."""
    numbers = 0
    inputs: set[str] = set()
    for weight in weights:
        if not weight.linear or weight.columns == 1:
            continue
        rows, columns = _of_a_rank(weight, sharding)
        into = out = lora.max_rank
        if lora.fully_sharded and weight.split in {Split.ROWS, Split.HEADS}:
            into //= sharding.tensor
        if lora.fully_sharded and weight.split is Split.COLUMNS:
            rows //= sharding.tensor
        # Several outputs that are one matrix in the checkpoint share one input matrix of the
        # adapter.
        if weight.name not in inputs:
            numbers += into * columns * weight.count
        inputs.add(weight.name)
        numbers += out * rows * weight.count
    return numbers


def _of_a_rank(weight: Weight, sharding: Sharding) -> tuple[int, int]:
    """Return the rows and columns of a weight on one rank."""
    tensor = sharding.tensor
    match weight.split:
        case Split.ROWS:
            return -(-weight.rows // tensor), weight.columns
        case Split.HEADS:
            heads = max(1, weight.heads // tensor)
            return weight.rows // max(1, weight.heads) * heads, weight.columns
        case Split.COLUMNS:
            return weight.rows, -(-weight.columns // tensor)
    return weight.rows, weight.columns
