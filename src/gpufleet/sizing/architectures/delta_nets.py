"""
Describe decoders with gated delta nets or Kimi delta attention in most layers. Pure.

Source: the classes in vLLM's model_executor/models, and model_executor/layers/mamba/mamba_utils.py
for the shapes of their states. In a `StateCache`, every shape except the last belongs to a
convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gpufleet.errors import FleetError
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
    Part,
    Split,
    StagePlacement,
    StateCache,
    Weight,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.mla import latent_attention
from gpufleet.sizing.architectures.moe_common import (
    NUMBERED,
    assemble,
    attention_layers,
    head_size,
    is_dense_layer,
    named_fields,
    routed_experts,
    with_prefix,
)


def qwen(config: Mapping[str, Any], *, name: str) -> Architecture:
    """
    Describe Qwen3-Next, or the text part of Qwen3.5.

    Most layers have gated delta nets, and some have full attention.

    Source: qwen3_next.py, qwen3_5.py and layers/mamba/gdn/qwen_gdn_linear_attn.py.
    """
    fields = named_fields(config, name)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    experts = fields.whole("num_experts", default=0)
    inner = fields.whole("moe_intermediate_size") if experts else 0
    dense = fields.whole("intermediate_size", default=0)
    norms = (*norm("input_layernorm", hidden), *norm("post_attention_layernorm", hidden))
    own = _gated_attention(fields, hidden, heads, kv_heads, head_dim)
    linear, state = _delta_net(fields, hidden, merged=name == "Qwen3NextForCausalLM")
    full = FullCache(kv_heads, head_dim)
    mixture = _qwen_mixture(fields, hidden, inner, experts) if experts else ()
    layers = []
    count = fields.whole("num_hidden_layers")
    step = fields.whole("decoder_sparse_step", default=1) or 1
    lone = fields.wholes("mlp_only_layers")
    for index, attends in enumerate(attention_layers(fields, count)):
        routes = experts and index not in lone and (index + 1) % step == 0
        rest = norms + (mixture if routes else gated_mlp(hidden, dense))
        layers.append(Layer(own + rest, full) if attends else Layer(linear + rest, state))
    further = fields.whole(
        "mtp_num_hidden_layers",
        "num_nextn_predict_layers",
        default=1 if name == "Qwen3NextForCausalLM" else 0,
    )
    feed_forward = mixture or gated_mlp(hidden, dense)
    # This weight is not quantized, and TP divides its rows: qwen3_next_mtp.py and qwen3_5_mtp.py.
    draft = (
        Weight("mtp.fc", hidden, 2 * hidden, Split.ROWS, linear=False),
        *norm("mtp.pre_fc_norm_embedding", hidden),
        *norm("mtp.pre_fc_norm_hidden", hidden),
        *norm("mtp.norm", hidden),
    )
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=rotary_tables(fields, head_dim),
        draft_layers=[
            Layer(
                (draft if not index else ())
                + with_prefix(f"mtp.layers.{index}.", own + norms + feed_forward),
                full,
            )
            for index in range(further)
        ],
    )


def _gated_attention(
    fields: Fields, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Weight, ...]:
    """Return attention whose query projection also produces a gate for the output."""
    bias = fields.flag("qkv_bias", "attention_bias")
    weights = attention(hidden, heads, kv_heads, head_dim, bias=bias, head_norm=True)
    if fields.flag("attn_output_gate", default=True):
        weights += (Weight("self_attn.q_proj", heads * head_dim, hidden, Split.ROWS),)
        if bias:
            weights += (vector("self_attn.q_proj.bias", heads * head_dim, Split.ROWS),)
    return weights


def _delta_net(
    fields: Fields, hidden: int, *, merged: bool
) -> tuple[tuple[Weight, ...], StateCache]:
    key_heads, value_heads = (
        fields.whole("linear_num_key_heads"),
        fields.whole("linear_num_value_heads"),
    )
    key_dim, value_dim = (
        fields.whole("linear_key_head_dim"),
        fields.whole("linear_value_head_dim"),
    )
    kernel = fields.whole("linear_conv_kernel_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    block = "linear_attn."
    if merged:
        inputs: tuple[Weight, ...] = (
            Weight(f"{block}in_proj_qkvz", 2 * keys + 2 * values, hidden, Split.ROWS),
            Weight(f"{block}in_proj_ba", 2 * value_heads, hidden, Split.ROWS),
        )
    else:
        inputs = (
            Weight(f"{block}in_proj_qkv", 2 * keys + values, hidden, Split.ROWS),
            Weight(f"{block}in_proj_z", values, hidden, Split.ROWS),
            Weight(f"{block}in_proj_b", value_heads, hidden, Split.ROWS),
            Weight(f"{block}in_proj_a", value_heads, hidden, Split.ROWS),
        )
    weights = (
        *inputs,
        Weight(f"{block}conv1d", 2 * keys + values, kernel, Split.ROWS, linear=False),
        vector(f"{block}dt_bias", value_heads, Split.ROWS),
        vector(f"{block}A_log", value_heads, Split.ROWS, dtype="float32"),
        vector(f"{block}norm", value_dim),
        Weight(f"{block}out_proj", hidden, values, Split.COLUMNS),
    )
    state = StateCache(
        "gdn",
        ((kernel - 1, 2 * keys + values), (value_heads, value_dim, key_dim)),
        (1, 0),
        ("model", fields.text("mamba_ssm_dtype", default="model")),
    )
    return weights, state


def olmo(config: Mapping[str, Any]) -> Architecture:
    """
    Describe OLMo Hybrid, with gated delta nets, and full attention in every fourth layer.

    Source: olmo_hybrid.py and layers/mamba/gdn/olmo_gdn_linear_attn.py, and transformers'
    OlmoHybridConfig for missing config values.
    """
    fields = named_fields(config, "OlmoHybridForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    head_dim, dense = hidden // max(heads, 1), fields.whole("intermediate_size")
    linear, state = _olmo_delta_net(fields, hidden, heads)
    linear += (*norm("input_layernorm", hidden), *norm("post_attention_layernorm", hidden))
    own = (
        *attention(hidden, heads, kv_heads, head_dim),
        vector("self_attn.q_norm", hidden),
        vector("self_attn.k_norm", kv_heads * head_dim),
        *norm("post_attention_layernorm", hidden),
        *norm("post_feedforward_layernorm", hidden),
    )
    mlp, full = gated_mlp(hidden, dense), FullCache(kv_heads, head_dim)
    layers = [
        Layer(own + mlp, full) if attends else Layer(linear + mlp, state)
        for attends in attention_layers(fields, fields.whole("num_hidden_layers"))
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=dense,
        further=rotary_tables(fields, head_dim),
    )


def _olmo_delta_net(
    fields: Fields, hidden: int, heads: int
) -> tuple[tuple[Weight, ...], StateCache]:
    key_heads = fields.whole("linear_num_key_heads", default=heads)
    value_heads = fields.whole("linear_num_value_heads", default=heads)
    key_dim = fields.whole("linear_key_head_dim", default=hidden * 3 // (4 * max(key_heads, 1)))
    value_dim = fields.whole("linear_value_head_dim", default=2 * key_dim)
    kernel = fields.whole("linear_conv_kernel_dim", default=4)
    keys, values = key_heads * key_dim, value_heads * value_dim
    block = "linear_attn."
    weights = (
        Weight(f"{block}q_proj", keys, hidden, Split.ROWS),
        Weight(f"{block}k_proj", keys, hidden, Split.ROWS),
        Weight(f"{block}v_proj", values, hidden, Split.ROWS),
        Weight(f"{block}g_proj", values, hidden, Split.ROWS),
        Weight(f"{block}b_proj", value_heads, hidden, Split.ROWS),
        Weight(f"{block}a_proj", value_heads, hidden, Split.ROWS),
        Weight(f"{block}conv1d", 2 * keys + values, kernel, Split.ROWS, linear=False),
        vector(f"{block}dt_bias", value_heads, Split.ROWS),
        vector(f"{block}A_log", value_heads, Split.ROWS),
        vector(f"{block}o_norm", value_dim),
        Weight(f"{block}o_proj", hidden, values, Split.COLUMNS),
    )
    state = StateCache(
        "gdn",
        ((kernel - 1, 2 * keys + values), (value_heads, value_dim, key_dim)),
        (1, 0),
        ("model", "model"),
    )
    return weights, state


def _qwen_mixture(fields: Fields, hidden: int, inner: int, experts: int) -> tuple[Weight, ...]:
    weights = routed_experts(hidden, inner, experts)
    if shared := fields.whole("shared_expert_intermediate_size", default=0):
        weights += gated_mlp(hidden, shared, prefix="mlp.shared_expert.")
        weights += (Weight("mlp.shared_expert_gate", 1, hidden, linear=False),)
    return weights


def kimi_linear(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Kimi Linear, or the text part of Kimi K3.

    The layers have Kimi delta attention, or latent attention in every fourth layer, and experts. In
    Kimi K3, the experts have a smaller hidden size, and attention's output has a gate. Source:
    vllm/models/kimi_k3; before 0.32, model_executor/models/kimi_linear.py.
    """
    fields = named_fields(config, "KimiLinearForCausalLM")
    linear = fields.section("linear_attn_config")
    if linear is None:
        raise fields.missing_error("linear_attn_config")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    experts, inner = fields.whole("num_experts", default=0), 0
    dense = fields.whole("intermediate_size")
    mlp = gated_mlp(hidden, dense)
    mixture: tuple[Weight, ...] = ()
    if experts:
        inner = fields.whole("moe_intermediate_size")
        mixture = _kimi_experts(fields, hidden, inner, experts)
    norms: tuple[Weight, ...] = (
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    if fields.value("attn_res_block_size") is not None:
        for name in ("self_attention_res", "mlp_res"):
            norms += norm(f"{name}_norm", hidden)
            norms += (Weight(f"{name}_proj", 1, hidden, linear=False),)
    own = latent_attention(fields)
    if fields.flag("mla_use_output_gate"):
        own += (Weight("self_attn.g_proj", heads * fields.whole("v_head_dim"), hidden, Split.ROWS),)
    latent = LatentCache(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim"))
    delta, state = _kimi_delta(linear, hidden)
    with_state = linear.wholes("kda_layers")
    layers = []
    for index in range(fields.whole("num_hidden_layers")):
        routes = experts and not is_dense_layer(fields, index)
        rest = norms + (mixture if routes else mlp)
        layers.append(
            Layer(delta + rest, state) if index + 1 in with_state else Layer(own + rest, latent)
        )
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=1,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
    )


_LEAST_EXPERT = 256
"""Minimum inner size of a Kimi expert on one GPU: vllm/models/kimi_k3."""


def _kimi_experts(fields: Fields, hidden: int, inner: int, experts: int) -> tuple[Weight, ...]:
    block = "block_sparse_moe."
    size = fields.whole("routed_expert_hidden_size", default=0)
    own = routed_experts(size or hidden, inner, experts, prefix=block, matrices=NUMBERED)[1:]
    weights = (
        Weight(f"{block}gate", experts, hidden, linear=False),
        vector(f"{block}gate.e_score_correction_bias", experts, dtype="float32"),
        *(replace(weight, least=_LEAST_EXPERT) for weight in own),
    )
    if size and size != hidden:
        weights += (
            Weight(f"{block}routed_expert_down_proj", size, hidden, linear=False),
            Weight(f"{block}routed_expert_up_proj", hidden, size, linear=False),
        )
        if fields.flag("latent_moe_use_norm"):
            weights += norm(f"{block}routed_expert_norm", size)
    if shared := fields.whole("num_shared_experts", default=0):
        weights += gated_mlp(hidden, shared * inner, prefix=f"{block}shared_experts.")
    return weights


def _kimi_delta(
    linear: Fields, hidden: int, *, block: str = "self_attn."
) -> tuple[tuple[Weight, ...], StateCache]:
    """
    Return the weights and the state of Kimi delta attention.

    Source: KimiGatedDeltaNetAttention in layers/mamba/gdn/kimi_gdn_linear_attn.py.
    """
    heads, dim = linear.whole("num_heads"), linear.whole("head_dim")
    kernel, size = linear.whole("short_conv_kernel_size", default=4), heads * dim
    if linear.flag("use_full_rank_gate"):
        gate: tuple[Weight, ...] = (Weight(f"{block}g_proj", size, hidden, Split.ROWS),)
    else:
        gate = (
            Weight(f"{block}g_a_proj", dim, hidden),
            Weight(f"{block}g_b_proj", size, dim, Split.ROWS),
        )
    weights = (
        *(Weight(f"{block}{name}_proj", size, hidden, Split.ROWS) for name in "qkv"),
        *(
            Weight(f"{block}{name}_conv1d", size, kernel, Split.ROWS, linear=False, dtype="float32")
            for name in "qkv"
        ),
        Weight(f"{block}f_a_proj", dim, hidden),
        Weight(f"{block}f_b_proj", size, dim, Split.ROWS),
        Weight(f"{block}b_proj", heads, hidden, Split.ROWS),
        vector(f"{block}dt_bias", size, Split.ROWS, dtype="float32"),
        vector(f"{block}A_log", heads, Split.ROWS, dtype="float32"),
        *gate,
        *norm(f"{block}o_norm", dim),
        Weight(f"{block}o_proj", hidden, size, Split.COLUMNS),
    )
    shapes = ((kernel - 1, 3 * size), (heads, dim, dim))
    return weights, StateCache("kda", shapes, (1, 0), ("model", "float32"))


def alice(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Alice AI, with Kimi delta attention, or Qwen3-Next's attention in some layers.

    Every layer has experts. The input of each layer is mixed from earlier layers. Source:
    alice_ai.py.
    """
    fields = named_fields(config, "AliceAIForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    experts, inner = fields.whole("num_experts"), fields.whole("moe_intermediate_size")
    sizes = {
        "num_heads": fields.whole("linear_num_key_heads"),
        "head_dim": fields.whole("linear_key_head_dim"),
        "short_conv_kernel_size": fields.whole("linear_conv_kernel_dim"),
    }
    delta, state = _kimi_delta(Fields(sizes, fields.name), hidden, block="linear_attn.")
    own = attention(hidden, heads, kv_heads, head_dim, head_norm=True)
    own += (Weight("self_attn.q_proj", heads * head_dim, hidden, Split.ROWS),)
    rest = (
        *_qwen_mixture(fields, hidden, inner, experts),
        vector("mlp.gate.e_score_correction_bias", experts, dtype="float32"),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    full = FullCache(kv_heads, head_dim)
    layers = []
    for index, attends in enumerate(attention_layers(fields, fields.whole("num_hidden_layers"))):
        mixing = _alice_mixing("mlp_res", hidden)
        if index:
            mixing += _alice_mixing("attn_res", hidden)
        layers.append(
            Layer(own + rest + mixing, full) if attends else Layer(delta + rest + mixing, state)
        )
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        pipeline=False,
        notes=("the memory of the states that the layers keep during a step is not counted",),
        further=(
            *rotary_tables(fields, head_dim),
            Part("mixing", _alice_mixing("model.attnres_final.res", hidden), StagePlacement.LAST),
        ),
    )


def _alice_mixing(name: str, hidden: int) -> tuple[Weight, ...]:
    return Weight(f"{name}_proj", 1, hidden, linear=False), vector(f"{name}_norm_weight", hidden)


def bailing_delta(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Ling 3, with Kimi delta attention. Every `layer_group_size`-th layer has latent
    attention.

    Layers after the last whole group also have latent attention. Source: bailing_moe_v3.py.
    """
    fields = named_fields(config, "BailingMoeV3ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    experts, inner = fields.whole("num_experts"), fields.whole("moe_intermediate_size")
    if not fields.flag("no_kda_lora"):
        raise FleetError(
            f"config.json of {fields.name}: `{fields.path}no_kda_lora` is not true, but vLLM "
            "serves this architecture only without LoRA in KDA layers: use a different checkpoint"
        )
    dense, bias = fields.whole("intermediate_size"), fields.flag("use_bias")
    delta, state = _bailing_delta(fields, hidden, heads)
    latent, value = latent_attention(fields, prefix="attention."), fields.whole("v_head_dim")
    gates = {"head_wise": heads, "element_wise": heads * value}
    if rows := gates.get(fields.text("gated_attention_proj_granularity_type")):
        latent += (Weight("attention.g_proj", rows, hidden, Split.ROWS),)
    shared = fields.whole("num_shared_experts") * fields.whole(
        "moe_shared_expert_intermediate_size"
    )
    mixture = (
        *routed_experts(
            hidden, inner, experts, router_dtype="float32", correction="gate.expert_bias"
        ),
        *gated_mlp(hidden, shared, prefix="mlp.shared_experts.", bias=bias),
    )
    norms = (*norm("input_layernorm", hidden), *norm("post_attention_layernorm", hidden))
    cache = LatentCache(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim"))
    every, count = fields.whole("layer_group_size") or 1, fields.whole("num_hidden_layers")
    first = fields.whole("first_k_dense_replace")
    layers = []
    for index in range(count):
        rest = norms + (gated_mlp(hidden, dense, bias=bias) if index < first else mixture)
        if (index + 1) % every and index < count // every * every:
            layers.append(Layer(delta + rest, state))
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


def _bailing_delta(
    fields: Fields, hidden: int, heads: int
) -> tuple[tuple[Weight, ...], StateCache]:
    dim, kernel = fields.whole("head_dim"), fields.whole("short_conv_kernel_size")
    size, block = heads * dim, "attention."
    weights = (
        *(Weight(f"{block}{name}_proj", size, hidden, Split.ROWS) for name in "qkvfg"),
        Weight(f"{block}b_proj", heads, hidden, Split.ROWS),
        *(
            Weight(f"{block}{name}_conv1d", size, kernel, Split.ROWS, linear=False, dtype="float32")
            for name in "qkv"
        ),
        vector(f"{block}dt_bias", size, Split.ROWS, dtype="float32"),
        vector(f"{block}A_log", heads, Split.ROWS, dtype="float32"),
        *norm(f"{block}o_norm", dim),
        Weight(f"{block}o_proj", hidden, size, Split.COLUMNS),
    )
    shapes = ((kernel - 1, 3 * size), (heads, dim, dim))
    return weights, StateCache("kda", shapes, (1, 0), ("model", "float32"))


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "AliceAIForCausalLM": alice,
    "BailingMoeV3ForCausalLM": bailing_delta,
    "KimiLinearForCausalLM": kimi_linear,
    "OlmoHybridForCausalLM": olmo,
    **{
        name: partial(qwen, name=name)
        for name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
    },
}
"""The builder of each architecture, by its name in `architectures`."""
