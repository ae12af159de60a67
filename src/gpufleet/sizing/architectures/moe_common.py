"""Build parts that several families of decoders have: caches of layers, experts, decoders. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.building_blocks import (
    attention_caches,
    final_norm,
    norm,
    vector,
    wrap_layers,
)
from gpufleet.sizing.architectures.components import Architecture, Cache, Layer, Part, Split, Weight
from gpufleet.sizing.architectures.config_fields import Fields

GATED = ("gate_proj", "up_proj", "down_proj")
"""Names of the three matrices of an expert in most checkpoints."""
NUMBERED = ("w1", "w3", "w2")
"""Names of the same matrices in Mixtral's checkpoints."""


def too_short_error(fields: Fields, key: str, index: int) -> FleetError:
    """Return the error for a config's list that has fewer entries than the model has layers."""
    return FleetError(
        f"config.json of {fields.name}: `{fields.path}{key}` has no entry for layer {index}, "
        "although `num_hidden_layers` includes this layer: use the publisher's original file"
    )


def head_size(fields: Fields, heads: int) -> int:
    """Return `head_dim`, or else `hidden_size` divided by the number of heads."""
    return fields.whole("head_dim", default=0) or fields.whole("hidden_size") // max(heads, 1)


def routed_experts(
    hidden: int,
    inner: int,
    experts: int,
    *,
    prefix: str = "mlp.",
    matrices: tuple[str, str, str] = GATED,
    router: str = "gate",
    router_dtype: str | None = None,
    correction: str = "",
) -> tuple[Weight, ...]:
    """
    Return the weights of a layer's routed experts: its router and FusedMoE.

    Every rank has the router, which is never quantized (GateLinear). `correction` is the name of
    the vector that corrects the router's scores. It is float32 on the GPU.
    """
    gate, up, down = (f"{prefix}experts.{name}" for name in matrices)
    weights: tuple[Weight, ...] = (
        Weight(prefix + router, experts, hidden, linear=False, dtype=router_dtype),
        Weight(gate, inner, hidden, Split.ROWS, count=experts, expert=True),
        Weight(up, inner, hidden, Split.ROWS, count=experts, expert=True),
        Weight(down, hidden, inner, Split.COLUMNS, count=experts, expert=True),
    )
    if correction:
        weights += (vector(prefix + correction, experts, dtype="float32"),)
    return weights


def layer_caches(fields: Fields, layers: int, kv_heads: int, head_dim: int) -> tuple[Cache, ...]:
    """
    Return the cache of each layer: of a window if `layer_types` or `sliding_window` states one.
    """
    types = bool(fields.texts("layer_types"))
    return attention_caches(fields, layers, kv_heads, head_dim, types=types)


def assemble(
    fields: Fields,
    layers: Sequence[Layer],
    *,
    heads: int,
    kv_heads: int,
    experts: int = 0,
    moe_intermediate_size: int = 0,
    intermediate_size: int = 0,
    tied: bool = False,
    embedding_name: str = "model.embed_tokens",
    norm_name: str = "model.norm",
    norm_bias: bool = False,
    head_bias: bool = False,
    prefix: str = "model.layers.",
    further: tuple[Part, ...] = (),
    pipeline: bool = True,
    draft_layers: Sequence[Layer] = (),
    notes: tuple[str, ...] = (),
) -> Architecture:
    """
    Return the architecture of these layers with embedding, last norm and head.

    `tied` applies if the config has no `tie_word_embeddings`. `further` has additional parts.
    """
    hidden = fields.whole("hidden_size", "d_model")
    # Equal layers become the same object, so that later computations are made only once.
    same: dict[Layer, Layer] = {}
    whole = wrap_layers(
        fields,
        layers=tuple(same.setdefault(layer, layer) for layer in layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate_size,
        tied=fields.flag("tie_word_embeddings", default=tied),
        final=final_norm(hidden, norm_name, bias=norm_bias),
        parts=further,
        embedding_name=embedding_name,
        head_bias=head_bias,
        prefix=prefix,
        pipeline=pipeline,
        notes=notes,
    )
    return replace(
        whole,
        experts=experts,
        moe_intermediate_size=moe_intermediate_size,
        draft_layers=tuple(draft_layers),
    )


def draft_weights(hidden: int) -> tuple[Weight, ...]:
    """
    Return the additional weights of a multi-token prediction layer.

    The layer uses the embedding and the head of the model. Source: the ...MultiTokenPredictorLayer
    of deepseek_mtp.py and glm4_moe_mtp.py.
    """
    return (
        *norm("enorm", hidden),
        *norm("hnorm", hidden),
        Weight("eh_proj", hidden, 2 * hidden, linear=False),
        *norm("shared_head.norm", hidden),
    )


def with_prefix(prefix: str, weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """Return weights of draft layers with their whole names, which begin with `mtp.`."""
    return tuple(replace(weight, name=prefix + weight.name) for weight in weights)


def named_fields(config: Mapping[str, Any], name: str) -> Fields:
    """
    Return the fields of a config. Their name in messages is from `architectures`, else `name`.
    """
    names = config.get("architectures")
    known = isinstance(names, list | tuple) and names and isinstance(names[0], str)
    return Fields(config, names[0] if known else name)  # type: ignore[index]


def first_whole(fields: Fields, *keys: str) -> int:
    """
    Return a whole number. If the config has a list with a value for each layer, return the first.
    """
    return numbers[0] if (numbers := fields.wholes(*keys)) else fields.whole(*keys)


def is_dense_layer(fields: Fields, index: int) -> bool:
    """
    Return whether this layer has an MLP instead of experts.

    `mlp_layer_types`, or a list in `moe_layer_freq`, decides. Otherwise, the first layers have an
    MLP (`first_k_dense_replace`). If `moe_layer_freq` is a number n, only every n-th layer has
    experts.
    """
    if kinds := fields.texts("mlp_layer_types"):
        return index < len(kinds) and kinds[index] == "dense"
    every = fields.value("moe_layer_freq")
    if isinstance(every, list):
        return index >= len(every) or not every[index]
    first = fields.whole("first_k_dense_replace", "num_dense_layers", default=0)
    return index < first or bool(index % (every or 1))


def attention_layers(fields: Fields, count: int) -> tuple[bool, ...]:
    """
    Return, for each layer, whether it has full attention.

    `layer_types` decides. Without `layer_types`, every n-th layer has full attention.
    """
    kinds = fields.texts("layer_types", "layers_block_type")
    if kinds:
        if len(kinds) < count:
            raise too_short_error(fields, "layer_types", len(kinds))
        return tuple(kind in {"full_attention", "attention"} for kind in kinds[:count])
    every = fields.whole("full_attention_interval", default=4) or 1
    return tuple((index + 1) % every == 0 for index in range(count))


def layers_with_experts(fields: Fields, count: int) -> frozenset[int]:
    """
    Return the indexes of the layers with experts.

    `mlp_layer_types` or `moe_layers_enum` decides. Without these keys, all layers but the first
    have experts.
    """
    if kinds := fields.texts("mlp_layer_types"):
        return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    listed = fields.value("moe_layers_enum")
    if isinstance(listed, str):
        return frozenset(int(word) for word in listed.split(",") if word.strip().isdigit())
    return frozenset(fields.wholes("moe_layers_enum") or range(1, count))
