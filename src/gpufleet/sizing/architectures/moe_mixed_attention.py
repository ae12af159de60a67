"""
Describe decoders with experts whose layers have different kinds of attention. Pure.

Source: the classes in vLLM's model_executor/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpufleet.sizing.architectures.building_blocks import (
    attention,
    gated_mlp,
    norm,
    rotary_tables,
    vector,
)
from gpufleet.sizing.architectures.components import (
    Architecture,
    ChunkCache,
    FullCache,
    Layer,
    Part,
    Split,
    Weight,
    WindowCache,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.moe_common import (
    NUMBERED,
    assemble,
    head_size,
    is_dense_layer,
    layer_caches,
    layers_with_experts,
    named_fields,
    routed_experts,
    too_short_error,
)


def gpt_oss(config: Mapping[str, Any]) -> Architecture:
    """
    Describe gpt-oss, with biases everywhere, a sink for each head, and a window in every second
    layer.

    Layers with even numbers have the window, independently of `layer_types`. Source: gpt_oss.py.
    """
    fields = named_fields(config, "GptOssForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    experts, inner = (
        fields.whole("num_local_experts", "num_experts"),
        fields.whole("intermediate_size"),
    )
    block = "mlp.experts."
    weights = (
        *attention(hidden, heads, kv_heads, head_dim, bias=True, out_bias=True),
        vector("self_attn.sinks", heads, Split.ROWS),
        Weight("mlp.router", experts, hidden, linear=False),
        vector("mlp.router.bias", experts),
        Weight(f"{block}gate_up_proj", 2 * inner, hidden, Split.ROWS, count=experts, expert=True),
        Weight(f"{block}down_proj", hidden, inner, Split.COLUMNS, count=experts, expert=True),
        _expert_bias(f"{block}gate_up_proj_bias", 2 * inner, experts, Split.ROWS),
        _expert_bias(f"{block}down_proj_bias", hidden, experts, Split.NONE),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    window = fields.whole("sliding_window")
    full = FullCache(kv_heads, head_dim)
    layers = [
        Layer(weights, full if index % 2 else WindowCache(kv_heads, head_dim, window))
        for index in range(fields.whole("num_hidden_layers"))
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        further=_in_float32(rotary_tables(fields, head_dim)),
    )


def _in_float32(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(
        replace(part, weights=tuple(replace(w, dtype="float32") for w in part.weights))
        for part in parts
    )


def _expert_bias(name: str, size: int, experts: int, split: Split) -> Weight:
    return Weight(name, size, split=split, count=experts, expert=True, linear=False)


def llama4(config: Mapping[str, Any]) -> Architecture:
    """
    Describe the text part of Llama 4, with chunked attention, and full attention without positions.

    Every fourth layer has full attention without positions, unless `no_rope_layers` lists other
    layers. Source: llama4.py.
    """
    fields = named_fields(config, "Llama4ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    experts, inner = fields.whole("num_local_experts"), fields.whole("intermediate_size")
    dense = fields.whole("intermediate_size_mlp")
    step = fields.whole("interleave_moe_layer_step", default=1)
    chunk = fields.whole("attention_chunk_size", default=0)
    every = (
        *attention(hidden, heads, kv_heads, head_dim),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    mlp = gated_mlp(hidden, dense, prefix="feed_forward.")
    mixture = (
        *routed_experts(hidden, inner, experts, prefix="feed_forward.", router="router"),
        *gated_mlp(hidden, inner, prefix="feed_forward.shared_expert."),
    )
    count = fields.whole("num_hidden_layers")
    interval = fields.whole("no_rope_layer_interval", default=4) or 4
    positions = fields.wholes("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    if len(positions) < count:
        raise too_short_error(fields, "no_rope_layers", len(positions))
    full = FullCache(kv_heads, head_dim)
    layers = [
        Layer(
            every + (mixture if step and (index + 1) % step == 0 else mlp),
            ChunkCache(kv_heads, head_dim, chunk) if chunk and positions[index] else full,
        )
        for index in range(count)
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=rotary_tables(fields, head_dim),
    )


def mimo_v2(config: Mapping[str, Any]) -> Architecture:
    """
    Describe MiMo V2. Layers with a window have their own KV heads. Values are smaller than keys.

    `hybrid_layer_pattern` has 1 for a layer with a window. `moe_layer_freq` has 1 for a layer with
    experts. Source: mimo_v2.py.
    """
    fields = named_fields(config, "MiMoV2FlashForCausalLM")
    hidden, inner = fields.whole("hidden_size"), fields.whole("moe_intermediate_size")
    experts, dense = fields.whole("n_routed_experts"), fields.whole("intermediate_size")
    mixture = routed_experts(
        hidden,
        inner,
        experts,
        router_dtype=fields.text("moe_router_dtype", default="float32"),
        correction="gate.e_score_correction_bias",
    )
    mlp = gated_mlp(hidden, dense)
    count = fields.whole("num_hidden_layers")
    pattern, frequency = fields.wholes("hybrid_layer_pattern"), fields.wholes("moe_layer_freq")
    for key, found in (("hybrid_layer_pattern", pattern), ("moe_layer_freq", frequency)):
        if len(found) < count:
            raise too_short_error(fields, key, len(found))
    layers = []
    for index in range(count):
        own = _mimo_attention(fields, hidden, windowed=pattern[index] == 1)
        norms = norm("input_layernorm", hidden) + norm("post_attention_layernorm", hidden)
        feed_forward = mixture if frequency[index] else mlp
        layers.append(replace(own, weights=own.weights + norms + feed_forward))
    return assemble(
        fields,
        layers,
        heads=fields.whole("num_attention_heads"),
        kv_heads=fields.whole("num_key_value_heads"),
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=rotary_tables(fields, fields.whole("head_dim")),
    )


def _mimo_attention(fields: Fields, hidden: int, *, windowed: bool) -> Layer:
    kind = "swa_" if windowed else ""
    heads, kv_heads = (
        fields.whole(f"{kind}num_attention_heads"),
        fields.whole(f"{kind}num_key_value_heads"),
    )
    head_dim = fields.whole(f"{kind}head_dim")
    value_dim = fields.whole(f"{kind}v_head_dim", default=head_dim)
    weights = attention(
        hidden,
        heads,
        kv_heads,
        head_dim,
        v_head_dim=value_dim,
        bias=fields.flag("attention_bias"),
    )
    if fields.flag(f"add_{'swa' if windowed else 'full'}_attention_sink_bias"):
        weights += (vector("self_attn.attention_sink_bias", heads, Split.ROWS),)
    if windowed:
        window = fields.whole("sliding_window_size", "sliding_window")
        return Layer(weights, WindowCache(kv_heads, head_dim, window, v_head_dim=value_dim))
    return Layer(weights, FullCache(kv_heads, head_dim, v_head_dim=value_dim))


def step3p5(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Step 3.5 or 3.7. Each head has a gate. Layers with a window have more heads.

    Source: step3p5.py.
    """
    fields = named_fields(config, "Step3p5ForCausalLM")
    hidden, inner = fields.whole("hidden_size"), fields.whole("moe_intermediate_size")
    full_heads = fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_attention_groups"), head_size(fields, full_heads)
    experts, dense = fields.whole("moe_num_experts"), fields.whole("intermediate_size")
    other = fields.section("attention_other_setting")
    window_heads = (other.whole("num_attention_heads", default=0) if other else 0) or fields.whole(
        "num_sliding_attention_heads", default=full_heads
    )
    mixture = (
        *routed_experts(
            hidden,
            inner,
            experts,
            prefix="moe.",
            router_dtype="float32",
            correction="router_bias",
        ),
        *gated_mlp(hidden, fields.whole("share_expert_dim"), prefix="share_expert."),
    )
    count = fields.whole("num_hidden_layers")
    with_experts = layers_with_experts(fields, count)
    layers = []
    for index, cache in enumerate(layer_caches(fields, count, kv_heads, head_dim)):
        heads = window_heads if isinstance(cache, WindowCache) else full_heads
        weights = (
            *attention(
                hidden,
                heads,
                kv_heads,
                head_dim,
                bias=fields.flag("attention_bias"),
                head_norm=True,
            ),
            *norm("input_layernorm", hidden),
            *norm("post_attention_layernorm", hidden),
        )
        if fields.flag("use_head_wise_attn_gate"):
            weights += (Weight("self_attn.g_proj", heads, hidden, Split.ROWS),)
        feed_forward = mixture if index in with_experts else gated_mlp(hidden, dense)
        layers.append(Layer(weights + feed_forward, cache))
    return assemble(
        fields,
        layers,
        heads=full_heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=rotary_tables(fields, head_dim),
    )


def minimax_m3(config: Mapping[str, Any]) -> Architecture:
    """
    Describe the text part of MiniMax M3, with sparse attention that stores an index key per token.

    The index key is one head of `sparse_index_dim` numbers without a value. It is described here as
    a key and a value of half that size. Source: vllm/models/minimax_m3.
    """
    fields = named_fields(config, "MiniMaxM3SparseForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    experts, inner = fields.whole("num_local_experts"), fields.whole("intermediate_size")
    dense, block = fields.whole("dense_intermediate_size"), "block_sparse_moe."
    every = (
        *attention(hidden, heads, kv_heads, head_dim, head_norm=True),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    corrected = fields.flag("use_routing_bias")
    mixture = routed_experts(
        hidden,
        inner,
        experts,
        prefix=block,
        matrices=NUMBERED,
        router_dtype="float32",
        correction="e_score_correction_bias" if corrected else "",
    )
    if shared := fields.whole("n_shared_experts", default=0):
        mixture += gated_mlp(hidden, shared * inner, prefix=f"{block}shared_experts.")
    sparse = fields.section("sparse_attention_config")
    frequency = sparse.wholes("sparse_attention_freq") if sparse else ()
    dim = sparse.whole("sparse_index_dim") if sparse and frequency else 0
    own = "self_attn.index_"
    index = (
        Weight(f"{own}q_proj", kv_heads * dim, hidden, Split.HEADS, heads=kv_heads),
        Weight(f"{own}k_proj", dim, hidden),
        *norm(f"{own}q_norm", dim),
        *norm(f"{own}k_norm", dim),
    )
    full, keys = FullCache(kv_heads, head_dim), (FullCache(1, dim // 2),)
    layers = []
    for number in range(fields.whole("num_hidden_layers")):
        weights = every
        weights += gated_mlp(hidden, dense) if is_dense_layer(fields, number) else mixture
        if number < len(frequency) and frequency[number]:
            layers.append(Layer(weights + index, full, more=keys))
        else:
            layers.append(Layer(weights, full))
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=rotary_tables(fields, head_dim),
    )


def laguna(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Laguna. Layers may have their own numbers of heads and windows. Heads may have a gate.
    """
    fields = named_fields(config, "LagunaForCausalLM")
    hidden, usual = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, usual)
    experts, inner = fields.whole("num_experts"), fields.whole("moe_intermediate_size")
    dense, count = fields.whole("intermediate_size"), fields.whole("num_hidden_layers")
    kinds = fields.texts("mlp_layer_types")
    if len(kinds) < count:
        raise too_short_error(fields, "mlp_layer_types", len(kinds))
    mixture = routed_experts(hidden, inner, experts, correction="experts.e_score_correction_bias")
    if shared := fields.whole("shared_expert_intermediate_size", default=0):
        mixture += gated_mlp(hidden, shared, prefix="mlp.shared_expert.")
    gating, own = fields.value("gating"), fields.wholes("num_attention_heads_per_layer")
    bias = fields.flag("attention_bias")
    layers = []
    for index, cache in enumerate(layer_caches(fields, count, kv_heads, head_dim)):
        heads = own[index] if index < len(own) else usual
        weights = attention(
            hidden, heads, kv_heads, head_dim, bias=bias, out_bias=bias, head_norm=True
        )
        if gating:
            rows = heads if gating in {True, "per-head"} else heads * head_dim
            weights += (Weight("self_attn.g_proj", rows, hidden, Split.ROWS),)
        weights += norm("input_layernorm", hidden) + norm("post_attention_layernorm", hidden)
        weights += mixture if kinds[index] == "sparse" and experts else gated_mlp(hidden, dense)
        layers.append(Layer(weights, cache))
    return assemble(
        fields,
        layers,
        heads=usual,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=rotary_tables(fields, head_dim),
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "GptOssForCausalLM": gpt_oss,
    "LagunaForCausalLM": laguna,
    "Llama4ForCausalLM": llama4,
    "MiMoV2FlashForCausalLM": mimo_v2,
    "MiMoV2ForCausalLM": mimo_v2,
    "MiniMaxM3SparseForCausalLM": minimax_m3,
    "Step3p5ForCausalLM": step3p5,
}
"""The builder of each architecture, by its name in `architectures`."""
