"""
Define the parts of a model that take GPU memory: weights and caches.  Pure.

Shapes are those of the whole model in the checkpoint. `weights.py` and `kv_cache.py` compute the
part of each GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias


class Split(StrEnum):
    """How vLLM's layers divide a weight by tensor parallelism (model_executor/layers)."""

    NONE = "none"
    """Every rank has the whole weight (norms, routers, MLA's down projections)."""
    ROWS = "rows"
    """The output is divided: ColumnParallelLinear."""
    COLUMNS = "columns"
    """The input is divided: RowParallelLinear."""
    HEADS = "heads"
    """Whole KV heads: max(1, heads / TP) on each rank (QKVParallelLinear)."""
    VOCABULARY = "vocabulary"
    """Rows are padded to a multiple of 64, then divided (VocabParallelEmbedding)."""


@dataclass(frozen=True)
class Weight:
    """
    One weight, or `count` weights of the same shape (such as the experts of a layer).

    `name` is the name in the checkpoint, without the layer's prefix and `.weight`:
    `self_attn.q_proj`.
    """

    name: str
    rows: int
    columns: int = 1
    """1 for a vector."""
    split: Split = Split.NONE
    heads: int = 0
    """With `Split.HEADS`, the number of heads in `rows`."""
    count: int = 1
    expert: bool = False
    """
    Whether the weight belongs to an expert. With expert parallelism, ranks have whole experts.
    Otherwise, each expert is divided by `split`.
    """
    linear: bool = True
    """
    Whether a quantization can apply to the weight. False for embeddings, norms, biases and
    convolutions.
    """
    dtype: str | None = None
    """Dtype in vLLM, such as "float32"; None for the model's dtype."""
    least: int = 0
    """
    Minimum number of rows or columns on a rank, in the dimension that TP divides (Kimi's experts).
    """
    buffer: bool = False
    """
    Whether vLLM computes the weight during loading, so the checkpoint does not have it (rotary
    tables).
    """
    until: tuple[int, ...] | None = None
    """The release from which vLLM no longer has the weight; None if all releases have it."""

    divided_since: tuple[int, ...] | None = None
    """The release from which TP divides the weight by `split`; None if all releases do."""

    @property
    def parameters(self) -> int:
        """Return the number of parameters in the checkpoint; 0 for a buffer."""
        return 0 if self.buffer else self.rows * self.columns * self.count


@dataclass(frozen=True)
class FullCache:
    """Keys and values of every token: MHA, MQA, GQA."""

    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    """Size of a value head, if it differs from the size of a key head."""


@dataclass(frozen=True)
class WindowCache:
    """Keys and values of the last `window` tokens: sliding window."""

    kv_heads: int
    head_dim: int
    window: int
    v_head_dim: int | None = None


@dataclass(frozen=True)
class ChunkCache:
    """Keys and values of the current chunk of `chunk` tokens (Llama 4)."""

    kv_heads: int
    head_dim: int
    chunk: int


@dataclass(frozen=True)
class CrossCache:
    """
    Keys and values of an encoder's output. For one request, they are as many as a step has tokens.
    """

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentCache:
    """MLA: one latent and one rotary key per token, the same on every TP rank."""

    rank: int
    """`kv_lora_rank` in config.json."""
    rope_dim: int
    """`qk_rope_head_dim` in config.json."""
    indexer_dim: int = 0
    """Size of sparse attention's key per token (DeepSeek V3.2: `index_head_dim`); 0 if none."""


@dataclass(frozen=True)
class StateCache:
    """
    The state of a linear-attention or Mamba layer. A sequence of any length has one state.

    `shapes` are the shapes of the state's tensors for one sequence and the whole model. For each
    shape, `split` is the dimension that TP divides, and `dtypes` has the dtype: "model" (the
    model's dtype) or a name ("float32").
    """

    kind: str
    """vLLM's `mamba_type`: mamba1, mamba2, gdn, kda, short_conv, linear."""
    shapes: tuple[tuple[int, ...], ...]
    split: tuple[int | None, ...]
    """For each shape, the dimension that TP divides; None if it is replicated."""
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class CompressedCache:
    """
    DeepSeek V4: the last `window` tokens, and all tokens compressed by `ratio`.

    The cache is the same on every TP rank. The compressor has a state in addition.
    """

    dim: int
    """`head_dim`: the numbers that a token in the window has, and that a compressed entry has."""
    window: int
    ratio: int = 0
    """Number of tokens in a compressed entry. 0 means that there is only the window."""
    index_dim: int = 0
    """Size of sparse attention's key for `ratio` tokens; 0 if none."""


Cache: TypeAlias = (
    FullCache | WindowCache | ChunkCache | CrossCache | LatentCache | StateCache | CompressedCache
)


@dataclass(frozen=True)
class Layer:
    """
    One decoder layer. `cache` is None if the layer has no cache, or uses another layer's cache.
    """

    weights: tuple[Weight, ...]
    cache: Cache | None = None
    more: tuple[Cache, ...] = ()
    """
    Further caches: Mamba in addition to attention (Falcon-H1), or an index key for each token
    (MiniMax M3).
    """

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Return all caches of the layer."""
        return (() if self.cache is None else (self.cache,)) + self.more


class StagePlacement(StrEnum):
    """The pipeline stages that have a part."""

    FIRST = "first"
    LAST = "last"
    EVERY = "every"


@dataclass(frozen=True)
class Part:
    """Weights outside the decoder's layers: embeddings, head, final norm, vision tower."""

    name: str
    weights: tuple[Weight, ...]
    where: StagePlacement
    everywhere: bool = False
    """Whether the other pipeline stages also create the part, although they do not use it."""
    everywhere_until: tuple[int, ...] | None = None
    """
    The release from which the other stages no longer create the part. None if they do in all
    releases.
    """


@dataclass(frozen=True)
class Architecture:
    """The properties of a model that determine its memory and parallelism."""

    name: str
    """The name in `architectures` of config.json: "LlamaForCausalLM"."""
    hidden_size: int
    vocab_size: int
    heads: int
    """Number of attention heads, which the tensor-parallel size must divide."""
    kv_heads: int
    """KV heads of a full-attention layer; 1 with MLA."""
    layers: tuple[Layer, ...]
    parts: tuple[Part, ...]
    max_model_len: int
    """The longest context, as vLLM derives it from the config."""
    dtype: str
    """The dtype of `--dtype auto`: bfloat16, float16 or float32."""
    tied: bool = False
    """Whether the language model's head is the same weight as the embedding."""
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    moe_intermediate_size: int = 0
    intermediate_size: int = 0
    multimodal: bool = False
    pooling: bool = False
    """Whether the model pools (embeds, classifies or scores) independently of `--runner`."""
    tower_estimated: bool = False
    """
    Whether gpufleet does not know the tower exactly. It is then estimated from the config, or not
    counted.
    """
    pipeline: bool = True
    """Whether vLLM's class can be divided into pipeline stages."""
    draft_layers: tuple[Layer, ...] = ()
    """
    Layers of the checkpoint for multi-token prediction. vLLM loads them only for speculative
    decoding.
    """
    lengths: tuple[tuple[tuple[int, ...], int, int], ...] = ()
    """
    (release, default length, largest accepted length) for each release that changed the lengths.
    """
    prefix: str = "model.layers."
    """
    The text before a layer's number in names of the checkpoint. Quantizations refer to whole names.
    """
    notes: tuple[str, ...] = field(default=())
    """
    Sentences on parts that are not counted exactly. With notes, the error of the weights is larger.
    """

    def default_length(self, vllm: tuple[int, ...]) -> int:
        """
        Return the context length, in tokens, that this release uses without `--max-model-len`.
        """
        return self._length(vllm, 1)

    def longest_length(self, vllm: tuple[int, ...]) -> int:
        """Return the largest `--max-model-len` that this release accepts."""
        return self._length(vllm, 2)

    def _length(self, vllm: tuple[int, ...], which: int) -> int:
        found = self.max_model_len
        for row in self.lengths:
            if vllm >= row[0]:
                found = (found, row[1], row[2])[which]
        return found

    @cached_property
    def has_latent_cache(self) -> bool:
        """Return whether at least one layer has MLA's cache, which is the same on every TP rank."""
        return any(
            isinstance(cache, LatentCache) for layer in self.layers for cache in layer.caches
        )

    @property
    def parameters(self) -> int:
        """Return the number of parameters in the checkpoint, without draft layers."""
        parts = sum(weight.parameters for part in self.parts for weight in part.weights)
        return parts + sum(w.parameters for layer in self.layers for w in layer.weights)
