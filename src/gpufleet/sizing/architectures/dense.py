"""
Decoders whose layers are all alike: attention over the whole context and one MLP.  Pure.

The small functions make the parts that every family has; other modules of this package use them
too. Which of vLLM's layers a weight is in decides how it is divided: its classes under
model_executor/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import (
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


def rotary(
    positions: int,
    dim: int,
    *,
    dtype: str | None = None,
    tables: int = 1,
    until: tuple[int, ...] | None = None,
) -> Part:
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
        until=until,
    )
    return Part("rotary", (table,), Where.EVERY)


def dtype_of(fields: Fields) -> str:
    """
    Return what `--dtype auto` takes: the checkpoint's, float32 as bfloat16.

    Source: _resolve_auto_dtype in vllm/config/model.py; a GPU before Ampere takes float16 instead.
    """
    stated = fields.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    taken = {"float32": "bfloat16", "float": "bfloat16", "half": "float16"}.get(stated, stated)
    if taken not in {"bfloat16", "float16"}:
        raise FleetError(
            f"config.json of {fields.name}: `{fields.path}torch_dtype` is {stated!r}, which vLLM "
            "does not load; take bfloat16, float16 or float32"
        )
    return taken


def rotary_of(fields: Fields, head_dim: int, *, keys: tuple[str, ...] = ()) -> tuple[Part, ...]:
    """
    Return the rotary tables of a config: () where it has no rotary positions.

    YaRN and linear scaling lengthen the table by their factor, dynamic before 0.22; LongRoPE keeps
    one for short and one for long contexts, and M-RoPE one of four times the positions: for
    Qwen3-VL and Qwen3.5 only before 0.32 (mrope_positions_factor in qwen3_vl.py). Gemma 4's global
    layers have heads of their own size. Source: model_executor/layers/rotary_embedding of 0.8.5
    to 0.33.0.
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
        if kind == "proportional":  # the whole head: what does not rotate stands in it as well
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
The release from which transformers' own class is served, which keeps no rotary table.

Source: _TRANSFORMERS_SUPPORTED_MODELS in model_executor/models/registry.py of each release.
"""


def attention_caches(
    fields: Fields,
    layers: int,
    kv_heads: int,
    head_dim: int,
    *,
    types: bool = False,
    v_head_dim: int | None = None,
) -> tuple[Cache, ...]:
    """
    Return each layer's cache: windows where the config has them.

    `types`: the class gives each layer its own kind, where `layer_types` or
    `sliding_window_pattern` (every n-th is full) say so; else a window holds for all. Source:
    get_sliding_window in vllm/config/model.py, Attention in layers/attention.
    """
    full = FullCache(kv_heads, head_dim, v_head_dim)
    window = fields.value("sliding_window")
    if (
        not isinstance(window, int)
        or window <= 0
        or not fields.flag("use_sliding_window", default=True)
    ):
        return (full,) * layers
    sliding = WindowCache(kv_heads, head_dim, window, v_head_dim)
    kinds = fields.texts("layer_types")
    if types and kinds:
        if len(kinds) != layers:
            raise FleetError(
                f"config.json of {fields.name}: `layer_types` names {len(kinds)} layers, "
                f"`num_hidden_layers` says {layers}; take the file as its publisher has it"
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


@dataclass(frozen=True)
class Style:
    """
    How a family's decoder layer differs from Llama's.  None: the config's own keys say.
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    gated: bool = True
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    head_norm: bool | None = False
    """A norm of one head's size on queries and keys; None: `qk_norm` and its other names say."""
    tied: bool = False
    """Where the config does not say."""
    head_bias: bool = False
    types: bool = False
    """Layers have their own windows."""
    fused: bool = False
    """The checkpoint has `qkv_proj` and `gate_up_proj` (Phi-3)."""
    attention_names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention_prefix: str = "self_attn."
    mlp_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    mlp_prefix: str = "mlp."
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    prefix: str = "model.layers."
    further: Callable[[Fields], tuple[Weight, ...]] | None = None
    """Further weights of each layer."""
    pipeline: bool = True


def llama(config: Mapping[str, Any], name: str, style: Style) -> Architecture:
    """Return a decoder like Llama's: attention, then an MLP, with norms, all layers alike."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size", "n_embd", "d_model")
    heads = fields.whole("num_attention_heads", "n_head", "num_heads")
    layers = fields.whole("num_hidden_layers", "num_layers", "n_layer", "n_layers")
    kv_heads = fields.whole(
        "num_key_value_heads", "num_attention_groups", "n_head_kv", default=heads
    )
    head_dim = fields.whole("head_dim", "kv_channels", default=hidden // max(heads, 1))
    intermediate = fields.whole("intermediate_size", "ffn_hidden_size", "n_inner")
    stated = fields.flag("attention_bias", "bias", "qkv_bias", "use_qkv_bias")
    qkv_bias = fields.flag("qkv_bias", default=stated) if style.qkv_bias is None else style.qkv_bias
    out_bias = (
        fields.flag("attention_out_bias", default=fields.flag("attention_bias", "bias"))
        if style.out_bias is None
        else style.out_bias
    )
    mlp_bias = (
        fields.flag("mlp_bias", "use_mlp_bias", default=False)
        if style.mlp_bias is None
        else style.mlp_bias
    )
    head_norm = (
        fields.flag("qk_norm", "use_qk_norm", "qk_layernorm")
        if style.head_norm is None
        else style.head_norm
    )
    names = ("qkv_proj", "qkv_proj", "qkv_proj", "o_proj") if style.fused else style.attention_names
    mlp_names = ("gate_up_proj", "gate_up_proj", "down_proj") if style.fused else style.mlp_names
    weights = attention(
        hidden,
        heads,
        kv_heads,
        head_dim,
        prefix=style.attention_prefix,
        names=names,
        bias=qkv_bias,
        out_bias=out_bias,
        head_norm=head_norm,
    )
    if style.gated:
        weights += gated_mlp(
            hidden, intermediate, prefix=style.mlp_prefix, names=mlp_names, bias=mlp_bias
        )
    else:
        weights += plain_mlp(
            hidden, intermediate, prefix=style.mlp_prefix, names=mlp_names[1:], bias=mlp_bias
        )
    for each in style.norms:
        weights += norm(each, hidden, bias=style.norm_bias)
    if style.further:
        weights += style.further(fields)
    caches = attention_caches(fields, layers, kv_heads, head_dim, types=style.types)
    return finish(
        fields,
        layers=layers_of(weights, caches),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings", default=style.tied),
        final=final_norm(hidden, style.norm, bias=style.norm_bias) if style.norm else None,
        parts=rotary_of(fields, head_dim),
        embedding_name=style.embedding,
        head_name=style.head,
        head_bias=style.head_bias,
        prefix=style.prefix,
        pipeline=style.pipeline,
    )


def layers_of(weights: tuple[Weight, ...], caches: Sequence[Cache]) -> tuple[Layer, ...]:
    """Return layers of the same weights; those with equal caches are one object."""
    made: dict[Cache, Layer] = {}
    return tuple(made.setdefault(cache, Layer(weights, cache)) for cache in caches)


def finish(
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
        dtype=dtype_of(fields),
        tied=tied,
        intermediate_size=intermediate,
        pipeline=pipeline,
        prefix=prefix,
        notes=notes,
    )


def _wide_norms(fields: Fields) -> tuple[Weight, ...]:
    """OLMo 2 and 3: a norm over all of the queries, and one over all of the keys, on each rank."""
    heads = fields.whole("num_attention_heads")
    hidden = fields.whole("hidden_size")
    head_dim = fields.whole("head_dim", default=hidden // heads)
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    return (
        vector("self_attn.q_norm", heads * head_dim),
        vector("self_attn.k_norm", kv_heads * head_dim),
    )


def _norms_of_each_head(fields: Fields) -> tuple[Weight, ...]:
    """Command R+ and StableLM 2 12B: every head has a norm of its own, divided with the heads."""
    if not fields.flag("use_qk_norm", "qk_layernorm"):
        return ()
    heads = fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", default=fields.whole("hidden_size") // heads)
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    return (
        vector("self_attn.q_norm", heads * head_dim, Split.ROWS),
        vector("self_attn.k_norm", kv_heads * head_dim, Split.HEADS, heads=kv_heads),
    )


def _sinks(fields: Fields) -> tuple[Weight, ...]:
    """Granite with windows: a number for each head, which takes what attention need not give."""
    if not fields.flag("attention_sinks", default=bool(fields.texts("layer_types"))):
        return ()
    return (vector("self_attn.sinks", fields.whole("num_attention_heads"), Split.ROWS),)


def _xielu(_fields: Fields) -> tuple[Weight, ...]:
    """Apertus' activation has two numbers that were learnt."""
    return (vector("mlp.act_fn", 2),)


def _down_bias(fields: Fields) -> tuple[Weight, ...]:
    """TeleChat 2: of the MLP's matrices only the last has a bias."""
    return (vector("mlp.down_proj.bias", fields.whole("hidden_size")),)


def _post_norms(fields: Fields) -> tuple[Weight, ...]:
    """HyperCLOVA X: two norms more where `use_post_norm` says so."""
    if not fields.flag("use_post_norm"):
        return ()
    hidden = fields.whole("hidden_size")
    return norm("post_norm1", hidden) + norm("post_norm2", hidden)


_STYLES: dict[str, Style] = {
    "LlamaForCausalLM": Style(types=True),
    "LLaMAForCausalLM": Style(types=True),
    "LlamaModel": Style(types=True),
    "MistralForCausalLM": Style(types=True),
    "MistralModel": Style(types=True),
    "Ministral3ForCausalLM": Style(types=True),
    "InternLM3ForCausalLM": Style(mlp_bias=None),
    "IQuestCoderForCausalLM": Style(),
    "TeleChat3ForCausalLM": Style(),
    "CwmForCausalLM": Style(types=True),
    "NanbeigeForCausalLM": Style(),
    "AquilaForCausalLM": Style(),
    "AquilaModel": Style(),
    "XverseForCausalLM": Style(),
    "Fairseq2LlamaForCausalLM": Style(),
    "YiForCausalLM": Style(),
    "InternLMForCausalLM": Style(),
    "TeleFLMForCausalLM": Style(qkv_bias=False, out_bias=False),
    "SolarForCausalLM": Style(),
    "GraniteForCausalLM": Style(types=True, further=_sinks),
    "GraniteSWAForCausalLM": Style(types=True, further=_sinks),
    "GritLM": Style(types=True),
    "Ernie4_5ForCausalLM": Style(tied=True),
    "Step1ForCausalLM": Style(tied=True),
    "PanguEmbeddedForCausalLM": Style(),
    "HyperCLOVAXForCausalLM": Style(further=_post_norms),
    "ArceeForCausalLM": Style(gated=False),
    "NemotronForCausalLM": Style(gated=False, norm_bias=True),
    "Jais2ForCausalLM": Style(gated=False, norm_bias=True),
    "OrionForCausalLM": Style(qkv_bias=False, out_bias=False, mlp_bias=False, norm_bias=True),
    "Qwen2ForCausalLM": Style(qkv_bias=True, out_bias=False, mlp_bias=False, head_norm=None),
    "Qwen2Model": Style(qkv_bias=True, out_bias=False, mlp_bias=False, head_norm=None),
    "MiMoForCausalLM": Style(qkv_bias=True, out_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": Style(out_bias=False, mlp_bias=False, head_norm=True),
    "SeedOssForCausalLM": Style(qkv_bias=True, out_bias=False, mlp_bias=False),
    "SmolLM3ForCausalLM": Style(tied=True),
    "ApertusForCausalLM": Style(
        gated=False,
        head_norm=True,
        norms=("attention_layernorm", "feedforward_layernorm"),
        further=_xielu,
    ),
    "GemmaForCausalLM": Style(qkv_bias=False, out_bias=False, mlp_bias=False, tied=True),
    "OlmoForCausalLM": Style(mlp_bias=False, norms=(), norm=""),
    "Olmo2ForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        further=_wide_norms,
        types=True,
    ),
    "Olmo3ForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        further=_wide_norms,
        types=True,
    ),
    "CohereForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        norms=("input_layernorm",),
        further=_norms_of_each_head,
        tied=True,
    ),
    "Cohere2ForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        norms=("input_layernorm",),
        further=_norms_of_each_head,
        tied=True,
        types=True,
    ),
    "StableLmForCausalLM": Style(
        qkv_bias=None, out_bias=False, mlp_bias=False, norm_bias=True, further=_norms_of_each_head
    ),
    "StableLMEpochForCausalLM": Style(
        qkv_bias=None, out_bias=False, mlp_bias=False, norm_bias=True, further=_norms_of_each_head
    ),
    "Phi3ForCausalLM": Style(qkv_bias=False, out_bias=False, mlp_bias=False, fused=True),
    "GlmForCausalLM": Style(
        out_bias=False, mlp_bias=False, mlp_names=("gate_up_proj",) * 2 + ("down_proj",)
    ),
    "Glm4ForCausalLM": Style(
        out_bias=False,
        mlp_bias=False,
        mlp_names=("gate_up_proj", "gate_up_proj", "down_proj"),
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "Exaone4ForCausalLM": Style(
        head_norm=True,
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        types=True,
    ),
    "ExaoneForCausalLM": Style(
        attention_prefix="attn.attention.",
        attention_names=("q_proj", "k_proj", "v_proj", "out_proj"),
        mlp_names=("c_fc_0", "c_fc_1", "c_proj"),
        norms=("ln_1", "ln_2"),
        embedding="transformer.wte",
        norm="transformer.ln_f",
        prefix="transformer.h.",
    ),
    "HunYuanDenseV1ForCausalLM": Style(head_norm=None),
    "InternLM2ForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        attention_prefix="attention.",
        attention_names=("wqkv", "wqkv", "wqkv", "wo"),
        mlp_prefix="feed_forward.",
        mlp_names=("w1", "w3", "w2"),
        norms=("attention_norm", "ffn_norm"),
        embedding="model.tok_embeddings",
        head="output",
    ),
    "BaichuanForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        attention_names=("W_pack", "W_pack", "W_pack", "o_proj"),
    ),
    "BaiChuanForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        attention_names=("W_pack", "W_pack", "W_pack", "o_proj"),
    ),
    "MiniCPMForCausalLM": Style(qkv_bias=False, out_bias=False, mlp_bias=False, tied=True),
    "Plamo3ForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        head_norm=True,
        norms=("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
        types=True,
    ),
}


def _gpt(config: Mapping[str, Any], name: str) -> Architecture:
    """GPT-2 and GPTBigCode: learnt positions, biases, queries of many heads and keys of one."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size", "n_embd")
    heads = fields.whole("num_attention_heads", "n_head")
    layers = fields.whole("num_hidden_layers", "n_layer")
    many = name == "GPTBigCodeForCausalLM" and fields.flag("multi_query", default=True)
    kv_heads = 1 if many else heads
    intermediate = fields.whole("n_inner", "intermediate_size", default=4 * hidden)
    positions = fields.whole("max_position_embeddings", "n_positions")
    head_dim = hidden // max(heads, 1)
    weights = (
        attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            prefix="attn.",
            names=("c_attn", "c_attn", "c_attn", "c_proj"),
            bias=True,
            out_bias=True,
        )
        + plain_mlp(hidden, intermediate, names=("c_fc", "c_proj"), bias=True)
        + norm("ln_1", hidden, bias=True)
        + norm("ln_2", hidden, bias=True)
    )
    learnt = Weight("transformer.wpe", positions, hidden, linear=False)
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings", default=True),
        final=final_norm(hidden, "transformer.ln_f", bias=True),
        parts=(Part("positions", (learnt,), Where.EVERY),),
        embedding_name="transformer.wte",
        prefix="transformer.h.",
    )


def _gpt_j(config: Mapping[str, Any], name: str) -> Architecture:
    """GPT-J: one norm for attention and MLP side by side; the head has a bias."""
    fields = Fields(config, name)
    hidden = fields.whole("n_embd", "hidden_size")
    heads = fields.whole("n_head", "num_attention_heads")
    layers = fields.whole("n_layer", "num_hidden_layers")
    intermediate = fields.whole("n_inner", "intermediate_size", default=4 * hidden)
    head_dim = hidden // max(heads, 1)
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            prefix="attn.",
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
        )
        + plain_mlp(hidden, intermediate, names=("fc_in", "fc_out"), bias=True)
        + norm("ln_1", hidden, bias=True)
    )
    positions = fields.whole("max_position_embeddings", "n_positions", default=8192)
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=False,
        final=final_norm(hidden, "transformer.ln_f", bias=True),
        parts=(rotary(positions, fields.whole("rotary_dim", default=64)),),
        embedding_name="transformer.wte",
        head_bias=True,
        prefix="transformer.h.",
    )


def _gpt_neox(config: Mapping[str, Any], name: str) -> Architecture:
    """GPT-NeoX and Pythia: queries, keys and values in one weight, biases, two norms."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    intermediate = fields.whole("intermediate_size")
    bias = fields.flag("attention_bias", default=True)
    head_dim = hidden // max(heads, 1)
    fused = "query_key_value"
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            prefix="attention.",
            names=(fused, fused, fused, "dense"),
            bias=bias,
            out_bias=bias,
        )
        + plain_mlp(hidden, intermediate, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
        + norm("post_attention_layernorm", hidden, bias=True)
    )
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings"),
        final=final_norm(hidden, "gpt_neox.final_layer_norm", bias=True),
        parts=rotary_of(fields, head_dim),
        embedding_name="gpt_neox.embed_in",
        head_name="embed_out",
        prefix="gpt_neox.layers.",
    )


def _falcon(config: Mapping[str, Any], name: str) -> Architecture:
    """Falcon 7B, 40B, 180B and 11B: attention and MLP side by side, one or two norms."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size", "n_embed")
    heads = fields.whole("num_attention_heads", "n_head")
    layers = fields.whole("num_hidden_layers", "n_layer")
    new = fields.flag("new_decoder_architecture")
    if new:
        kv_heads = fields.whole("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    head_dim = hidden // max(heads, 1)
    intermediate = 4 * hidden
    bias = fields.flag("bias")
    fused = "query_key_value"
    weights = attention(
        hidden,
        heads,
        kv_heads,
        head_dim,
        prefix="self_attention.",
        names=(fused, fused, fused, "dense"),
        bias=bias,
        out_bias=bias,
    ) + plain_mlp(hidden, intermediate, names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias)
    parallel_norms = fields.whole("num_ln_in_parallel_attn", default=2 if new else 1)
    if parallel_norms == 2:
        weights += norm("ln_attn", hidden, bias=True) + norm("ln_mlp", hidden, bias=True)
    else:
        weights += norm("input_layernorm", hidden, bias=True)
        if not fields.flag("parallel_attn", default=True) and not new:
            weights += norm("post_attention_layernorm", hidden, bias=True)
    rotary_parts = () if fields.flag("alibi") else rotary_of(fields, head_dim)
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings", default=True),
        final=final_norm(hidden, "transformer.ln_f", bias=True),
        parts=rotary_parts,
        embedding_name="transformer.word_embeddings",
        prefix="transformer.h.",
    )


def _bloom(config: Mapping[str, Any], name: str) -> Architecture:
    """Bloom: ALiBi, so no table of positions; a norm after the embedding."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size", "n_embed")
    heads = fields.whole("num_attention_heads", "n_head")
    layers = fields.whole("num_hidden_layers", "n_layer")
    head_dim = hidden // max(heads, 1)
    fused = "query_key_value"
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            prefix="self_attention.",
            names=(fused, fused, fused, "dense"),
            bias=True,
            out_bias=True,
        )
        + plain_mlp(hidden, 4 * hidden, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
        + norm("post_attention_layernorm", hidden, bias=True)
    )
    first = Part(
        "embedding norm",
        norm("transformer.word_embeddings_layernorm", hidden, bias=True),
        Where.EVERY,
    )
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=4 * hidden,
        tied=fields.flag("tie_word_embeddings", default=True),
        final=final_norm(hidden, "transformer.ln_f", bias=True),
        parts=(first,),
        embedding_name="transformer.word_embeddings",
        prefix="transformer.h.",
    )


def _opt(config: Mapping[str, Any], name: str) -> Architecture:
    """OPT: learnt positions (two more than stated) and, in 350M, an embedding of another width."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    intermediate = fields.whole("ffn_dim")
    width = fields.whole("word_embed_proj_dim", default=hidden)
    positions = fields.whole("max_position_embeddings", default=2048)
    bias = fields.flag("enable_bias", default=True)
    head_dim = hidden // max(heads, 1)
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
            bias=bias,
            out_bias=bias,
        )
        + plain_mlp(hidden, intermediate, prefix="", names=("fc1", "fc2"), bias=bias)
        + norm("self_attn_layer_norm", hidden, bias=True)
        + norm("final_layer_norm", hidden, bias=True)
    )
    learnt = Weight("model.decoder.embed_positions", positions + 2, hidden, linear=False)
    parts = [Part("positions", (learnt,), Where.EVERY)]
    if width != hidden:
        parts.append(
            Part(
                "projections",
                (
                    Weight("model.decoder.project_in", hidden, width),
                    Weight("model.decoder.project_out", width, hidden),
                ),
                Where.EVERY,
            )
        )
    normed = fields.flag("do_layer_norm_before", default=True) and not fields.flag(
        "_remove_final_layer_norm"
    )
    built = finish(
        fields,
        layers=layers_of(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings", default=True),
        final=final_norm(hidden, "model.decoder.final_layer_norm", bias=True) if normed else None,
        parts=tuple(parts),
        prefix="model.decoder.layers.",
    )
    if width == hidden:
        return built
    narrow = embedding(built.vocab_size, width, "model.decoder.embed_tokens")
    return replace(built, parts=(narrow, *built.parts[1:]))


def _mpt(config: Mapping[str, Any], name: str) -> Architecture:
    """MPT: ALiBi, no biases in the published models; the head is the embedding."""
    fields = Fields(config, name)
    hidden = fields.whole("d_model")
    heads = fields.whole("n_heads")
    layers = fields.whole("n_layers")
    inner = fields.below("attn_config")
    kv_heads = inner.whole("kv_n_heads", default=heads) if inner else heads
    head_dim = hidden // max(heads, 1)
    intermediate = int(fields.number("expansion_ratio", default=4) * hidden)
    bias = not fields.flag("no_bias", default=True)
    weights = (
        attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            prefix="attn.",
            names=("Wqkv", "Wqkv", "Wqkv", "out_proj"),
            bias=bias,
            out_bias=bias,
        )
        + plain_mlp(hidden, intermediate, prefix="ffn.", bias=bias)
        + norm("norm_1", hidden, bias=bias)
        + norm("norm_2", hidden, bias=bias)
    )
    if inner and inner.flag("qk_ln"):
        weights += norm("attn.q_ln", hidden, bias=bias) + norm("attn.k_ln", hidden, bias=bias)
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=True,
        final=final_norm(hidden, "transformer.norm_f", bias=bias),
        embedding_name="transformer.wte",
        prefix="transformer.blocks.",
    )


def _phi(config: Mapping[str, Any], name: str) -> Architecture:
    """Phi-1, 1.5 and 2: one norm for attention and MLP side by side, biases everywhere."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    intermediate = fields.whole("intermediate_size", "n_inner", default=4 * hidden)
    head_dim = hidden // max(heads, 1)
    weights = (
        attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            names=("q_proj", "k_proj", "v_proj", "dense"),
            bias=True,
            out_bias=True,
        )
        + plain_mlp(hidden, intermediate, names=("fc1", "fc2"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
    )
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=False,
        final=final_norm(hidden, "model.final_layernorm", bias=True),
        parts=rotary_of(fields, head_dim),
        head_bias=True,
    )


def _persimmon(config: Mapping[str, Any], name: str) -> Architecture:
    """Persimmon: biases everywhere, a norm with a bias on each head's queries and keys."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    intermediate = fields.whole("intermediate_size")
    head_dim = hidden // max(heads, 1)
    fused = "query_key_value"
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            names=(fused, fused, fused, "dense"),
            bias=True,
            out_bias=True,
        )
        + plain_mlp(hidden, intermediate, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
        + norm("post_attention_layernorm", hidden, bias=True)
    )
    if fields.flag("qk_layernorm", default=True):
        weights += norm("self_attn.q_layernorm", head_dim, bias=True)
        weights += norm("self_attn.k_layernorm", head_dim, bias=True)
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=False,
        final=final_norm(hidden, "model.final_layernorm", bias=True),
        parts=rotary_of(fields, head_dim),
    )


def _chatglm(config: Mapping[str, Any], name: str) -> Architecture:
    """ChatGLM 2 and 3, GLM-4-9B: fused weights, biases on queries, keys and values only."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_layers", "num_hidden_layers")
    kv_heads = (
        fields.whole("multi_query_group_num") if fields.flag("multi_query_attention") else heads
    )
    head_dim = fields.whole("kv_channels", default=hidden // max(heads, 1))
    intermediate = fields.whole("ffn_hidden_size")
    bias = fields.flag("add_bias_linear")
    fused = "query_key_value"
    weights = (
        attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            prefix="self_attention.",
            names=(fused, fused, fused, "dense"),
            bias=bias or fields.flag("add_qkv_bias"),
            out_bias=bias,
        )
        + gated_mlp(
            hidden,
            intermediate,
            names=("dense_h_to_4h", "dense_h_to_4h", "dense_4h_to_h"),
            bias=bias,
        )
        + norm("input_layernorm", hidden, bias=not fields.flag("rmsnorm", default=True))
        + norm("post_attention_layernorm", hidden, bias=not fields.flag("rmsnorm", default=True))
    )
    positions = fields.whole("seq_length", default=8192)
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings"),
        final=final_norm(hidden, "transformer.encoder.final_layernorm"),
        parts=(rotary(positions, head_dim // 2),),
        embedding_name="transformer.embedding.word_embeddings",
        head_name="transformer.output_layer",
        prefix="transformer.encoder.layers.",
        vocab=fields.whole("padded_vocab_size", "vocab_size"),
    )


def _qwen(config: Mapping[str, Any], name: str) -> Architecture:
    """Qwen of 2023: one weight for queries, keys and values, an MLP of half the stated width."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    head_dim = fields.whole("kv_channels", default=hidden // max(heads, 1))
    intermediate = fields.whole("intermediate_size") // 2
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            prefix="attn.",
            names=("c_attn", "c_attn", "c_attn", "c_proj"),
            bias=True,
        )
        + gated_mlp(hidden, intermediate, names=("w2", "w1", "c_proj"))
        + norm("ln_1", hidden)
        + norm("ln_2", hidden)
    )
    return finish(
        fields,
        layers=layers_of(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings"),
        final=final_norm(hidden, "transformer.ln_f"),
        parts=rotary_of(fields, head_dim),
        embedding_name="transformer.wte",
        prefix="transformer.h.",
    )


def _telechat2(config: Mapping[str, Any], name: str) -> Architecture:
    """TeleChat 2: Llama's layers under other keys; biases on what writes to the residual."""
    fields = Fields(config, name)
    renamed = {
        "num_hidden_layers": fields.whole("n_layer", "num_hidden_layers"),
        "num_attention_heads": fields.whole("n_head", "num_attention_heads"),
        "intermediate_size": fields.whole("ffn_hidden_size", "intermediate_size"),
        "max_position_embeddings": fields.whole("seq_length", "max_position_embeddings"),
    }
    return llama({**config, **renamed}, name, _TELECHAT2)


def _starcoder2(config: Mapping[str, Any], name: str) -> Architecture:
    """StarCoder 2: one key for the biases of attention and MLP, which are there untold."""
    bias = Fields(config, name).flag("use_bias", default=True)
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        gated=False,
        norm_bias=True,
        mlp_names=("", "c_fc", "c_proj"),
        tied=True,
    )
    return llama(config, name, style)


_TELECHAT2 = Style(out_bias=True, mlp_bias=False, qkv_bias=False, further=_down_bias)


def _deci(config: Mapping[str, Any], name: str) -> Architecture:
    """Nemotron-NAS: each layer with its own MLP, its own KV heads, or without attention."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", default=hidden // max(heads, 1))
    blocks = fields.value("block_configs")
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise fields.missing("block_configs")
    bias = fields.flag("attention_bias", "bias")
    layers: list[Layer] = []
    widest, most = 0, 1
    for number, block in enumerate(blocks):
        attended = Fields(block.get("attention") or {}, name, f"block_configs[{number}].attention.")
        forward = Fields(block.get("ffn") or {}, name, f"block_configs[{number}].ffn.")
        if attended.flag("replace_with_linear") or forward.flag("replace_with_linear"):
            raise FleetError(
                f"config.json of {name}: block_configs[{number}] replaces a part with a linear "
                "layer, which vLLM does not load either; take a model without it"
            )
        weights: tuple[Weight, ...] = ()
        cache: Cache | None = None
        if not attended.flag("no_op"):
            kv_heads = (
                heads // attended.whole("n_heads_in_group")
                if attended.value("n_heads_in_group")
                else attended.whole(
                    "num_key_value_heads",
                    default=fields.whole("num_key_value_heads", default=heads),
                )
            )
            weights += attention(hidden, heads, kv_heads, head_dim, bias=bias, out_bias=bias)
            weights += norm("input_layernorm", hidden)
            cache = FullCache(kv_heads, head_dim)
            most = max(most, kv_heads)
        if not forward.flag("no_op"):
            width = (
                _rounded(2 * float(forward.number("ffn_mult", default=0)) * hidden / 3)
                if forward.value("ffn_mult") is not None
                else forward.whole("intermediate_size")
            )
            weights += gated_mlp(hidden, width, bias=fields.flag("mlp_bias"))
            weights += norm("post_attention_layernorm", hidden)
            widest = max(widest, width)
        layers.append(Layer(weights, cache))
    same: dict[Layer, Layer] = {}
    return finish(
        fields,
        layers=tuple(same.setdefault(layer, layer) for layer in layers),
        hidden=hidden,
        heads=heads,
        kv_heads=most,
        intermediate=widest,
        tied=fields.flag("tie_word_embeddings"),
        final=final_norm(hidden),
        parts=rotary_of(fields, head_dim),
    )


def _rounded(width: float) -> int:
    """As _ffn_mult_to_intermediate_size in vLLM's nemotron_nas.py: up to a multiple of 256."""
    return -(-int(width) // 256) * 256


def _minicpm(config: Mapping[str, Any], name: str) -> Architecture:
    if config.get("num_experts"):
        raise FleetError(
            f"{name} with `num_experts` in config.json is the MoE variant, which is not known; "
            "its size is not guessed: take the dense variant"
        )
    return llama(config, name, _STYLES[name])


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **{name: partial(llama, name=name, style=style) for name, style in _STYLES.items()},
    **{
        name: partial(build, name=name)
        for build, names in (
            (_gpt, ("GPT2LMHeadModel", "GPTBigCodeForCausalLM")),
            (_gpt_j, ("GPTJForCausalLM",)),
            (_gpt_neox, ("GPTNeoXForCausalLM",)),
            (_falcon, ("FalconForCausalLM", "RWForCausalLM")),
            (_bloom, ("BloomForCausalLM",)),
            (_opt, ("OPTForCausalLM",)),
            (_mpt, ("MPTForCausalLM", "MptForCausalLM")),
            (_phi, ("PhiForCausalLM",)),
            (_chatglm, ("ChatGLMModel", "ChatGLMForConditionalGeneration")),
            (_qwen, ("QWenLMHeadModel",)),
            (_telechat2, ("TeleChat2ForCausalLM", "TeleChatForCausalLM")),
            (_persimmon, ("PersimmonForCausalLM",)),
            (_starcoder2, ("Starcoder2ForCausalLM",)),
            (_deci, ("DeciLMForCausalLM",)),
            (_minicpm, ("MiniCPMForCausalLM",)),
        )
        for name in names
    },
}
"""Each name that `architectures` may have, with what reads such a config."""
