"""
Describe decoders with equal layers: attention over the whole context and one MLP.  Pure.

A `Style` describes how the layers of a family differ from Llama's. Families that no style can
describe are in `dense_irregular.py`. vLLM's layer for a weight determines how TP divides the
weight: see the classes in model_executor/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures import dense_irregular
from gpufleet.sizing.architectures.building_blocks import (
    attention,
    attention_caches,
    final_norm,
    gated_mlp,
    norm,
    plain_mlp,
    rotary_tables,
    uniform_layers,
    vector,
    wrap_layers,
)
from gpufleet.sizing.architectures.components import Architecture, Split, Weight
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.unread_keys import with_values


@dataclass(frozen=True)
class Style:
    """
    How a family's decoder layers differ from Llama's. If a field is None, the config decides.
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    gated: bool = True
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    head_norm: bool | None = False
    """
    Whether queries and keys have a norm of one head's size. None means that `qk_norm` or one of its
    aliases in the config decides.
    """
    tied: bool = False
    """Value of `tie_word_embeddings` if the config does not have this key."""
    head_bias: bool = False
    types: bool = False
    """Whether each layer has its own window."""
    fused: bool = False
    """Whether the checkpoint has `qkv_proj` and `gate_up_proj` (Phi-3)."""
    attention_names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention_prefix: str = "self_attn."
    mlp_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    mlp_prefix: str = "mlp."
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    prefix: str = "model.layers."
    further: Callable[[Fields], tuple[Weight, ...]] | None = None
    """Function that returns further weights of each layer."""
    pipeline: bool = True
    """Whether vLLM's class can be divided into pipeline stages."""


def llama(config: Mapping[str, Any], name: str, style: Style) -> Architecture:
    """
    Return the architecture of a decoder like Llama, with equal layers of attention, MLP and norms.
    """
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
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, caches),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings", default=style.tied),
        final=final_norm(hidden, style.norm, bias=style.norm_bias) if style.norm else None,
        parts=rotary_tables(fields, head_dim),
        embedding_name=style.embedding,
        head_name=style.head,
        head_bias=style.head_bias,
        prefix=style.prefix,
        pipeline=style.pipeline,
    )


def _wide_norms(fields: Fields) -> tuple[Weight, ...]:
    """
    Return the norms of OLMo 2 and 3 over all queries and over all keys. Each rank has them whole.
    """
    heads = fields.whole("num_attention_heads")
    hidden = fields.whole("hidden_size")
    head_dim = fields.whole("head_dim", default=hidden // heads)
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    return (
        vector("self_attn.q_norm", heads * head_dim),
        vector("self_attn.k_norm", kv_heads * head_dim),
    )


def _norms_of_each_head(fields: Fields) -> tuple[Weight, ...]:
    """Return the norms of each head in Command R+ and StableLM 2 12B. TP divides them by heads."""
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
    """
    Return the attention sinks of Granite with windows: one number for each head.

    A sink absorbs attention that no token needs.
    """
    if not fields.flag("attention_sinks", default=bool(fields.texts("layer_types"))):
        return ()
    return (vector("self_attn.sinks", fields.whole("num_attention_heads"), Split.ROWS),)


def _xielu(_fields: Fields) -> tuple[Weight, ...]:
    """Return the two learnt parameters of Apertus' activation."""
    return (vector("mlp.act_fn", 2),)


def _down_bias(fields: Fields) -> tuple[Weight, ...]:
    """Return the bias of the MLP's last matrix in TeleChat 2. The other matrices have no bias."""
    return (vector("mlp.down_proj.bias", fields.whole("hidden_size")),)


def _post_norms(fields: Fields) -> tuple[Weight, ...]:
    """Return HyperCLOVA X's two additional norms if `use_post_norm` is set."""
    if not fields.flag("use_post_norm"):
        return ()
    hidden = fields.whole("hidden_size")
    return norm("post_norm1", hidden) + norm("post_norm2", hidden)


_STYLES: dict[str, Style] = {
    "LlamaForCausalLM": Style(types=True),
    "IQuestCoderForCausalLM": Style(),
    "TeleFLMForCausalLM": Style(qkv_bias=False, out_bias=False),
    "GraniteForCausalLM": Style(types=True, further=_sinks),
    "Ernie4_5ForCausalLM": Style(tied=True),
    "HyperCLOVAXForCausalLM": Style(further=_post_norms),
    "ArceeForCausalLM": Style(gated=False),
    "NemotronForCausalLM": Style(gated=False, norm_bias=True),
    "OrionForCausalLM": Style(qkv_bias=False, out_bias=False, mlp_bias=False, norm_bias=True),
    "Qwen2ForCausalLM": Style(qkv_bias=True, out_bias=False, mlp_bias=False, head_norm=None),
    "MiMoForCausalLM": Style(qkv_bias=True, out_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": Style(out_bias=False, mlp_bias=False, head_norm=True),
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
    "Plamo3ForCausalLM": Style(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        head_norm=True,
        norms=("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
        types=True,
    ),
}

_SAME_STYLE: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": (
        "LLaMAForCausalLM",
        "LlamaModel",
        "MistralForCausalLM",
        "MistralModel",
        "Ministral3ForCausalLM",
        "CwmForCausalLM",
        "GritLM",
    ),
    "IQuestCoderForCausalLM": (
        "InternLM3ForCausalLM",
        "TeleChat3ForCausalLM",
        "NanbeigeForCausalLM",
        "AquilaForCausalLM",
        "AquilaModel",
        "XverseForCausalLM",
        "Fairseq2LlamaForCausalLM",
        "YiForCausalLM",
        "InternLMForCausalLM",
        "SolarForCausalLM",
        "PanguEmbeddedForCausalLM",
    ),
    "GraniteForCausalLM": ("GraniteSWAForCausalLM",),
    "Ernie4_5ForCausalLM": (
        "Step1ForCausalLM",
        "SmolLM3ForCausalLM",
    ),
    "NemotronForCausalLM": ("Jais2ForCausalLM",),
    "Qwen2ForCausalLM": ("Qwen2Model",),
    "MiMoForCausalLM": ("SeedOssForCausalLM",),
    "GemmaForCausalLM": ("MiniCPMForCausalLM",),
    "Olmo2ForCausalLM": ("Olmo3ForCausalLM",),
    "StableLmForCausalLM": ("StableLMEpochForCausalLM",),
    "BaichuanForCausalLM": ("BaiChuanForCausalLM",),
}
"""Further families whose layers are those of a family in `_STYLES`."""

_STYLES |= {name: _STYLES[family] for family, names in _SAME_STYLE.items() for name in names}


def _telechat2(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Return the architecture of TeleChat 2.

    It has Llama's layers with different keys in the config, and biases on the outputs of attention
    and MLP.
    """
    fields = Fields(config, name)
    renamed = {
        "num_hidden_layers": fields.whole("n_layer", "num_hidden_layers"),
        "num_attention_heads": fields.whole("n_head", "num_attention_heads"),
        "intermediate_size": fields.whole("ffn_hidden_size", "intermediate_size"),
        "max_position_embeddings": fields.whole("seq_length", "max_position_embeddings"),
    }
    return llama(with_values(config, renamed), name, _TELECHAT2)


def _starcoder2(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe StarCoder 2. One key, which is true by default, sets the biases of attention and MLP.
    """
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


def _minicpm(config: Mapping[str, Any], name: str) -> Architecture:
    if config.get("num_experts"):
        raise FleetError(
            f"{name} with `num_experts` in config.json is the MoE variant. gpufleet does not know "
            "this variant, and cannot estimate its size: use the dense variant"
        )
    return llama(config, name, _STYLES[name])


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **dense_irregular.BUILDERS,
    **{name: partial(llama, name=name, style=style) for name, style in _STYLES.items()},
    **{
        name: partial(build, name=name)
        for build, names in (
            (_telechat2, ("TeleChat2ForCausalLM", "TeleChatForCausalLM")),
            (_starcoder2, ("Starcoder2ForCausalLM",)),
            (_minicpm, ("MiniCPMForCausalLM",)),
        )
        for name in names
    },
}
"""The builder of each architecture, by its name in `architectures`."""
