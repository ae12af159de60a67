"""
Describe decoders with Mamba or Mamba-2 in most or all layers.  Pure.

Source: the classes in vLLM's model_executor/models, and model_executor/layers/mamba/mamba_utils.py
for the shapes of their states. In a `StateCache`, every shape except the last belongs to a
convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.building_blocks import (
    attention,
    gated_mlp,
    norm,
    plain_mlp,
    rotary_tables,
    vector,
)
from gpufleet.sizing.architectures.components import (
    Architecture,
    FullCache,
    Layer,
    Split,
    StateCache,
    Weight,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.moe_common import (
    assemble,
    attention_layers,
    head_size,
    named_fields,
    routed_experts,
    too_short_error,
    with_prefix,
)
from gpufleet.sizing.architectures.moe_irregular import granite_experts


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
        """
        Return the mixer's weights. If TP cannot divide the groups, several ranks have copies.
        """
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
        """
        Return the state of the mixer: of its convolution (the last inputs), and of its recurrence.
        """
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


def nemotron_h(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Nemotron-H or Nemotron 3. Each layer is either Mamba-2, attention, an MLP, or experts.

    In `hybrid_override_pattern`, the letters for these layers are M, *, - and E. Source:
    nemotron_h.py.
    """
    fields = named_fields(config, "NemotronHForCausalLM")
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
                f"config.json of {fields.name}: `hybrid_override_pattern` has {letter!r}, but only "
                "M, *, - and E are valid: use the publisher's original file"
            )
        layers.append(Layer(mixer.weights + norm("norm", hidden), mixer.cache))
    return assemble(
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
        draft_layers=_nemotron_drafts(fields, hidden, mixers),
    )


def _nemotron_drafts(fields: Fields, hidden: int, mixers: Mapping[str, Layer]) -> tuple[Layer, ...]:
    """
    Return the layers for multi-token prediction, with attention and experts.

    They have their own pattern in the config.

    Source: nemotron_h_mtp.py.
    """
    steps = fields.whole("num_nextn_predict_layers", default=0)
    pattern = fields.text("mtp_hybrid_override_pattern", default="")
    if not steps or not pattern or not set(pattern) <= set(mixers):
        return ()
    first = (
        Weight("eh_proj", hidden, 2 * hidden, Split.ROWS),
        *norm("enorm", hidden),
        *norm("hnorm", hidden),
    )
    drafts = []
    for index, letter in enumerate(pattern * steps):
        weights = mixers[letter].weights + norm("norm", hidden)
        if index % len(pattern) == 0:
            weights = first + weights
        if index % len(pattern) == len(pattern) - 1:
            weights += norm("final_layernorm", hidden)
        drafts.append(Layer(with_prefix(f"mtp.layers.{index}.", weights), mixers[letter].cache))
    return tuple(drafts)


def _inner(fields: Fields) -> int:
    return fields.whole("intermediate_size")


def _pattern(fields: Fields) -> str:
    """Return the pattern of layers, which has a letter for each layer."""
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    if kinds := fields.texts("layers_block_type"):
        return "".join(letters.get(kind, kind[:1] or "?") for kind in kinds)
    pattern = fields.text("hybrid_override_pattern")
    if not pattern:
        raise fields.missing_error("hybrid_override_pattern", "layers_block_type")
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
    """Return experts of two matrices. If `moe_latent_size` is set, their hidden size is smaller."""
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
    """Describe Granite 4, with Mamba-2 and a few attention layers, and with or without experts."""
    fields = named_fields(config, "GraniteMoeHybridForCausalLM")
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
    mixer = _mamba2_layer(fields, hidden)
    count = fields.whole("num_hidden_layers")
    layers = [
        Layer(own + rest, FullCache(kv_heads, head_dim))
        if attends
        else Layer(mixer.weights + rest, mixer.cache)
        for attends in attention_layers(fields, count)
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=fields.whole("shared_intermediate_size", default=0),
        tied=True,
    )


def _mamba2_layer(fields: Fields, hidden: int, *, gated_norm: bool = True) -> Layer:
    """Return a Mamba-2 mixer from the keys that Granite, Bamba and Falcon-H1 share."""
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
    """Describe Bamba, with Mamba-2, and with attention in the layers that the config lists."""
    fields = named_fields(config, "BambaForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), hidden // max(heads, 1)
    rest = (
        *gated_mlp(hidden, _inner(fields), prefix="feed_forward."),
        *norm("input_layernorm", hidden),
        *norm("pre_ff_layernorm", hidden),
    )
    own = attention(hidden, heads, kv_heads, head_dim)
    mixer = _mamba2_layer(fields, hidden)
    attend = fields.wholes("attn_layer_indices")
    layers = [
        Layer(own + rest, FullCache(kv_heads, head_dim))
        if index in attend
        else Layer(mixer.weights + rest, mixer.cache)
        for index in range(fields.whole("num_hidden_layers"))
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=_inner(fields),
        norm_name="model.final_layernorm",
        further=rotary_tables(fields, head_dim),
    )


def falcon_h1(config: Mapping[str, Any]) -> Architecture:
    """Describe Falcon-H1, whose layers have attention and Mamba-2 in parallel."""
    fields = named_fields(config, "FalconH1ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), head_size(fields, heads)
    mixer = _mamba2_layer(fields, hidden, gated_norm=fields.flag("mamba_rms_norm"))
    weights = (
        *attention(hidden, heads, kv_heads, head_dim),
        *mixer.weights,
        *gated_mlp(hidden, _inner(fields), prefix="feed_forward."),
        *norm("input_layernorm", hidden),
        *norm("pre_ff_layernorm", hidden),
    )
    layer = Layer(weights, FullCache(kv_heads, head_dim), more=mixer.caches)
    return assemble(
        fields,
        [layer] * fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=_inner(fields),
        norm_name="model.final_layernorm",
        further=rotary_tables(fields, head_dim),
    )


def zamba2(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Zamba2. All layers have Mamba-2, and some layers also have a shared transformer.

    There are only a few transformers, which the layers share. Each layer with a transformer has its
    own adapters and its own cache. A transformer's weights are counted with the first layer that
    uses it. Source: zamba2.py.
    """
    fields = named_fields(config, "Zamba2ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    dense, head_dim = _inner(fields), 2 * hidden // max(heads, 1)
    count = fields.whole("num_hidden_layers")
    kinds = fields.texts("layers_block_type", "layer_types")
    if len(kinds) < count:
        raise too_short_error(fields, "layers_block_type", len(kinds))
    inner = fields.whole("mamba_expand", default=2) * hidden
    mixer = Mamba2(
        inner=inner,
        heads=fields.whole("n_mamba_heads"),
        head_dim=inner // max(fields.whole("n_mamba_heads"), 1),
        groups=fields.whole("mamba_ngroups", default=1),
        state=fields.whole("mamba_d_state"),
        kernel=fields.whole("mamba_d_conv", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("add_bias_linear"),
    )
    alone = Layer(mixer.weights(hidden) + norm("input_layernorm", hidden), mixer.cache())
    beside = (
        *mixer.weights(hidden, "mamba_decoder.mamba."),
        *norm("mamba_decoder.input_layernorm", hidden),
        Weight("linear", hidden, hidden),
        *_zamba_adapters(fields, hidden, dense),
    )
    shared = _zamba_transformer(fields, hidden, heads, head_dim, dense)
    full, left = FullCache(heads, head_dim), fields.whole("num_mem_blocks", default=1)
    layers = []
    for kind in kinds[:count]:
        if kind != "hybrid":
            layers.append(alone)
            continue
        layers.append(Layer(beside + (shared if left > 0 else ()), full, more=alone.caches))
        left -= 1
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=heads,
        intermediate_size=dense,
        tied=True,
        norm_name="model.final_layernorm",
        pipeline=False,
        further=rotary_tables(fields, head_dim) if fields.flag("use_mem_rope") else (),
    )


def _zamba_transformer(
    fields: Fields, hidden: int, heads: int, head_dim: int, dense: int
) -> tuple[Weight, ...]:
    """
    Return the weights of a shared transformer, which has attention and an MLP.

    The input of the attention is the layer's input together with the embedding.
    """
    block, wide = "shared_transformer.", heads * head_dim
    bias = fields.flag("add_bias_linear")
    return (
        *(
            Weight(f"{block}self_attn.{name}", wide, wide, Split.ROWS)
            for name in ("q_proj", "k_proj", "v_proj")
        ),
        Weight(f"{block}self_attn.o_proj", hidden, wide, Split.COLUMNS),
        *gated_mlp(hidden, dense, prefix=f"{block}feed_forward.", bias=bias),
        *norm(f"{block}input_layernorm", 2 * hidden),
        *norm(f"{block}pre_ff_layernorm", hidden),
    )


def _zamba_adapters(fields: Fields, hidden: int, dense: int) -> tuple[Weight, ...]:
    """
    Return the weights that a layer adds to its shared transformer, which are pairs of thin
    matrices.
    """
    rank = fields.whole("adapter_rank", default=128)
    block = "shared_transformer."
    pairs = [("feed_forward.gate_up_proj_adapter", hidden, 2 * dense)]
    if fields.flag("use_shared_attention_adapter"):
        pairs += [
            (f"self_attn.linear_{name}_adapter", 2 * hidden, 2 * hidden) for name in ("q", "k", "v")
        ]
    return tuple(
        weight
        for name, into, out in pairs
        for weight in (
            Weight(f"{block}{name}.0", rank, into, Split.ROWS),
            Weight(f"{block}{name}.1", out, rank, Split.ROWS),
        )
    )


def jamba(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Jamba, with Mamba, attention in every eighth layer, and experts in every second layer.
    """
    fields = named_fields(config, "JambaForCausalLM")
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
    mixture = routed_experts(hidden, inner, experts, prefix="feed_forward.", router="router")
    mlp = gated_mlp(hidden, inner, prefix="feed_forward.")
    layers = []
    for index in range(fields.whole("num_hidden_layers")):
        routed = _is_each(fields, "expert_layer", index, period=2, offset=1)
        routes = routed and experts > 1  # Jamba Reasoning has one expert, which is the MLP
        rest = norms + (mixture if routes else mlp)
        if _is_each(fields, "attn_layer", index, period=8, offset=4):
            layers.append(Layer(own + rest, FullCache(kv_heads, head_dim)))
        else:
            layers.append(Layer(mixer + rest, mamba1_state(width, state, kernel)))
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts if experts > 1 else 0,
        moe_intermediate_size=inner if experts > 1 else 0,
        intermediate_size=inner,
        norm_name="model.final_layernorm",
    )


def _is_each(fields: Fields, key: str, index: int, *, period: int, offset: int) -> bool:
    every = fields.whole(f"{key}_period", default=period) or 1
    return index % every == fields.whole(f"{key}_offset", default=offset)


def mamba(config: Mapping[str, Any]) -> Architecture:
    """Describe Mamba or Falcon-Mamba, which have no attention (mamba.py)."""
    fields = named_fields(config, "MambaForCausalLM")
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
    return _without_attention(fields, layer, tied=not fields.name.startswith("Falcon"))


def mamba2_alone(config: Mapping[str, Any]) -> Architecture:
    """Describe Mamba-2, which has no attention (mamba2.py)."""
    fields = named_fields(config, "Mamba2ForCausalLM")
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
    return replace(_without_attention(fields, layer, tied=True), pipeline=False)


def _without_attention(fields: Fields, layer: Layer, *, tied: bool) -> Architecture:
    return assemble(
        fields,
        [layer] * fields.whole("num_hidden_layers", "n_layer"),
        heads=0,
        kv_heads=0,
        tied=tied,
        embedding_name="backbone.embeddings",
        norm_name="backbone.norm_f",
        prefix="backbone.layers.",
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "BambaForCausalLM": bamba,
    "FalconH1ForCausalLM": falcon_h1,
    "FalconMambaForCausalLM": mamba,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "JambaForCausalLM": jamba,
    "Mamba2ForCausalLM": mamba2_alone,
    "MambaForCausalLM": mamba,
    "NemotronHForCausalLM": nemotron_h,
    "Zamba2ForCausalLM": zamba2,
}
