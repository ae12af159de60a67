"""
Describe decoders with a mixture of experts: a router and many small MLPs in most layers.  Pure.

A `Family` describes how the layers of a family differ from the usual ones. Shapes and names come
from checkpoints of the family. The division over ranks comes from its class in vLLM's
model_executor/models of 0.33.0. If 0.33.0 does not have the family, the last release with the
family was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpufleet.sizing.architectures import moe_irregular, moe_mixed_attention
from gpufleet.sizing.architectures.building_blocks import (
    attention,
    gated_mlp,
    norm,
    rotary_tables,
    vector,
)
from gpufleet.sizing.architectures.components import Architecture, Layer, Split, Weight
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.moe_common import (
    GATED,
    NUMBERED,
    assemble,
    draft_weights,
    first_whole,
    head_size,
    is_dense_layer,
    layer_caches,
    named_fields,
    routed_experts,
    too_short_error,
)
from gpufleet.sizing.architectures.unread_keys import with_values


@dataclass(frozen=True)
class Family:
    """How a family of decoders with experts differs from Qwen3's mixture of experts."""

    experts: tuple[str, ...] = ("num_experts",)
    """Keys in the config for the number of routed experts."""
    expert_size: tuple[str, ...] = ("moe_intermediate_size",)
    """Keys in the config for the inner size of an expert."""
    dense_size: tuple[str, ...] = ("intermediate_size",)
    """Keys in the config for the inner size of the MLP in layers without experts."""
    block: str = "mlp."
    matrices: tuple[str, str, str] = GATED
    router: str = "gate"
    router_dtype: str | None = None
    correction: str = ""
    """
    Name of the router's float32 vector with a correction for each expert; "" if there is none.
    """
    shared: Callable[[Fields], int] = lambda _: 0
    """Function that returns the inner size of all shared experts together; 0 if there are none."""
    shared_block: str = "shared_experts."
    shared_gate: bool = False
    dense: Callable[[Fields, int], bool] = lambda _fields, _index: False
    """Function that returns whether the layer with this index has an MLP instead of experts."""
    qkv_bias: Callable[[Fields], bool] = lambda _: False
    out_bias: Callable[[Fields], bool] = lambda _: False
    mlp_bias: Callable[[Fields], bool] = lambda _: False
    head_norm: Callable[[Fields], bool] = lambda _: False
    """Function that returns whether queries and keys have a norm of one head's size."""
    more: Callable[[Fields, int, int, int, int], tuple[Weight, ...]] = lambda *_: ()
    """
    Function that returns further weights of a layer, from the config, the layer's index, the
    numbers of heads and KV heads, and the head size.
    """
    attention_prefix: str = "self_attn."
    attention_names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    head_bias: bool = False
    embedding: str = "model.embed_tokens"
    tied: bool = False
    """Value of `tie_word_embeddings` if the config does not have this key."""
    drafts: tuple[str, ...] = ()
    """
    Keys in the config for the number of multi-token prediction layers. Each of these layers has
    experts.
    """


def build(name: str, family: Family, config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a config of this family describes."""
    fields = named_fields(config, name)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    head_dim = head_size(fields, heads)
    experts, inner = fields.whole(*family.experts), first_whole(fields, *family.expert_size)
    dense = fields.whole(*family.dense_size, default=0)
    every = attention(
        hidden,
        heads,
        kv_heads,
        head_dim,
        prefix=family.attention_prefix,
        names=family.attention_names,
        bias=family.qkv_bias(fields),
        out_bias=family.out_bias(fields),
        head_norm=family.head_norm(fields),
    ) + tuple(w for name in family.norms for w in norm(name, hidden, bias=family.norm_bias))
    mlp = gated_mlp(hidden, dense, prefix=family.block, bias=family.mlp_bias(fields))
    mixture = _mixture(family, fields, hidden, inner, experts)
    layers = []
    caches = layer_caches(fields, fields.whole("num_hidden_layers"), kv_heads, head_dim)
    for index, cache in enumerate(caches):
        own = family.more(fields, index, heads, kv_heads, head_dim)
        feed_forward = mlp if not experts or family.dense(fields, index) else mixture
        layers.append(Layer(every + own + feed_forward, cache))
    drafts = fields.whole(*family.drafts, default=0) if family.drafts else 0
    return assemble(
        fields,
        layers,
        draft_layers=[Layer(draft_weights(hidden) + every + mixture, caches[-1])] * drafts,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        tied=family.tied,
        embedding_name=family.embedding,
        norm_bias=family.norm_bias,
        head_bias=family.head_bias,
        further=rotary_tables(fields, head_dim),
    )


def _mixture(
    family: Family, fields: Fields, hidden: int, inner: int, experts: int
) -> tuple[Weight, ...]:
    weights = routed_experts(
        hidden,
        inner,
        experts,
        prefix=family.block,
        matrices=family.matrices,
        router=family.router,
        router_dtype=family.router_dtype,
        correction=family.correction,
    )
    if shared := family.shared(fields):
        prefix = family.block + family.shared_block
        weights += gated_mlp(hidden, shared, prefix=prefix, bias=family.mlp_bias(fields))
        if family.shared_gate:
            weights += (Weight(f"{family.block}shared_expert_gate", 1, hidden, linear=False),)
    return weights


def _is_listed_dense(fields: Fields, index: int) -> bool:
    """
    Return whether the config lists a layer as dense.

    Source: Qwen3MoeDecoderLayer in qwen3_moe.py.
    """
    step = fields.whole("decoder_sparse_step", default=1) or 1
    return index in fields.wholes("mlp_only_layers") or (index + 1) % step != 0


def _is_ernie_dense(fields: Fields, index: int) -> bool:
    """
    Return whether an Ernie layer is dense.

    If a value is a list, it has one value for text experts and one for image experts. Source:
    Ernie4_5_MoeDecoderLayer in ernie45_moe.py.
    """
    last = fields.whole("num_hidden_layers") - 1
    first = (
        first_whole(fields, "moe_layer_start_index") if fields.value("moe_layer_start_index") else 0
    )
    ends = fields.wholes("moe_layer_end_index")
    end = max(ends) if ends else fields.whole("moe_layer_end_index", default=last)
    every = fields.whole("moe_layer_interval", default=1) or 1
    return not (first <= index <= end and (index + 1) % every == 0)


def _product_of(count: str, size: str = "moe_intermediate_size") -> Callable[[Fields], int]:
    """
    Return a function that computes the inner size of all shared experts: `count` x one's size.
    """
    return lambda fields: (
        count_of * first_whole(fields, size) if (count_of := fields.whole(count, default=0)) else 0
    )


def _whole_norms(
    _fields: Fields, _index: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Weight, ...]:
    """Return norms over all queries and over all keys. Each rank has them whole (olmoe.py)."""
    return (
        vector("self_attn.q_norm", heads * head_dim),
        vector("self_attn.k_norm", kv_heads * head_dim),
    )


def _divided_norms(
    fields: Fields, _index: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Weight, ...]:
    """
    Return norms over all queries and over all keys. TP divides them (MiniMaxText01RMSNormTP).
    """
    if not fields.flag("use_qk_norm", default=True):
        return ()
    return (
        vector("self_attn.q_norm", heads * head_dim, Split.ROWS),
        vector("self_attn.k_norm", kv_heads * head_dim, Split.HEADS, heads=kv_heads),
    )


def _output_gate(
    fields: Fields, _index: int, heads: int, _kv_heads: int, head_dim: int
) -> tuple[Weight, ...]:
    """Return a gate on attention's output (afmoe.py)."""
    return (
        Weight("self_attn.gate_proj", heads * head_dim, fields.whole("hidden_size"), Split.ROWS),
    )


def _attention_bias(fields: Fields) -> bool:
    return fields.flag("attention_bias", "qkv_bias")


def _use_bias(fields: Fields) -> bool:
    return fields.flag("use_bias")


def _always(_: Fields) -> bool:
    return True


_QWEN3 = Family(
    dense=_is_listed_dense,
    qkv_bias=_attention_bias,
    head_norm=_always,
    shared=lambda fields: fields.whole("shared_expert_intermediate_size", default=0),
    shared_block="shared_expert.",
    shared_gate=True,
)
_MIXTRAL = Family(
    experts=("num_local_experts",),
    expert_size=("intermediate_size",),
    block="block_sparse_moe.",
    matrices=NUMBERED,
)
_BAILING = Family(
    dense=is_dense_layer,
    shared=lambda fields: (
        fields.whole("num_shared_experts", default=0)
        * fields.whole("moe_shared_expert_intermediate_size", "moe_intermediate_size")
    ),
    qkv_bias=lambda fields: fields.flag("use_bias") or fields.flag("use_qkv_bias"),
    out_bias=_use_bias,
    mlp_bias=_use_bias,
    head_norm=lambda fields: fields.flag("use_qk_norm"),
    attention_prefix="attention.",
    attention_names=("query_key_value", "query_key_value", "query_key_value", "dense"),
    embedding="model.word_embeddings",
)
_COHERE = Family(
    expert_size=("intermediate_size",),
    dense_size=("prefix_dense_intermediate_size", "intermediate_size"),
    dense=lambda fields, index: fields.texts("mlp_layer_types")[index] == "dense",
    shared=_product_of("num_shared_experts", "intermediate_size"),
    norms=("input_layernorm",),
    tied=True,
)
_EXAONE = Family(
    dense=is_dense_layer,
    correction="e_score_correction_bias",
    shared=_product_of("num_shared_experts"),
    qkv_bias=_attention_bias,
    out_bias=_attention_bias,
    head_norm=_always,
)

FAMILIES: dict[str, Family] = {
    "AfmoeForCausalLM": Family(
        dense=is_dense_layer,
        router="router.gate",
        router_dtype="float32",
        correction="expert_bias",
        shared=_product_of("num_shared_experts"),
        head_norm=_always,
        more=_output_gate,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_mlp_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "DeepseekForCausalLM": Family(
        experts=("n_routed_experts",),
        dense=is_dense_layer,
        shared=_product_of("n_shared_experts"),
        qkv_bias=_attention_bias,
    ),
    "Dots1ForCausalLM": Family(
        experts=("n_routed_experts",),
        dense=is_dense_layer,
        shared=_product_of("n_shared_experts"),
        correction="gate.e_score_correction_bias",
        qkv_bias=_attention_bias,
        head_norm=_always,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        experts=("moe_num_experts",),
        dense=_is_ernie_dense,
        router_dtype="float32",
        correction="moe_statics.e_score_correction_bias",
        shared=_product_of("moe_num_shared_experts"),
        qkv_bias=_use_bias,
        mlp_bias=_use_bias,
        tied=True,
    ),
    "ExaoneMoeForCausalLM": _EXAONE,
    "ExaoneMoEForCausalLM": _EXAONE,
    "FlexOlmoForCausalLM": Family(
        expert_size=("intermediate_size",),
        more=_whole_norms,
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "Glm4MoeForCausalLM": Family(
        experts=("n_routed_experts",),
        dense=is_dense_layer,
        router_dtype="float32",
        correction="gate.e_score_correction_bias",
        shared=_product_of("n_shared_experts"),
        qkv_bias=_attention_bias,
        head_norm=lambda fields: fields.flag("use_qk_norm"),
        drafts=("num_nextn_predict_layers",),
    ),
    "HYV3ForCausalLM": Family(
        expert_size=("expert_hidden_dim", "moe_intermediate_size"),
        dense=is_dense_layer,
        router_dtype="float32",
        correction="expert_bias",
        shared=lambda fields: (
            fields.whole("num_shared_experts", default=0)
            * fields.whole("expert_hidden_dim", "moe_intermediate_size")
        ),
        shared_block="shared_mlp.",
        head_norm=lambda fields: fields.flag("qk_norm"),
    ),
    "MiniMaxM2ForCausalLM": Family(
        experts=("num_local_experts",),
        expert_size=("intermediate_size",),
        block="block_sparse_moe.",
        matrices=NUMBERED,
        router_dtype="float32",
        correction="e_score_correction_bias",
        qkv_bias=_attention_bias,
        more=_divided_norms,
    ),
    "MixtralForCausalLM": _MIXTRAL,
    "OlmoeForCausalLM": Family(
        expert_size=("intermediate_size",), more=_whole_norms, qkv_bias=_attention_bias
    ),
    "Param2MoEForCausalLM": replace(
        _BAILING,
        router_dtype="float32",
        correction="gate.expert_bias",
        shared=lambda fields: (
            fields.whole("moe_shared_expert_intermediate_size", default=0)
            or fields.whole("num_shared_experts", default=1) * fields.whole("moe_intermediate_size")
        ),
        qkv_bias=lambda fields: fields.flag("use_qkv_bias"),
        mlp_bias=lambda _: False,
    ),
    "PhiMoEForCausalLM": Family(
        experts=("num_local_experts",),
        expert_size=("intermediate_size",),
        block="block_sparse_moe.",
        matrices=NUMBERED,
        qkv_bias=_always,
        out_bias=_always,
        norm_bias=True,
        head_bias=True,
    ),
    "Qwen2MoeForCausalLM": Family(
        dense=_is_listed_dense,
        qkv_bias=_always,
        shared=_QWEN3.shared,
        shared_block="shared_expert.",
        shared_gate=True,
    ),
    "Qwen3MoeForCausalLM": _QWEN3,
}


def bailing(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Ling or Ring up to 2.0, or Sarvam's models (bailing_moe.py).

    The config determines `router_dtype`.
    """
    fields = named_fields(config, "BailingMoeForCausalLM")
    family = replace(
        _BAILING,
        router_dtype="float32" if fields.text("router_dtype") == "fp32" else None,
        correction="gate.expert_bias" if fields.flag("moe_router_enable_expert_bias") else "",
    )
    return build(fields.name, family, config)


def cohere(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Command A+. Three of four layers have a window. The first layers have no experts.

    Source: cohere2_moe.py, and transformers' Cohere2MoeConfig for missing config values.
    """
    fields = named_fields(config, "Cohere2MoeForCausalLM")
    count = fields.whole("num_hidden_layers")
    first = min(fields.whole("first_k_dense_replace", default=0), count)
    changes: dict[str, Any] = {}
    if not fields.texts("layer_types"):
        leading = fields.whole("prefix_dense_sliding_window_pattern", default=1) or 1
        every = fields.whole("sliding_window_pattern", default=4) or 1
        changes["layer_types"] = [
            "sliding_attention" if (index + 1) % pattern else "full_attention"
            for length, pattern in ((first, leading), (count - first, every))
            for index in range(length)
        ]
    kinds = fields.texts("mlp_layer_types")
    if not kinds:
        changes["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (count - first)
    elif len(kinds) < count:
        raise too_short_error(fields, "mlp_layer_types", len(kinds))
    # The class lets a layer attend to one token more than the config states.
    changes["sliding_window"] = fields.whole("sliding_window", default=4096) + 1
    return build(fields.name, _COHERE, with_values(config, changes))


_OF_TEXT = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index",
            "moe_layer_end_index")  # fmt: skip


def ernie(config: Mapping[str, Any]) -> Architecture:
    """
    Describe ERNIE 4.5, with or without experts for images.

    If the numbers of experts are lists, the second value is for image experts. The config states
    the range of layers that have image experts in addition to text experts. The image experts have
    their own router and correction, but use the same shared experts. Source: Ernie4_5_VLMoeMoE in
    ernie45_vl_moe.py.
    """
    name = "Ernie4_5_MoeForCausalLM"
    lists = {key: config[key] for key in _OF_TEXT if isinstance(config.get(key), list)}
    if not isinstance(lists.get("moe_num_experts"), list):
        return build(name, FAMILIES[name], config)
    text, seen = ({key: each[place] for key, each in lists.items()} for place in (0, 1))
    found = build(name, FAMILIES[name], with_values(config, text))
    fields = named_fields(with_values(config, seen), name)
    first = fields.whole("moe_layer_start_index", default=0)
    last = fields.whole("moe_layer_end_index", default=len(found.layers) - 1)
    images = routed_experts(
        found.hidden_size,
        fields.whole("moe_intermediate_size"),
        fields.whole("moe_num_experts"),
        prefix="mlp.vision_",
        router_dtype="float32",
        correction="moe_statics.e_score_correction_bias",
    )
    layers = tuple(
        replace(layer, weights=layer.weights + images) if first <= index <= last else layer
        for index, layer in enumerate(found.layers)
    )
    return replace(found, layers=layers)


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **{name: partial(build, name, family) for name, family in FAMILIES.items()},
    **dict.fromkeys(
        ("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM"), bailing
    ),
    "Cohere2MoeForCausalLM": cohere,
    "Ernie4_5_MoeForCausalLM": ernie,
    **moe_irregular.BUILDERS,
    **moe_mixed_attention.BUILDERS,
}
"""The builder of each expert decoder, by its name in `architectures`."""
