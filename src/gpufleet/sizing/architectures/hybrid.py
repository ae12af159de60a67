"""
Describe decoders that keep a state of fixed size instead of keys in most layers. Pure.

Delta nets, Mamba and Gemma are in separate modules. Source: the classes in vLLM's
model_executor/models, and model_executor/layers/mamba/mamba_utils.py for the shapes of their
states. In a `StateCache`, every shape except the last belongs to a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from gpufleet.sizing.architectures import delta_nets, gemma, mamba
from gpufleet.sizing.architectures.building_blocks import (
    attention,
    gated_mlp,
    norm,
    rotary_tables,
    vector,
)
from gpufleet.sizing.architectures.components import (
    Architecture,
    FullCache,
    LatentCache,
    Layer,
    Split,
    StateCache,
    Weight,
    WindowCache,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.mla import latent_attention
from gpufleet.sizing.architectures.moe_common import (
    NUMBERED,
    assemble,
    attention_layers,
    first_whole,
    head_size,
    is_dense_layer,
    named_fields,
    routed_experts,
    too_short_error,
)


def lfm2(config: Mapping[str, Any]) -> Architecture:
    """
    Describe LFM2, dense or with experts. It has short convolutions, and attention in some layers.
    """
    fields = named_fields(config, "Lfm2ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", "num_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), hidden // max(heads, 1)
    experts = fields.whole("num_experts", default=0)
    inner = fields.whole("moe_intermediate_size") if experts else 0
    dense = fields.whole("intermediate_size") if experts else _lfm2_width(fields)
    width = hidden if experts else fields.whole("conv_dim", default=hidden)
    kernel, bias = fields.whole("conv_L_cache", default=3), fields.flag("conv_bias")
    names = ("w1", "w3", "w2")
    own = (
        *attention(
            hidden, heads, kv_heads, head_dim, names=("q_proj", "k_proj", "v_proj", "out_proj")
        ),
        *norm("self_attn.q_layernorm", head_dim),
        *norm("self_attn.k_layernorm", head_dim),
    )
    mixer: tuple[Weight, ...] = (
        Weight("conv.in_proj", 3 * width, hidden, Split.ROWS),
        Weight("conv.conv", width, kernel, Split.ROWS, linear=False),
        Weight("conv.out_proj", hidden, width, Split.COLUMNS),
    )
    if bias:
        mixer += (
            vector("conv.in_proj.bias", 3 * width, Split.ROWS),
            vector("conv.conv.bias", width, Split.ROWS),
            vector("conv.out_proj.bias", hidden),
        )
    norms = (*norm("operator_norm", hidden), *norm("ffn_norm", hidden))
    mlp = gated_mlp(hidden, dense, prefix="feed_forward.", names=names)
    corrected = fields.flag("use_expert_bias", default=True)
    mixture = routed_experts(
        hidden,
        inner,
        experts,
        prefix="feed_forward.",
        matrices=NUMBERED,
        correction="expert_bias" if corrected else "",
    )
    state = StateCache("short_conv", ((kernel - 1, width),), (1,), ("model",))
    first = fields.whole("num_dense_layers", default=0)
    layers = []
    for index, attends in enumerate(_lfm2_attention(fields)):
        rest = norms + (mixture if experts and index >= first else mlp)
        layers.append(
            Layer(own + rest, FullCache(kv_heads, head_dim))
            if attends
            else Layer(mixer + rest, state)
        )
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        tied=fields.flag("tie_embedding", default=True),
        norm_name="model.embedding_norm",
        further=rotary_tables(fields, head_dim),
    )


def _lfm2_width(fields: Fields) -> int:
    """Return the inner size of LFM2's MLP. Source: Lfm2MLP in lfm2.py."""
    size = fields.whole("block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(fields.number("block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
    multiple = fields.whole("block_multiple_of", default=256) or 1
    return multiple * ceil(size / multiple)


def _lfm2_attention(fields: Fields) -> tuple[bool, ...]:
    count = fields.whole("num_hidden_layers")
    if fields.texts("layer_types"):
        return attention_layers(fields, count)
    listed = fields.wholes("full_attn_idxs") or tuple(range(count))
    return tuple(index in listed for index in range(count))


def minimax_text(config: Mapping[str, Any]) -> Architecture:
    """
    Describe MiniMax-Text-01 or M1, with lightning attention. Every eighth layer has full attention.
    """
    fields = named_fields(config, "MiniMaxText01ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    experts, inner = first_whole(fields, "num_local_experts"), fields.whole("intermediate_size")
    size, count = heads * head_dim, fields.whole("num_hidden_layers")
    kinds = fields.wholes("attn_type_list", "decoder_attention_types")
    if not kinds:
        kinds = tuple(int(attends) for attends in attention_layers(fields, count))
    if len(kinds) < count:
        raise too_short_error(fields, "attn_type_list", len(kinds))
    linear = (
        Weight("self_attn.qkv_proj", 3 * size, hidden, Split.ROWS),
        Weight("self_attn.output_gate", size, hidden, Split.ROWS),
        Weight("self_attn.out_proj", hidden, size, Split.COLUMNS),
        vector("self_attn.norm", size, Split.ROWS),
    )
    rest: tuple[Weight, ...] = (
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
        *routed_experts(
            hidden,
            inner,
            experts,
            prefix="block_sparse_moe.",
            matrices=NUMBERED,
            router_dtype="float32",
        ),
    )
    shared = fields.wholes("shared_intermediate_size")
    width = max(shared) if shared else fields.whole("shared_intermediate_size", default=0)
    if width:
        rest += gated_mlp(hidden, width, prefix="shared_mlp.")
        rest += (Weight("coefficient", 1, hidden, linear=False, dtype="float32"),)
    own = attention(hidden, heads, kv_heads, head_dim)
    state = _linear_state(heads, head_dim)
    layers = [
        Layer(own + rest, FullCache(kv_heads, head_dim)) if kind else Layer(linear + rest, state)
        for kind in kinds[:count]
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        further=rotary_tables(fields, head_dim),
        pipeline=False,
    )


def _linear_state(heads: int, head_dim: int) -> StateCache:
    return StateCache("linear", ((heads, head_dim, head_dim),), (0,), ("model",))


def bailing_linear(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Ling or Ring 2.5, with linear attention.

    Every `layer_group_size`-th layer has latent attention.

    Source: bailing_moe_linear.py and layers/mamba/linear/bailing_linear_attn.py.
    """
    fields = named_fields(config, "BailingMoeV2_5ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = head_size(fields, heads)
    experts, inner = fields.whole("num_experts"), fields.whole("moe_intermediate_size")
    dense, size = fields.whole("intermediate_size"), heads * head_dim
    bias, qkv_bias = fields.flag("use_bias"), fields.flag("use_qkv_bias")
    linear = attention(
        hidden,
        heads,
        heads,
        head_dim,
        prefix="attention.",
        names=("query_key_value", "query_key_value", "query_key_value", "dense"),
        bias=bias or qkv_bias,
        out_bias=bias,
    )
    if fields.flag("use_qk_norm"):
        linear += norm("attention.query_layernorm", head_dim)
        linear += norm("attention.key_layernorm", head_dim)
    linear += (
        Weight("attention.g_proj", size, hidden, Split.ROWS),
        vector("attention.g_norm", size, Split.ROWS),
    )
    mixture = routed_experts(
        hidden,
        inner,
        experts,
        router_dtype="float32" if fields.text("router_dtype", default="fp32") == "fp32" else None,
        correction="gate.expert_bias" if fields.flag("moe_router_enable_expert_bias") else "",
    )
    if shared := fields.whole("num_shared_experts", default=0):
        shared *= fields.whole("moe_shared_expert_intermediate_size", "moe_intermediate_size")
        mixture += gated_mlp(hidden, shared, prefix="mlp.shared_experts.")
    norms = (*norm("input_layernorm", hidden), *norm("post_attention_layernorm", hidden))
    latent = latent_attention(fields, prefix="attention.")
    cache = LatentCache(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim"))
    every = fields.whole("layer_group_size", default=1) or 1
    layers = []
    for index in range(fields.whole("num_hidden_layers")):
        rest = norms
        rest += gated_mlp(hidden, dense) if is_dense_layer(fields, index) else mixture
        if (index + 1) % every:
            layers.append(Layer(linear + rest, _linear_state(heads, head_dim)))
        else:
            layers.append(Layer(latent + rest, cache))
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=1,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        embedding_name="model.word_embeddings",
        further=rotary_tables(fields, fields.whole("qk_rope_head_dim")),
    )


def loop_coder(config: Mapping[str, Any]) -> Architecture:
    """
    Describe IQuest's loop coder, which runs its layers `loop_num` times.

    Each run has its own cache. The first run has full attention, and later runs have a window.
    Source: iquest_loopcoder.py.
    """
    fields = named_fields(config, "IQuestLoopCoderForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), hidden // max(heads, 1)
    dense = fields.whole("intermediate_size")
    weights = (
        *attention(hidden, heads, kv_heads, head_dim),
        *gated_mlp(hidden, dense),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
        Weight("gate_projections", heads, head_dim, Split.ROWS),
        vector("gate_projections.bias", heads, Split.ROWS),
    )
    window = WindowCache(kv_heads, head_dim, fields.whole("loop_window_size", default=64))
    again = (window,) * (fields.whole("loop_num", default=2) - 1)
    return assemble(
        fields,
        [Layer(weights, FullCache(kv_heads, head_dim), more=again)]
        * fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=dense,
        pipeline=False,
        further=rotary_tables(fields, head_dim),
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **delta_nets.BUILDERS,
    **gemma.BUILDERS,
    **mamba.BUILDERS,
    "BailingMoeV2_5ForCausalLM": bailing_linear,
    "MiniMaxM1ForCausalLM": minimax_text,
    "MiniMaxText01ForCausalLM": minimax_text,
    "IQuestLoopCoderForCausalLM": loop_coder,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2,
}
"""The builder of each hybrid decoder, by its name in `architectures`."""
