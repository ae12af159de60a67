"""
Build parts of decoders: attention, MLPs, norms, embeddings, rotary tables, caches. Pure.

vLLM's layer for a weight determines how TP divides the weight: see the classes in
model_executor/models.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import (
    Architecture,
    Cache,
    FullCache,
    Layer,
    Part,
    Split,
    StagePlacement,
    Weight,
    WindowCache,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.max_length import max_model_len, rope_parameters


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

    `bias` adds a bias to queries, keys and values. `out_bias` adds a bias to the output.
    `head_norm` adds a norm of `head_dim` to queries and to keys (`q_norm`, `k_norm`).
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
    """Return a vector such as a norm's weight or a bias. Vectors are never quantized."""
    return Weight(name, size, split=split, heads=heads, linear=False, dtype=dtype)


def norm(name: str, size: int, *, bias: bool = False) -> tuple[Weight, ...]:
    """Return a norm's weights. Set `bias` for a LayerNorm."""
    return (vector(name, size), vector(f"{name}.bias", size)) if bias else (vector(name, size),)


def embedding(vocab: int, hidden: int, name: str = "model.embed_tokens") -> Part:
    """Return the token embedding: VocabParallelEmbedding, on the first stage."""
    weight = Weight(name, vocab, hidden, Split.VOCABULARY, linear=False)
    return Part("embedding", (weight,), StagePlacement.FIRST)


def head(vocab: int, hidden: int, name: str = "lm_head", *, bias: bool = False) -> Part:
    """
    Return the language model's head: ParallelLMHead, on the last stage.

    The weight has `linear=True`, because a few checkpoints state that it is quantized.
    """
    weights = [Weight(name, vocab, hidden, Split.VOCABULARY)]
    if bias:
        weights.append(Weight(f"{name}.bias", vocab, split=Split.VOCABULARY, linear=False))
    return Part("head", tuple(weights), StagePlacement.LAST)


def final_norm(hidden: int, name: str = "model.norm", *, bias: bool = False) -> Part:
    """Return the norm after the last layer."""
    return Part("norm", norm(name, hidden, bias=bias), StagePlacement.LAST)


def rotary(
    positions: int,
    dim: int,
    *,
    dtype: str | None = None,
    tables: int = 1,
    until: tuple[int, ...] | None = None,
) -> Part:
    """
    Return the table of cosines and sines, which vLLM computes and all layers share.

    There is one table for each different set of parameters (get_rope). Source: RotaryEmbedding in
    model_executor/layers/rotary_embedding/base.py.
    """
    table = Weight(
        "rotary_emb.cos_sin_cache",
        positions,
        dim,
        linear=False,
        dtype=dtype,
        buffer=True,
        count=tables,
        until=until,
    )
    return Part("rotary", (table,), StagePlacement.EVERY)


def default_dtype(fields: Fields) -> str:
    """
    Return the dtype of `--dtype auto`: the checkpoint's dtype, but bfloat16 instead of float32.

    On GPUs before Ampere, vLLM uses float16 instead of bfloat16, which is not considered here.
    Source: _resolve_auto_dtype in vllm/config/model.py.
    """
    stated = fields.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    taken = {"float32": "bfloat16", "float": "bfloat16", "half": "float16"}.get(stated, stated)
    if taken not in {"bfloat16", "float16"}:
        raise FleetError(
            f"config.json of {fields.name}: `{fields.path}torch_dtype` is {stated!r}, which vLLM "
            "does not load: use bfloat16, float16 or float32"
        )
    return taken


def rotary_tables(fields: Fields, head_dim: int, *, keys: tuple[str, ...] = ()) -> tuple[Part, ...]:
    """
    Return the rotary tables of a config.

    YaRN and linear scaling multiply the length of the table by their factor. Dynamic scaling does
    so only before 0.22. LongRoPE has a table for short and a table for long contexts. The table of
    M-RoPE has four times as many positions; for Qwen3-VL and Qwen3.5, only before 0.32
    (mrope_positions_factor in qwen3_vl.py). Gemma 4's global layers have a different head size.
    Source: model_executor/layers/rotary_embedding of 0.8.5 to 0.33.0.
    """
    positions = fields.whole(
        *keys, "max_position_embeddings", "seq_length", "max_sequence_length", default=8192
    )
    tables = []
    stretched: list[tuple[int, int, tuple[int, ...]]] = []
    for scaling in rope_parameters(fields.config) or ({},):
        kind = str(scaling.get("rope_type", scaling.get("type", "default")))
        share = scaling.get("partial_rotary_factor") or fields.number(
            "partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction", default=1.0
        )
        length = float(positions)
        if kind == "yarn":
            original = scaling.get("original_max_position_embeddings") or positions
            length = original * float(scaling.get("factor") or 1)
        elif kind == "linear":
            length *= float(scaling.get("factor") or 1)
        elif kind in {"longrope", "su"}:
            length += scaling.get("original_max_position_embeddings") or fields.whole(
                "original_max_position_embeddings", default=positions
            )
        dim = int(head_dim * share)
        if scaling.get("mrope_section") and kind != "yarn":
            if fields.text("model_type").startswith(("qwen3_vl", "qwen3_5")):
                stretched.append((int(length) * 3, dim, (0, 32)))
            else:
                length *= 4
        if kind == "dynamic":
            more = int(positions * (float(scaling.get("factor") or 1) - 1))
            stretched.append((more, dim, (0, 22)))
        if kind == "proportional":  # the table also has the part that does not rotate
            dim = fields.whole("global_head_dim", default=head_dim)
        tables.append((int(length), dim, scaling.get("rope_theta")))
    return (
        *(
            rotary(length, dim, until=BY_TRANSFORMERS.get(fields.name))
            for length, dim, _ in dict.fromkeys(tables)
        ),
        *(rotary(length, dim, until=until) for length, dim, until in stretched),
    )


BY_TRANSFORMERS = {
    "SmolLM3ForCausalLM": (0,),
    "Starcoder2ForCausalLM": (0, 25),
    "GPTBigCodeForCausalLM": (0, 28),
    "OlmoForCausalLM": (0, 26),
    "Olmo2ForCausalLM": (0, 26),
    "HunYuanDenseV1ForCausalLM": (0, 30),
    "NanbeigeForCausalLM": (0, 30),
    "Olmo3ForCausalLM": (0, 30),
    "ArceeForCausalLM": (0, 32),
    "CwmForCausalLM": (0, 32),
    "GlmForCausalLM": (0, 32),
    "GPTNeoXForCausalLM": (0, 32),
    "Jais2ForCausalLM": (0, 32),
    "PhiForCausalLM": (0, 32),
    "SeedOssForCausalLM": (0, 32),
}
"""
The release from which vLLM runs the class of transformers, which has no rotary table.

Source: _TRANSFORMERS_SUPPORTED_MODELS in model_executor/models/registry.py of each release.
"""


_KINDS_OF_ATTENTION = {"full_attention", "sliding_attention"}


def attention_caches(
    fields: Fields,
    layers: int,
    kv_heads: int,
    head_dim: int,
    *,
    types: bool = False,
) -> tuple[Cache, ...]:
    """
    Return the cache of each layer: of a window if the config has one, else of all tokens.

    If `types` is set, `layer_types` or `sliding_window_pattern` (every n-th layer has full
    attention) determines which layers have the window. Otherwise, all layers have it. Source:
    get_sliding_window in vllm/config/model.py, Attention in layers/attention.
    """
    full = FullCache(kv_heads, head_dim)
    kinds = fields.texts("layer_types")
    if other := set(kinds) - _KINDS_OF_ATTENTION:
        raise FleetError(
            f"config.json of {fields.name}: `{fields.path}layer_types` has "
            f"{', '.join(sorted(other))}, but gpufleet does not know these kinds of layers for "
            "this class, and does not guess the model's size: set the parallel sizes and "
            "`--gpu-memory-utilization` yourself"
        )
    window = fields.value("sliding_window")
    if (
        not isinstance(window, int)
        or window <= 0
        or not fields.flag("use_sliding_window", default=True)
    ):
        return (full,) * layers
    sliding = WindowCache(kv_heads, head_dim, window)
    if types and kinds:
        if len(kinds) != layers:
            raise FleetError(
                f"config.json of {fields.name}: `layer_types` has {len(kinds)} entries, but "
                f"`num_hidden_layers` is {layers}: use the publisher's original file"
            )
        return tuple(sliding if kind == "sliding_attention" else full for kind in kinds)
    pattern = fields.value("sliding_window_pattern", "interleaved_sliding_window_pattern")
    if types and isinstance(pattern, int) and pattern > 0:
        return tuple(full if (layer + 1) % pattern == 0 else sliding for layer in range(layers))
    if types and isinstance(pattern, str) and pattern:
        return tuple(
            sliding if pattern[layer % len(pattern)] == "L" else full for layer in range(layers)
        )
    return (sliding,) * layers


def uniform_layers(weights: tuple[Weight, ...], caches: Sequence[Cache]) -> tuple[Layer, ...]:
    """Return layers that all have these weights. Layers with equal caches are the same object."""
    made: dict[Cache, Layer] = {}
    return tuple(made.setdefault(cache, Layer(weights, cache)) for cache in caches)


def wrap_layers(
    fields: Fields,
    *,
    layers: tuple[Layer, ...],
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    tied: bool,
    final: Part | None,
    parts: tuple[Part, ...] = (),
    embedding_name: str = "model.embed_tokens",
    head_name: str = "lm_head",
    head_bias: bool = False,
    prefix: str = "model.layers.",
    pipeline: bool = True,
    vocab: int | None = None,
    notes: tuple[str, ...] = (),
) -> Architecture:
    """Return the whole decoder: its layers between the embedding and the head."""
    vocab = fields.whole("vocab_size", "padded_vocab_size") if vocab is None else vocab
    whole = [embedding(vocab, hidden, embedding_name), *parts]
    if final:
        whole.append(final)
    if not tied:
        whole.append(head(vocab, hidden, head_name, bias=head_bias))
    return Architecture(
        name=fields.name,
        hidden_size=hidden,
        vocab_size=vocab,
        heads=heads,
        kv_heads=kv_heads,
        layers=layers,
        parts=tuple(whole),
        max_model_len=max_model_len(fields.config),
        dtype=default_dtype(fields),
        tied=tied,
        intermediate_size=intermediate,
        pipeline=pipeline,
        prefix=prefix,
        notes=notes,
    )
