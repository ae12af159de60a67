"""
Define the parts of a model that take GPU memory: weights and caches.  Pure.

Shapes are those of the whole model in the checkpoint. `weights.py` and `kv_cache.py` compute the
part of one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias


class Split(StrEnum):
    """The division of a weight by tensor parallelism, in vLLM's layers (model_executor/layers)."""

    NONE = "none"
    """Every rank has all of it (norms, routers, MLA's down projections)."""
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
    One weight, or `count` equal ones (the experts of a layer).

    `name` is that in the checkpoint, without the layer's prefix and `.weight`: `self_attn.q_proj`.
    """

    name: str
    rows: int
    columns: int = 1
    """1: a vector."""
    split: Split = Split.NONE
    heads: int = 0
    """With `Split.HEADS`: of how many heads `rows` are made."""
    count: int = 1
    expert: bool = False
    """Divided over ranks as a whole with expert parallelism, else by `split`."""
    linear: bool = True
    """A matrix that a quantization may replace. Not: embeddings, norms, biases, convolutions."""
    dtype: str | None = None
    """Dtype in which vLLM keeps it, such as "float32"; None: the model's."""
    least: int = 0
    """Least rows or columns that a rank holds of a dimension that TP divides (Kimi's experts)."""
    buffer: bool = False
    """Computed by vLLM when it loads: not in the checkpoint (rotary tables)."""
    until: tuple[int, ...] | None = None
    """The release from which on vLLM does without it; None: it is there in all."""

    divided_since: tuple[int, ...] | None = None
    """The release from which TP divides it by `split`; None: all do."""

    @property
    def parameters(self) -> int:
        """Return how many numbers it has in the checkpoint."""
        return 0 if self.buffer else self.rows * self.columns * self.count


@dataclass(frozen=True)
class FullCache:
    """Keys and values of every token: MHA, MQA, GQA."""

    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    """Set if values have another size than keys."""


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
    """Keys and values of an encoder's output: one request has as many as a step's tokens."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentCache:
    """MLA: one latent and one rotary key per token, the same on every TP rank."""

    rank: int
    """kv_lora_rank"""
    rope_dim: int
    """qk_rope_head_dim"""
    indexer_dim: int = 0
    """Sparse attention's own key a token (DeepSeek V3.2): index_head_dim; 0: none."""


@dataclass(frozen=True)
class StateCache:
    """
    The state of a linear-attention or Mamba layer: one per sequence, whatever its length.

    `shapes` are of one sequence and the whole model; the first dimension of each that `split` names
    is divided by TP. `dtypes` beside them: "model" or a name ("float32").
    """

    kind: str
    """As vLLM's `mamba_type`: mamba1, mamba2, gdn, kda, short_conv, linear."""
    shapes: tuple[tuple[int, ...], ...]
    split: tuple[int | None, ...]
    """For each shape the dimension that TP divides; None: replicated."""
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class CompressedCache:
    """
    DeepSeek V4: the last `window` tokens, and all tokens compressed by `ratio`.

    The same on every TP rank. The compressor keeps its own state.
    """

    dim: int
    """head_dim: of a token in the window, and of what several are made into."""
    window: int
    ratio: int = 0
    """0: the window alone."""
    index_dim: int = 0
    """Sparse attention's own key, made of `ratio` tokens as well; 0: none."""


Cache: TypeAlias = (
    FullCache | WindowCache | ChunkCache | CrossCache | LatentCache | StateCache | CompressedCache
)


@dataclass(frozen=True)
class Layer:
    """One decoder layer. `cache` None: it has none, or shares that of another layer."""

    weights: tuple[Weight, ...]
    cache: Cache | None = None
    more: tuple[Cache, ...] = ()
    """Its further caches: attention beside Mamba (Falcon-H1), an index key a token (MiniMax M3)."""

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Return all caches of the layer."""
        return (() if self.cache is None else (self.cache,)) + self.more


class StagePlacement(StrEnum):
    """The pipeline stages that hold a part."""

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
    """Whether other stages make it too, though they do not use it ..."""
    everywhere_until: tuple[int, ...] | None = None
    """... and the release from which they do not; None: they do in all."""


@dataclass(frozen=True)
class Architecture:
    """The properties of a model that determine its memory and parallelism."""

    name: str
    """As `architectures` in config.json has it: "LlamaForCausalLM"."""
    hidden_size: int
    vocab_size: int
    heads: int
    """Attention heads, which TP has to divide."""
    kv_heads: int
    """KV heads of a full-attention layer; 1 with MLA."""
    layers: tuple[Layer, ...]
    parts: tuple[Part, ...]
    max_model_len: int
    """The longest context, as vLLM derives it from the config."""
    dtype: str
    """bfloat16, float16 or float32: what `--dtype auto` takes."""
    tied: bool = False
    """The head is the embedding."""
    experts: int = 0
    """Routed experts of a layer; 0: dense."""
    moe_intermediate_size: int = 0
    intermediate_size: int = 0
    multimodal: bool = False
    pooling: bool = False
    """It classifies or scores whatever `--runner` says."""
    tower_estimated: bool = False
    """Its tower is not known here: it is estimated from the config, or not counted at all."""
    pipeline: bool = True
    """Whether vLLM's class can be divided into pipeline stages."""
    draft_layers: tuple[Layer, ...] = ()
    """Layers of the checkpoint's own multi-token prediction, loaded only with speculation."""
    lengths: tuple[tuple[tuple[int, ...], int, int], ...] = ()
    """(release, tokens that it takes untold, most that may be asked of it) where that changed."""
    prefix: str = "model.layers."
    """Prefix of a layer's number in the checkpoint's names; a quantization uses whole names."""
    notes: tuple[str, ...] = field(default=())
    """Sentences on parts that are not counted exactly; each lowers the confidence."""

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
        """Return whether some layer has MLA's cache, which is the same on every TP rank."""
        return any(
            isinstance(cache, LatentCache) for layer in self.layers for cache in layer.caches
        )

    @property
    def parameters(self) -> int:
        """Return how many numbers the checkpoint has, without its draft layers."""
        parts = sum(weight.parameters for part in self.parts for weight in part.weights)
        return parts + sum(w.parameters for layer in self.layers for w in layer.weights)
