"""
Decoders that keep a state of one size instead of keys in most layers: Mamba, delta nets.  Pure.

Source: the classes in vLLM's model_executor/models, the shapes of their states
model_executor/layers/mamba/mamba_utils.py. In a `StateCache` every shape but the last is of a
convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

from gpufleet.architecture import gemma
from gpufleet.architecture.dense import attention, gated_mlp, norm, plain_mlp, rotary_of, vector
from gpufleet.architecture.experts import granite_experts
from gpufleet.architecture.fields import Fields
from gpufleet.architecture.latent import latent_attention
from gpufleet.architecture.mixture import (
    NUMBERED,
    assembled,
    head_size,
    leading_dense,
    named,
    routed,
    too_short,
)
from gpufleet.architecture.parts import (
    Architecture,
    FullCache,
    LatentCache,
    Layer,
    Split,
    StateCache,
    Weight,
)
from gpufleet.errors import FleetError


@dataclass(frozen=True)
class Mamba2:
    """The sizes of a Mamba-2 mixer. Source: MambaMixer2 in layers/mamba/mamba_mixer2.py."""

    inner: int
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    gated_norm: bool = True

    def weights(self, hidden: int, prefix: str = "mamba.") -> tuple[Weight, ...]:
        """Return its weights; groups that TP does not divide are on several ranks."""
        inner, heads, groups = self.inner, self.heads, self.groups
        shared = 2 * groups * self.state
        into, conv = f"{prefix}in_proj", f"{prefix}conv1d"
        weights = [
            Weight(into, inner, hidden, Split.ROWS),
            Weight(into, inner, hidden, Split.ROWS),
            Weight(into, shared, hidden, Split.HEADS, heads=groups),
            Weight(into, heads, hidden, Split.ROWS),
            Weight(conv, inner, self.kernel, Split.ROWS, linear=False),
            Weight(conv, shared, self.kernel, Split.HEADS, heads=groups, linear=False),
            vector(f"{prefix}A_log", heads, Split.ROWS, dtype="float32"),
            vector(f"{prefix}D", heads, Split.ROWS),
            vector(f"{prefix}dt_bias", heads, Split.ROWS),
            Weight(f"{prefix}out_proj", hidden, inner, Split.COLUMNS),
        ]
        if self.gated_norm:
            weights.append(vector(f"{prefix}norm", inner, Split.ROWS))
        if self.conv_bias:
            weights.append(vector(f"{conv}.bias", inner, Split.ROWS))
            weights.append(vector(f"{conv}.bias", shared, Split.HEADS, heads=groups))
        if self.bias:
            weights.append(vector(f"{into}.bias", 2 * inner + heads, Split.ROWS))
            weights.append(vector(f"{into}.bias", shared, Split.HEADS, heads=groups))
            weights.append(vector(f"{prefix}out_proj.bias", hidden))
        return tuple(weights)

    def cache(self, dtype: str = "model") -> StateCache:
        """Return its state: what the convolution looks back on, and the recurrence's."""
        shapes = (
            (self.kernel - 1, self.inner),
            (self.groups, 2 * self.state, self.kernel - 1),
            (self.heads, self.head_dim, self.state),
        )
        return StateCache("mamba2", shapes, (1, 0, 0), ("model", "model", dtype))


def mamba1(
    hidden: int,
    inner: int,
    state: int,
    kernel: int,
    rank: int,
    *,
    prefix: str = "mamba.",
    conv_bias: bool = True,
    bias: bool = False,
) -> tuple[Weight, ...]:
    """Return the weights of a Mamba mixer. Source: MambaMixer in mamba/mamba_mixer.py."""
    weights = [
        Weight(f"{prefix}in_proj", 2 * inner, hidden, Split.ROWS),
        Weight(f"{prefix}conv1d", inner, kernel, Split.ROWS, linear=False),
        Weight(f"{prefix}x_proj", rank + 2 * state, inner, Split.COLUMNS),
        Weight(f"{prefix}dt_proj", inner, rank, Split.ROWS),
        vector(f"{prefix}dt_proj.bias", inner, Split.ROWS),
        Weight(f"{prefix}A_log", inner, state, Split.ROWS, linear=False, dtype="float32"),
        vector(f"{prefix}D", inner, Split.ROWS),
        Weight(f"{prefix}out_proj", hidden, inner, Split.COLUMNS),
    ]
    if conv_bias:
        weights.append(vector(f"{prefix}conv1d.bias", inner, Split.ROWS))
    if bias:
        weights.append(vector(f"{prefix}in_proj.bias", 2 * inner, Split.ROWS))
        weights.append(vector(f"{prefix}out_proj.bias", hidden))
    return tuple(weights)


def mamba1_state(inner: int, state: int, kernel: int) -> StateCache:
    """Return a Mamba layer's state."""
    shapes = ((kernel - 1, inner), (inner, state))
    return StateCache("mamba1", shapes, (1, 0), ("model", "model"))


def qwen(config: Mapping[str, Any], *, name: str) -> Architecture:
    """
    Return Qwen3-Next or Qwen3.5's text part: gated delta nets, with full attention between.

    Source: qwen3_next.py, qwen3_5.py and layers/mamba/gdn/qwen_gdn_linear_attn.py.
    """
    fields = named(config, name)
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
    for index, attends in enumerate(_full_attention(fields, count)):
        routes = experts and index not in lone and (index + 1) % step == 0
        rest = norms + (mixture if routes else gated_mlp(hidden, dense))
        layers.append(Layer(own + rest, full) if attends else Layer(linear + rest, state))
    further = fields.whole(
        "mtp_num_hidden_layers",
        "num_nextn_predict_layers",
        default=1 if name == "Qwen3NextForCausalLM" else 0,
    )
    feed_forward = mixture or gated_mlp(hidden, dense)
    draft = (
        Weight("mtp.fc", hidden, 2 * hidden, linear=False),
        *norm("mtp.pre_fc_norm_embedding", hidden),
        *norm("mtp.pre_fc_norm_hidden", hidden),
        *norm("mtp.norm", hidden),
    )
    return assembled(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=rotary_of(fields, head_dim),
        draft_layers=[Layer(draft + own + norms + feed_forward, full)] * further,
    )


def _full_attention(fields: Fields, count: int) -> tuple[bool, ...]:
    """Return for each layer whether it attends to all tokens: `layer_types`, or every n-th."""
    kinds = fields.texts("layer_types", "layers_block_type")
    if kinds:
        if len(kinds) < count:
            raise too_short(fields, "layer_types", len(kinds))
        return tuple(kind in {"full_attention", "attention"} for kind in kinds[:count])
    every = fields.whole("full_attention_interval", default=4) or 1
    return tuple((index + 1) % every == 0 for index in range(count))


def _gated_attention(
    fields: Fields, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Weight, ...]:
    """Attention whose query projection makes a gate for the output too."""
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


def _qwen_mixture(fields: Fields, hidden: int, inner: int, experts: int) -> tuple[Weight, ...]:
    weights = routed(hidden, inner, experts)
    if shared := fields.whole("shared_expert_intermediate_size", default=0):
        weights += gated_mlp(hidden, shared, prefix="mlp.shared_expert.")
        weights += (Weight("mlp.shared_expert_gate", 1, hidden, linear=False),)
    return weights


def nemotron_h(config: Mapping[str, Any]) -> Architecture:
    """
    Return Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention, MLP or experts.

    Source: nemotron_h.py; `hybrid_override_pattern` has M, *, - and E for them.
    """
    fields = named(config, "NemotronHForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    pattern = _pattern(fields)
    mixers = {
        "*": Layer(
            attention(hidden, heads, kv_heads, head_dim, prefix="mixer."),
            FullCache(kv_heads, head_dim),
        )
    }
    if "M" in pattern:
        mixers["M"] = _nemotron_mamba(fields, hidden)
    if "E" in pattern:
        mixers["E"] = Layer(_nemotron_experts(fields, hidden))
    inners = list(fields.wholes("intermediate_size"))
    layers = []
    dense = 0
    for letter in pattern:
        if letter == "-":
            size = inners[min(dense, len(inners) - 1)] if inners else _inner(fields)
            dense += 1
            bias = fields.flag("mlp_bias")
            mixer = Layer(plain_mlp(hidden, size, prefix="mixer.", bias=bias))
        elif letter in mixers:
            mixer = mixers[letter]
        else:
            raise FleetError(
                f"config.json of {fields.name}: `hybrid_override_pattern` has {letter!r}, which is "
                "none of M, *, - and E; take the file as the model's publisher has it"
            )
        layers.append(Layer(mixer.weights + norm("norm", hidden), mixer.cache))
    return assembled(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=fields.whole("n_routed_experts") if "E" in pattern else 0,
        moe_intermediate_size=fields.whole("moe_intermediate_size") if "E" in pattern else 0,
        intermediate_size=inners[0] if inners else fields.whole("intermediate_size", default=0),
        embedding_name="backbone.embeddings",
        norm_name="backbone.norm_f",
        prefix="backbone.layers.",
    )


def _inner(fields: Fields) -> int:
    return fields.whole("intermediate_size")


def _pattern(fields: Fields) -> str:
    """Return a letter for each layer."""
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    if kinds := fields.texts("layers_block_type"):
        return "".join(letters.get(kind, kind[:1] or "?") for kind in kinds)
    pattern = fields.text("hybrid_override_pattern")
    if not pattern:
        raise fields.missing("hybrid_override_pattern", "layers_block_type")
    return pattern


def _nemotron_mamba(fields: Fields, hidden: int) -> Layer:
    heads, head_dim = fields.whole("mamba_num_heads"), fields.whole("mamba_head_dim")
    mixer = Mamba2(
        inner=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        groups=fields.whole("n_groups"),
        state=fields.whole("ssm_state_size"),
        kernel=fields.whole("conv_kernel"),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias"),
    )
    dtype = fields.text("mamba_ssm_cache_dtype", default="float32")
    return Layer(mixer.weights(hidden, "mixer."), mixer.cache(dtype))


def _nemotron_experts(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """Experts of two matrices, on a smaller hidden size where `moe_latent_size` says so."""
    experts, inner = fields.whole("n_routed_experts"), fields.whole("moe_intermediate_size")
    latent = fields.whole("moe_latent_size", default=0)
    size = latent or hidden
    bias = fields.flag("mlp_bias")
    weights: tuple[Weight, ...] = (
        Weight("mixer.gate", experts, hidden, linear=False),
        vector("mixer.gate.e_score_correction_bias", experts, dtype="float32"),
        Weight("mixer.experts.up_proj", inner, size, Split.ROWS, count=experts, expert=True),
        Weight("mixer.experts.down_proj", size, inner, Split.COLUMNS, count=experts, expert=True),
    )
    if shared := fields.whole("n_shared_experts", default=0):
        shared *= fields.whole("moe_shared_expert_intermediate_size")
        weights += plain_mlp(hidden, shared, prefix="mixer.shared_experts.", bias=bias)
    if latent:
        weights += (
            Weight("mixer.fc1_latent_proj", latent, hidden),
            Weight("mixer.fc2_latent_proj", hidden, latent),
        )
    return weights


def granite_hybrid(config: Mapping[str, Any]) -> Architecture:
    """Return Granite 4: Mamba-2 and a few attentions, with or without experts."""
    fields = named(config, "GraniteMoeHybridForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), hidden // max(heads, 1)
    experts = fields.whole("num_local_experts", default=0)
    inner = _inner(fields) if experts else 0
    bias = fields.flag("attention_bias")
    rest = (
        *granite_experts(fields, hidden, inner, experts),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    own = attention(hidden, heads, kv_heads, head_dim, bias=bias, out_bias=bias)
    mixer = _mamba2_of(fields, hidden)
    count = fields.whole("num_hidden_layers")
    layers = [
        Layer(own + rest, FullCache(kv_heads, head_dim))
        if attends
        else Layer(mixer.weights + rest, mixer.cache)
        for attends in _full_attention(fields, count)
    ]
    return assembled(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=fields.whole("shared_intermediate_size", default=0),
        tied=True,
    )


def _mamba2_of(fields: Fields, hidden: int, *, gated_norm: bool = True) -> Layer:
    """Return a Mamba-2 mixer by the keys that Granite, Bamba and Falcon-H1 have in common."""
    heads = fields.whole("mamba_n_heads")
    inner = fields.whole("mamba_d_ssm", default=0) or int(
        hidden * fields.number("mamba_expand", default=2)
    )
    found = fields.value("mamba_d_head")
    mixer = Mamba2(
        inner=inner,
        heads=heads,
        head_dim=found if isinstance(found, int) else inner // max(heads, 1),
        groups=fields.whole("mamba_n_groups", default=1),
        state=fields.whole("mamba_d_state"),
        kernel=fields.whole("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias"),
        gated_norm=gated_norm,
    )
    return Layer(mixer.weights(hidden), mixer.cache())


def bamba(config: Mapping[str, Any]) -> Architecture:
    """Return Bamba: Mamba-2, and attention in the layers that the config lists."""
    fields = named(config, "BambaForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), hidden // max(heads, 1)
    rest = (
        *gated_mlp(hidden, _inner(fields), prefix="feed_forward."),
        *norm("input_layernorm", hidden),
        *norm("pre_ff_layernorm", hidden),
    )
    own = attention(hidden, heads, kv_heads, head_dim)
    mixer = _mamba2_of(fields, hidden)
    attend = fields.wholes("attn_layer_indices")
    layers = [
        Layer(own + rest, FullCache(kv_heads, head_dim))
        if index in attend
        else Layer(mixer.weights + rest, mixer.cache)
        for index in range(fields.whole("num_hidden_layers"))
    ]
    return assembled(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=_inner(fields),
        norm_name="model.final_layernorm",
        further=rotary_of(fields, head_dim),
    )


def falcon_h1(config: Mapping[str, Any]) -> Architecture:
    """Return Falcon-H1, whose layers have attention and Mamba-2 side by side."""
    fields = named(config, "FalconH1ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    mixer = _mamba2_of(fields, hidden, gated_norm=fields.flag("mamba_rms_norm"))
    weights = (
        *attention(hidden, heads, kv_heads, head_dim),
        *mixer.weights,
        *gated_mlp(hidden, _inner(fields), prefix="feed_forward."),
        *norm("input_layernorm", hidden),
        *norm("pre_ff_layernorm", hidden),
    )
    layer = Layer(weights, FullCache(kv_heads, head_dim), more=mixer.caches)
    return assembled(
        fields,
        [layer] * fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=_inner(fields),
        norm_name="model.final_layernorm",
        further=rotary_of(fields, head_dim),
    )


def jamba(config: Mapping[str, Any]) -> Architecture:
    """Return Jamba: Mamba, every eighth layer attention, every second one experts."""
    fields = named(config, "JambaForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), hidden // max(heads, 1)
    inner, experts = _inner(fields), fields.whole("num_experts", default=16)
    state, kernel = (
        fields.whole("mamba_d_state", default=16),
        fields.whole("mamba_d_conv", default=4),
    )
    width = hidden * fields.whole("mamba_expand", default=2)
    stated = fields.value("mamba_dt_rank")
    rank = stated if isinstance(stated, int) else ceil(hidden / 16)
    mixer = mamba1(
        hidden,
        width,
        state,
        kernel,
        rank,
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias"),
    )
    mixer += norm("mamba.dt_layernorm", rank)
    mixer += norm("mamba.b_layernorm", state) + norm("mamba.c_layernorm", state)
    own = attention(hidden, heads, kv_heads, head_dim)
    norms = (*norm("input_layernorm", hidden), *norm("pre_ff_layernorm", hidden))
    mixture = routed(hidden, inner, experts, prefix="feed_forward.", router="router")
    mlp = gated_mlp(hidden, inner, prefix="feed_forward.")
    layers = []
    for index in range(fields.whole("num_hidden_layers")):
        routes = experts > 1 and _each(fields, "expert_layer", index, period=2, offset=1)
        rest = norms + (mixture if routes else mlp)
        if _each(fields, "attn_layer", index, period=8, offset=4):
            layers.append(Layer(own + rest, FullCache(kv_heads, head_dim)))
        else:
            layers.append(Layer(mixer + rest, mamba1_state(width, state, kernel)))
    return assembled(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts if experts > 1 else 0,
        moe_intermediate_size=inner if experts > 1 else 0,
        intermediate_size=inner,
        norm_name="model.final_layernorm",
    )


def _each(fields: Fields, key: str, index: int, *, period: int, offset: int) -> bool:
    every = fields.whole(f"{key}_period", default=period) or 1
    return index % every == fields.whole(f"{key}_offset", default=offset)


def mamba(config: Mapping[str, Any]) -> Architecture:
    """Return Mamba or Falcon-Mamba, which have no attention at all (mamba.py)."""
    fields = named(config, "MambaForCausalLM")
    hidden = fields.whole("hidden_size", "d_model")
    inner = fields.whole("intermediate_size", "d_inner", default=0) or hidden * fields.whole(
        "expand", default=2
    )
    state, kernel = (
        fields.whole("state_size", "d_state", default=16),
        fields.whole("conv_kernel", default=4),
    )
    stated = fields.value("time_step_rank")
    rank = stated if isinstance(stated, int) else ceil(hidden / 16)
    weights = mamba1(
        hidden,
        inner,
        state,
        kernel,
        rank,
        prefix="mixer.",
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias"),
    )
    layer = Layer(weights + norm("norm", hidden), mamba1_state(inner, state, kernel))
    return _without_attention(fields, layer, falcon=fields.name.startswith("Falcon"))


def mamba2_alone(config: Mapping[str, Any]) -> Architecture:
    """Return Mamba-2, which has no attention at all (mamba2.py)."""
    fields = named(config, "Mamba2ForCausalLM")
    hidden = fields.whole("hidden_size")
    mixer = Mamba2(
        inner=fields.whole("expand", default=2) * hidden,
        heads=fields.whole("num_heads"),
        head_dim=fields.whole("head_dim", default=64),
        groups=fields.whole("n_groups"),
        state=fields.whole("state_size"),
        kernel=fields.whole("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias"),
    )
    layer = Layer(mixer.weights(hidden, "mixer.") + norm("norm", hidden), mixer.cache())
    return _without_attention(fields, layer, falcon=False)


def _without_attention(fields: Fields, layer: Layer, *, falcon: bool) -> Architecture:
    return assembled(
        fields,
        [layer] * fields.whole("num_hidden_layers", "n_layer"),
        heads=0,
        kv_heads=0,
        tied=not falcon,
        embedding_name="backbone.embeddings",
        norm_name="backbone.norm_f",
        prefix="backbone.layers.",
    )


def lfm2(config: Mapping[str, Any]) -> Architecture:
    """Return LFM2, dense or with experts: short convolutions, with attention between."""
    fields = named(config, "Lfm2ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", "num_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), hidden // max(heads, 1)
    experts = fields.whole("num_experts", default=0)
    inner = fields.whole("moe_intermediate_size") if experts else 0
    dense = _inner(fields) if experts else _lfm2_width(fields)
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
    mixture = routed(
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
    return assembled(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        tied=fields.flag("tie_embedding", default=True),
        norm_name="model.embedding_norm",
        further=rotary_of(fields, head_dim),
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
        return _full_attention(fields, count)
    listed = fields.wholes("full_attn_idxs") or tuple(range(count))
    return tuple(index in listed for index in range(count))


def kimi_linear(config: Mapping[str, Any]) -> Architecture:
    """
    Return Kimi Linear: Kimi delta attention, every fourth layer latent attention; with experts.

    Kimi K3's text part too, which routes a smaller hidden size and gates what attention returns.
    Source: vllm/models/kimi_k3, before 0.32 model_executor/models/kimi_linear.py.
    """
    fields = named(config, "KimiLinearForCausalLM")
    linear = fields.below("linear_attn_config")
    if linear is None:
        raise fields.missing("linear_attn_config")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    experts, inner = fields.whole("num_experts", default=0), 0
    dense = _inner(fields)
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
            norms += (*norm(f"{name}_norm", hidden), Weight(f"{name}_proj", 1, hidden))
    own = latent_attention(fields)
    if fields.flag("mla_use_output_gate"):
        own += (Weight("self_attn.g_proj", heads * fields.whole("v_head_dim"), hidden, Split.ROWS),)
    latent = LatentCache(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim"))
    delta, state = _kimi_delta(linear, hidden)
    with_state = linear.wholes("kda_layers")
    layers = []
    for index in range(fields.whole("num_hidden_layers")):
        routes = experts and not leading_dense(fields, index)
        rest = norms + (mixture if routes else mlp)
        layers.append(
            Layer(delta + rest, state) if index + 1 in with_state else Layer(own + rest, latent)
        )
    return assembled(
        fields,
        layers,
        heads=heads,
        kv_heads=1,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
    )


def _kimi_experts(fields: Fields, hidden: int, inner: int, experts: int) -> tuple[Weight, ...]:
    block = "block_sparse_moe."
    size = fields.whole("routed_expert_hidden_size", default=0)
    weights = (
        Weight(f"{block}gate", experts, hidden, linear=False),
        vector(f"{block}gate.e_score_correction_bias", experts, dtype="float32"),
        *routed(size or hidden, inner, experts, prefix=block, matrices=NUMBERED)[1:],
    )
    if size and size != hidden:
        weights += (
            Weight(f"{block}routed_expert_down_proj", size, hidden),
            Weight(f"{block}routed_expert_up_proj", hidden, size),
        )
        if fields.flag("latent_moe_use_norm"):
            weights += norm(f"{block}routed_expert_norm", size)
    if shared := fields.whole("num_shared_experts", default=0):
        weights += gated_mlp(hidden, shared * inner, prefix=f"{block}shared_experts.")
    return weights


def _kimi_delta(linear: Fields, hidden: int) -> tuple[tuple[Weight, ...], StateCache]:
    """Source: KimiLinearGatedDeltaNetAttention in layers/mamba/gdn/kimi_gdn_linear_attn.py."""
    heads, dim = linear.whole("num_heads"), linear.whole("head_dim")
    kernel, size = linear.whole("short_conv_kernel_size", default=4), heads * dim
    block = "self_attn."
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


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **gemma.BUILDERS,
    "BambaForCausalLM": bamba,
    "FalconH1ForCausalLM": falcon_h1,
    "FalconMambaForCausalLM": mamba,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "JambaForCausalLM": jamba,
    "KimiLinearForCausalLM": kimi_linear,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2,
    "Mamba2ForCausalLM": mamba2_alone,
    "MambaForCausalLM": mamba,
    "NemotronHForCausalLM": nemotron_h,
    **{
        name: partial(qwen, name=name)
        for name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
    },
}
"""What reads the config of each hybrid decoder, by its name in `architectures`."""
