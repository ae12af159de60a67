"""
Describe decoders with experts that a `Family` in moe.py cannot describe. Pure.

Source: the classes in vLLM's model_executor/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    FullCache,
    Layer,
    Split,
    Weight,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.moe_common import (
    NUMBERED,
    assemble,
    first_whole,
    head_size,
    layer_caches,
    layers_with_experts,
    named_fields,
    routed_experts,
)
from gpufleet.sizing.architectures.unread_keys import with_values


def dbrx(config: Mapping[str, Any]) -> Architecture:
    """Describe DBRX. Its config has separate sections for attention and experts (dbrx.py)."""
    fields = named_fields(config, "DbrxForCausalLM")
    own, feed = fields.section("attn_config"), fields.section("ffn_config")
    if own is None or feed is None:
        raise fields.missing_error("attn_config" if own is None else "ffn_config")
    hidden, heads = fields.whole("d_model"), fields.whole("n_heads")
    kv_heads = own.whole("kv_n_heads")
    experts, inner = feed.whole("moe_num_experts"), feed.whole("ffn_hidden_size")
    block = "norm_attn_norm."
    weights = (
        *attention(
            hidden,
            heads,
            kv_heads,
            hidden // max(heads, 1),
            prefix=f"{block}attn.",
            names=("Wqkv", "Wqkv", "Wqkv", "out_proj"),
        ),
        *norm(f"{block}norm_1", hidden),
        *norm(f"{block}norm_2", hidden),
        *routed_experts(
            hidden, inner, experts, prefix="ffn.", router="router.layer", matrices=NUMBERED
        ),
    )
    layer = Layer(weights, FullCache(kv_heads, hidden // max(heads, 1)))
    return assemble(
        fields,
        [layer] * fields.whole("n_layers"),
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        further=rotary_tables(fields, hidden // max(heads, 1), keys=("max_seq_len",)),
        embedding_name="transformer.wte",
        norm_name="transformer.norm_f",
        prefix="transformer.blocks.",
    )


def granite_moe(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Granite's mixture of experts, with or without shared experts and windows.

    If there are windows, each head has an attention sink, and each layer may have its own rotary
    base. Source: granitemoe.py and granite.py, and transformers' GraniteMoeSWAConfig for missing
    config values.
    """
    fields = named_fields(config, "GraniteMoeForCausalLM")
    if fields.name == "GraniteMoeSWAForCausalLM" and not fields.texts("layer_types"):
        kinds = ["sliding_attention"] * fields.whole("num_hidden_layers")
        kinds[::4] = ["full_attention"] * len(kinds[::4])
        window = fields.whole("sliding_window", default=128)
        return granite_moe(with_values(config, {"layer_types": kinds, "sliding_window": window}))
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    head_dim = hidden // max(heads, 1)
    experts, inner = fields.whole("num_local_experts"), fields.whole("intermediate_size")
    weights = (
        *attention(hidden, heads, kv_heads, head_dim),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
        *granite_experts(fields, hidden, inner, experts),
    )
    if fields.texts("layer_types") and fields.flag("attention_sinks", default=True):
        weights += (vector("self_attn.sinks", heads, Split.ROWS),)
    layers = [
        Layer(weights, cache)
        for cache in layer_caches(fields, fields.whole("num_hidden_layers"), kv_heads, head_dim)
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        tied=True,
        further=rotary_tables(fields, head_dim),
    )


def granite_experts(fields: Fields, hidden: int, inner: int, experts: int) -> tuple[Weight, ...]:
    """
    Return the routed and shared experts of a Granite layer. Their first two matrices are fused.
    """
    block = "block_sparse_moe."
    weights: tuple[Weight, ...] = ()
    if experts:
        weights += (
            Weight(f"{block}router.layer", experts, hidden, linear=False),
            _expert(f"{block}input_linear", 2 * inner, hidden, Split.ROWS, experts),
            _expert(f"{block}output_linear", hidden, inner, Split.COLUMNS, experts),
        )
    if shared := fields.whole("shared_intermediate_size", default=0):
        weights += (
            Weight("shared_mlp.input_linear", 2 * shared, hidden, Split.ROWS),
            Weight("shared_mlp.output_linear", hidden, shared, Split.COLUMNS),
        )
    return weights


def _expert(name: str, rows: int, columns: int, split: Split, experts: int) -> Weight:
    return Weight(name, rows, columns, split, count=experts, expert=True)


def hunyuan(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Hunyuan's mixture of experts.

    Some config values are lists with a value for each layer. With `use_cla`, only some layers have
    their own keys and values. The other layers use those of the last such layer before them.
    Source: hunyuan_v1.py.
    """
    fields = named_fields(config, "HunYuanMoEV1ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    head_dim = fields.whole("attention_head_dim", default=0) or head_size(fields, heads)
    experts = first_whole(fields, "num_experts")
    dense = first_whole(fields, "intermediate_size")
    inner = first_whole(fields, "moe_intermediate_size", "intermediate_size")
    shared = 0
    if fields.flag("use_mixed_mlp_moe"):
        shared = dense * first_whole(fields, "num_shared_expert")
    share = fields.whole("cla_share_factor", default=1) if fields.flag("use_cla") else 1
    own = attention(
        hidden,
        heads,
        kv_heads,
        head_dim,
        bias=fields.flag("attention_bias", "bias"),
        out_bias=fields.flag("attention_bias", "bias"),
    )
    norms = (*norm("input_layernorm", hidden), *norm("post_attention_layernorm", hidden))
    if fields.flag("use_qk_norm"):
        norms += norm("self_attn.query_layernorm", head_dim)
        norms += norm("self_attn.key_layernorm", head_dim)
    feed_forward = routed_experts(hidden, inner, experts, router="gate.wg")
    if shared:
        feed_forward += gated_mlp(hidden, shared, prefix="mlp.shared_mlp.")
    borrowed = tuple(w for w in own if "k_proj" not in w.name and "v_proj" not in w.name)
    layers = [
        Layer(norms + borrowed + feed_forward)
        if index % share
        else Layer(norms + own + feed_forward, FullCache(kv_heads, head_dim))
        for index in range(fields.whole("num_hidden_layers"))
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


def arctic(config: Mapping[str, Any]) -> Architecture:
    """Describe Snowflake Arctic, which has a dense MLP and experts (arctic.py, vLLM up to 0.28)."""
    fields = named_fields(config, "ArcticForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    experts, inner = fields.whole("num_local_experts"), fields.whole("intermediate_size")
    every = fields.whole("moe_layer_frequency", default=2) or 1
    block = "block_sparse_moe."
    common = (
        *attention(hidden, heads, kv_heads, head_dim),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    mixture = routed_experts(hidden, inner, experts, prefix=block, matrices=NUMBERED)
    if fields.flag("use_residual"):
        mixture += gated_mlp(hidden, hidden, prefix="residual_mlp.", names=NUMBERED)
        mixture += norm("residual_layernorm", hidden)
    mlp = gated_mlp(hidden, inner, prefix=f"{block}mlp.", names=NUMBERED)
    layers = [
        Layer(common + (mlp if (index + 1) % every else mixture), FullCache(kv_heads, head_dim))
        for index in range(fields.whole("num_hidden_layers"))
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=inner,
        further=rotary_tables(fields, head_dim),
    )


def step3_text(config: Mapping[str, Any]) -> Architecture:
    """
    Describe the text part of Step 3, with queries from two matrices, and one KV head on every rank.

    Source: step3_text.py.
    """
    fields = named_fields(config, "Step3TextForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim, low = fields.whole("head_dim", default=256), fields.whole("share_q_dim")
    experts, inner = fields.whole("moe_num_experts"), fields.whole("moe_intermediate_size")
    dense = fields.whole("intermediate_size")
    every = (
        Weight("self_attn.q_proj", low, hidden),
        Weight("self_attn.k_proj", head_dim, hidden),
        Weight("self_attn.v_proj", head_dim, hidden),
        *norm("self_attn.inter_norm", low),
        Weight("self_attn.wq", heads * head_dim, low, Split.ROWS),
        Weight("self_attn.o_proj", hidden, heads * head_dim, Split.COLUMNS),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    mixture = (
        *routed_experts(hidden, inner, experts, prefix="moe."),
        *gated_mlp(hidden, fields.whole("share_expert_dim"), prefix="share_expert."),
    )
    count = fields.whole("num_hidden_layers")
    with_experts = layers_with_experts(fields, count)
    layers = [
        Layer(
            every + (mixture if index in with_experts else gated_mlp(hidden, dense)),
            FullCache(1, head_dim),
        )
        for index in range(count)
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=1,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=rotary_tables(fields, head_dim, keys=("max_position_embedding",)),
    )


def grok(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Grok 1 or 2, with four norms per layer. With `residual_moe`, layers also have an MLP.
    """
    fields = named_fields(config, "Grok1ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads", default=heads), hidden // max(heads, 1)
    experts = fields.whole("num_experts", "num_local_experts", default=8)
    inner = fields.whole("moe_intermediate_size", "intermediate_size")
    weights = (
        *attention(hidden, heads, kv_heads, head_dim, prefix="attn."),
        *(w for name in _GROK_NORMS for w in norm(name, hidden)),
        *routed_experts(hidden, inner, experts, prefix="moe_block.", matrices=NUMBERED),
    )
    if fields.flag("residual_moe"):
        weights += gated_mlp(hidden, fields.whole("intermediate_size"))
    return assemble(
        fields,
        [Layer(weights, FullCache(kv_heads, head_dim))] * fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=fields.whole("intermediate_size"),
        tied=True,
        further=rotary_tables(fields, head_dim),
    )


_GROK_NORMS = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")

BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "ArcticForCausalLM": arctic,
    "DbrxForCausalLM": dbrx,
    "Grok1ForCausalLM": grok,
    "Grok1ModelForCausalLM": grok,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeSharedForCausalLM": granite_moe,
    "GraniteMoeSWAForCausalLM": granite_moe,
    "HunYuanMoEV1ForCausalLM": hunyuan,
    "Step3TextForCausalLM": step3_text,
}
