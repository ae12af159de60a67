"""
Describe Gemma 2, 3, 3n and 4. Most layers attend to a window, others to the whole context. Pure.

Values that Google's configs do not have are the defaults of their class in transformers. Source:
gemma2.py, gemma3.py, gemma3n.py and gemma4.py in vLLM's model_executor/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gpufleet.sizing.architectures.building_blocks import (
    attention,
    gated_mlp,
    norm,
    rotary,
    rotary_tables,
    vector,
)
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
from gpufleet.sizing.architectures.moe_common import assemble, named_fields, too_short_error
from gpufleet.sizing.architectures.unread_keys import with_values

_DEFAULTS: dict[str, dict[str, int]] = {
    "Gemma2ForCausalLM": {
        "vocab_size": 256000,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
    },
    "Gemma3ForCausalLM": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
    "Gemma3nForCausalLM": {
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "sliding_window_pattern": 5,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
    },
    "Gemma4ForCausalLM": {
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
}
"""
Defaults of Gemma2Config, Gemma3TextConfig, Gemma3nTextConfig, Gemma4TextConfig (transformers 5.19).
"""

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _complete_fields(config: Mapping[str, Any], name: str) -> Fields:
    missing = {key: value for key, value in _DEFAULTS[name].items() if config.get(key) is None}
    return named_fields(with_values(config, missing), name)


_WINDOWS = {"sliding_attention", "chunked_attention"}
"""
Types of layers that store a window. Chunks of Rnj-1 also attend to the previous chunk (rnj1.py).
"""


def _window_layers(fields: Fields, count: int) -> tuple[bool, ...]:
    """
    Return, for each layer, whether it has a window.

    `layer_types` decides. Without `layer_types`, every n-th layer has full attention.
    """
    if kinds := fields.texts("layer_types"):
        if len(kinds) < count:
            raise too_short_error(fields, "layer_types", len(kinds))
        return tuple(kind in _WINDOWS for kind in kinds[:count])
    every = fields.whole("sliding_window_pattern") or 1
    return tuple((index + 1) % every != 0 for index in range(count))


def _cache(fields: Fields, kv_heads: int, head_dim: int, *, windowed: bool) -> Cache:
    if windowed:
        return WindowCache(kv_heads, head_dim, fields.whole("sliding_window"))
    return FullCache(kv_heads, head_dim)


def _norms(hidden: int, names: tuple[str, ...] = _NORMS) -> tuple[Weight, ...]:
    return tuple(weight for name in names for weight in norm(name, hidden))


def gemma(config: Mapping[str, Any], *, name: str, head_norm: bool) -> Architecture:
    """
    Describe Gemma 2, or the text part of Gemma 3 if `head_norm` is set (norms on queries and keys).
    """
    fields = _complete_fields(config, name)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), fields.whole("head_dim")
    inner, count = fields.whole("intermediate_size"), fields.whole("num_hidden_layers")
    bias = fields.flag("attention_bias")
    weights = (
        *attention(
            hidden, heads, kv_heads, head_dim, bias=bias, out_bias=bias, head_norm=head_norm
        ),
        *gated_mlp(hidden, inner),
        *_norms(hidden),
    )
    layers = [
        Layer(weights, _cache(fields, kv_heads, head_dim, windowed=windowed))
        for windowed in _window_layers(fields, count)
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=inner,
        tied=True,
        further=(
            *rotary_tables(fields, head_dim),
            *(_local_rotary(fields, head_dim) if head_norm else ()),
        ),
    )


def _local_rotary(fields: Fields, head_dim: int) -> tuple[Part, ...]:
    """
    Return the rotary table of layers with a window, which has its own base and is never scaled.

    Newer checkpoints describe both tables in `rope_parameters`, which `rotary_tables` reads.
    Source: Gemma3Attention in model_executor/models/gemma3.py.
    """
    named_both = any(
        isinstance(part, Mapping) for part in (fields.value("rope_parameters") or {}).values()
    )
    if named_both:
        return ()
    return (rotary(fields.whole("max_position_embeddings"), head_dim),)


def gemma3n(config: Mapping[str, Any]) -> Architecture:
    """
    Describe the text part of Gemma 3n. Each layer has its own input, and some layers share a cache.
    """
    fields = _complete_fields(config, "Gemma3nForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head_dim = fields.whole("num_key_value_heads"), fields.whole("head_dim")
    count = fields.whole("num_hidden_layers")
    inners = fields.wholes("intermediate_size") or (fields.whole("intermediate_size"),) * count
    if len(inners) < count:
        raise too_short_error(fields, "intermediate_size", len(inners))
    inputs, low = fields.whole("altup_num_inputs"), fields.whole("laurel_rank")
    each = fields.whole("hidden_size_per_layer_input")
    own = count - fields.whole("num_kv_shared_layers")
    common = (
        *_norms(hidden),
        Weight("altup.correction_coefs", inputs, inputs),
        Weight("altup.prediction_coefs", inputs**2, inputs),
        Weight("altup.modality_router", inputs, hidden),
        *norm("altup.router_norm", hidden),
        vector("altup.correct_output_scale", hidden, dtype="float32"),
        Weight("laurel.linear_left", low, hidden, Split.ROWS),
        Weight("laurel.linear_right", hidden, low, Split.COLUMNS),
        *norm("laurel.post_laurel_norm", hidden),
        *_layer_input(hidden, each),
    )
    layers = []
    for index, windowed in enumerate(_window_layers(fields, count)):
        shares = index >= own
        weights = attention(hidden, heads, kv_heads, head_dim, head_norm=True)
        weights += gated_mlp(hidden, inners[index]) + common
        cache = None if shares else _cache(fields, kv_heads, head_dim, windowed=windowed)
        layers.append(Layer(_without_keys(weights) if shares else weights, cache))
    mixing = tuple(
        Weight(f"model.{name}.{number}", hidden, hidden, Split.ROWS)
        for name in ("altup_projections", "altup_unembed_projections")
        for number in range(inputs - 1)
    )
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=max(inners),
        tied=True,
        further=(
            *_layer_inputs(fields, hidden, each * count, each),
            Part("altup", mixing, StagePlacement.FIRST),
            *rotary_tables(fields, head_dim),
        ),
        pipeline=False,
    )


def gemma4(config: Mapping[str, Any]) -> Architecture:
    """
    Describe the text part of Gemma 4. Layers with a window have a different head size than others.

    With `attention_k_eq_v`, the checkpoint has only keys for layers with full attention, and vLLM
    also loads these keys as values.
    """
    fields = _complete_fields(config, "Gemma4ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    inner, count = fields.whole("intermediate_size"), fields.whole("num_hidden_layers")
    experts, expert_size = 0, 0
    if fields.value("num_experts") is not None:
        experts = fields.whole("num_experts")
        expert_size = fields.whole("moe_intermediate_size", "expert_intermediate_size")
    each = fields.whole("hidden_size_per_layer_input", default=0)
    shared = fields.whole("num_kv_shared_layers", default=0)
    same = fields.flag("attention_k_eq_v")
    full_heads = fields.whole("num_key_value_heads")
    if same:
        full_heads = fields.whole("num_global_key_value_heads", default=full_heads)
    layers = []
    for index, windowed in enumerate(_window_layers(fields, count)):
        shares = shared > 0 and index >= count - shared
        head_dim = fields.whole("head_dim" if windowed else "global_head_dim")
        kv_heads = fields.whole("num_key_value_heads") if windowed else full_heads
        bias = fields.flag("attention_bias")
        weights = attention(
            hidden, heads, kv_heads, head_dim, bias=bias, out_bias=bias, head_norm=True
        )
        if shares:
            weights = _without_keys(weights)
        elif same and not windowed:
            weights = _values_from_keys(weights)
        wide = shares and fields.flag("use_double_wide_mlp")
        weights += gated_mlp(hidden, inner * 2 if wide else inner) + _norms(hidden)
        weights += (vector("layer_scalar", 1),)
        weights += _gemma4_experts(hidden, expert_size, experts) if experts else ()
        weights += _layer_input(hidden, each) if each else ()
        cache = None if shares else _cache(fields, kv_heads, head_dim, windowed=windowed)
        layers.append(Layer(weights, cache))
    further = rotary_tables(fields, fields.whole("head_dim"))
    if each:
        further += _layer_inputs(fields, hidden, each * count, each)
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=full_heads,
        experts=experts,
        moe_intermediate_size=expert_size,
        intermediate_size=inner,
        tied=True,
        further=further,
    )


def _gemma4_experts(hidden: int, inner: int, experts: int) -> tuple[Weight, ...]:
    """Return the experts, which every layer has in addition to its MLP, and three further norms."""
    return (
        vector("router.scale", hidden),
        vector("router.per_expert_scale", experts),
        Weight("router.proj", experts, hidden, linear=False),
        Weight("experts.gate_up_proj", 2 * inner, hidden, Split.ROWS, count=experts, expert=True),
        Weight("experts.down_proj", hidden, inner, Split.COLUMNS, count=experts, expert=True),
        *_norms(
            hidden,
            (
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "pre_feedforward_layernorm_2",
            ),
        ),
    )


def _layer_input(hidden: int, size: int) -> tuple[Weight, ...]:
    """
    Return a layer's weights for its own input from the token embedding. All ranks have the same.
    """
    return (
        Weight("per_layer_input_gate", size, hidden),
        Weight("per_layer_projection", hidden, size),
        *norm("post_per_layer_input_norm", hidden),
    )


def _layer_inputs(fields: Fields, hidden: int, size: int, each: int) -> tuple[Part, ...]:
    """Return the embedding that provides a separate input for every layer."""
    vocab = fields.whole("vocab_size_per_layer_input", "vocab_size")
    weights = (
        Weight("model.embed_tokens_per_layer", vocab, size, Split.VOCABULARY, linear=False),
        Weight("model.per_layer_model_projection", size, hidden, Split.ROWS),
        *norm("model.per_layer_projection_norm", each),
    )
    return (Part("embedding of each layer", weights, StagePlacement.FIRST),)


def _without_keys(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """
    Return the weights of a layer that uses another layer's keys and values.

    Checkpoints also have the layer's own keys and values. vLLM loaded these before 0.30
    (`is_kv_shared_layer` in model_executor/models/gemma3n.py and gemma4.py).
    """
    names = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
    return tuple(
        replace(weight, until=(0, 30)) if weight.name.startswith(names) else weight
        for weight in weights
    )


def _values_from_keys(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Return the weights, with the weights of values marked as missing in the checkpoint."""
    return tuple(
        Weight(w.name, w.rows, w.columns, w.split, w.heads, buffer=True)
        if w.name == "self_attn.v_proj"
        else w
        for w in weights
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "Gemma2ForCausalLM": partial(gemma, name="Gemma2ForCausalLM", head_norm=False),
    "Gemma3ForCausalLM": partial(gemma, name="Gemma3ForCausalLM", head_norm=True),
    "Rnj1ForCausalLM": partial(gemma, name="Gemma3ForCausalLM", head_norm=True),
    "Gemma3nForCausalLM": gemma3n,
    "Gemma4ForCausalLM": gemma4,
}
"""The builder of each Gemma, by its name in `architectures`."""
