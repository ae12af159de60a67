"""
Decoders whose layers are all alike: attention over the whole context and one MLP.  Pure.

The small functions make the parts that every family has; other modules of this package use them
too. Which of vLLM's layers a weight is in decides how it is divided: its classes under
model_executor/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpufleet.architecture.fields import Fields
from gpufleet.architecture.max_length import max_model_len
from gpufleet.architecture.parts import (
    Architecture,
    Cache,
    FullCache,
    Layer,
    Part,
    Split,
    Weight,
    Where,
    WindowCache,
)


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    prefix: str = "self_attn.",
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    bias: bool = False,
    out_bias: bool = False,
    v_head_dim: int | None = None,
    head_norm: bool = False,
) -> tuple[Weight, ...]:
    """
    Return grouped-query attention's weights: QKVParallelLinear and RowParallelLinear.

    `bias` is that of queries, keys and values; `head_norm` adds a norm of `head_dim` to queries
    and to keys (`q_norm`, `k_norm`).
    """
    q, k, v, out = (prefix + name for name in names)
    value_dim = v_head_dim or head_dim
    weights = [
        Weight(q, heads * head_dim, hidden, Split.ROWS),
        Weight(k, kv_heads * head_dim, hidden, Split.HEADS, heads=kv_heads),
        Weight(v, kv_heads * value_dim, hidden, Split.HEADS, heads=kv_heads),
        Weight(out, hidden, heads * value_dim, Split.COLUMNS),
    ]
    if bias:
        weights += [
            vector(f"{q}.bias", heads * head_dim, Split.ROWS),
            vector(f"{k}.bias", kv_heads * head_dim, Split.HEADS, heads=kv_heads),
            vector(f"{v}.bias", kv_heads * value_dim, Split.HEADS, heads=kv_heads),
        ]
    if out_bias:
        weights.append(vector(f"{out}.bias", hidden))
    if head_norm:
        weights += [vector(f"{prefix}q_norm", head_dim), vector(f"{prefix}k_norm", head_dim)]
    return tuple(weights)


def gated_mlp(
    hidden: int,
    intermediate: int,
    *,
    prefix: str = "mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> tuple[Weight, ...]:
    """Return a gated MLP's weights: MergedColumnParallelLinear and RowParallelLinear."""
    gate, up, down = (prefix + name for name in names)
    weights = [
        Weight(gate, intermediate, hidden, Split.ROWS),
        Weight(up, intermediate, hidden, Split.ROWS),
        Weight(down, hidden, intermediate, Split.COLUMNS),
    ]
    if bias:
        weights += [
            vector(f"{gate}.bias", intermediate, Split.ROWS),
            vector(f"{up}.bias", intermediate, Split.ROWS),
            vector(f"{down}.bias", hidden),
        ]
    return tuple(weights)


def plain_mlp(
    hidden: int,
    intermediate: int,
    *,
    prefix: str = "mlp.",
    names: tuple[str, str] = ("up_proj", "down_proj"),
    bias: bool = False,
) -> tuple[Weight, ...]:
    """Return an MLP of two matrices: ColumnParallelLinear and RowParallelLinear."""
    up, down = (prefix + name for name in names)
    weights = [
        Weight(up, intermediate, hidden, Split.ROWS),
        Weight(down, hidden, intermediate, Split.COLUMNS),
    ]
    if bias:
        weights += [vector(f"{up}.bias", intermediate, Split.ROWS), vector(f"{down}.bias", hidden)]
    return tuple(weights)


def vector(
    name: str, size: int, split: Split = Split.NONE, *, heads: int = 0, dtype: str | None = None
) -> Weight:
    """Return a norm's weight or a bias, which no quantization touches."""
    return Weight(name, size, split=split, heads=heads, linear=False, dtype=dtype)


def norm(name: str, size: int, *, bias: bool = False) -> tuple[Weight, ...]:
    """Return a norm's weights; LayerNorm has a bias too."""
    return (vector(name, size), vector(f"{name}.bias", size)) if bias else (vector(name, size),)


def embedding(vocab: int, hidden: int, name: str = "model.embed_tokens") -> Part:
    """Return the tokens' embedding: VocabParallelEmbedding, on the first stage."""
    weight = Weight(name, vocab, hidden, Split.VOCABULARY, linear=False)
    return Part("embedding", (weight,), Where.FIRST)


def head(vocab: int, hidden: int, name: str = "lm_head", *, bias: bool = False) -> Part:
    """
    Return the language model's head: ParallelLMHead, on the last stage.

    Its weight is `linear=True`: a few checkpoints quantize it, and say so.
    """
    weights = [Weight(name, vocab, hidden, Split.VOCABULARY)]
    if bias:
        weights.append(Weight(f"{name}.bias", vocab, split=Split.VOCABULARY, linear=False))
    return Part("head", tuple(weights), Where.LAST)


def final_norm(hidden: int, name: str = "model.norm", *, bias: bool = False) -> Part:
    """Return the norm after the last layer."""
    return Part("norm", norm(name, hidden, bias=bias), Where.LAST)


def rotary(positions: int, dim: int, *, dtype: str | None = None, tables: int = 1) -> Part:
    """
    Return the table of cosines and sines that all layers share, which vLLM computes.

    Source: RotaryEmbedding in model_executor/layers/rotary_embedding/base.py; one table for each
    different set of parameters (get_rope).
    """
    table = Weight(
        "rotary_emb.cos_sin_cache",
        positions,
        dim,
        linear=False,
        dtype=dtype,
        buffer=True,
        count=tables,
    )
    return Part("rotary", (table,), Where.EVERY)


def dtype_of(fields: Fields) -> str:
    """
    Return what `--dtype auto` takes: the checkpoint's, float32 as bfloat16.

    Source: _resolve_auto_dtype in vllm/config/model.py; a GPU before Ampere takes float16 instead.
    """
    stated = fields.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    return {"float32": "bfloat16", "float": "bfloat16", "half": "float16"}.get(stated, stated)


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {}
_ = (Cache, FullCache, Layer, WindowCache, max_model_len)
