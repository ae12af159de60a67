"""
Describe CLIP and SigLIP, which have a text encoder and an image encoder. Pure.

The vectors of both encoders are compared with each other. CLIP reads texts from left to right, so
its text layers have a KV cache. SigLIP's text layers do not have one. Source: clip.py and siglip.py
in vLLM's model_executor/models of 0.32.0. Missing config values are the defaults of CLIPConfig and
SiglipConfig in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gpufleet.sizing.architectures.building_blocks import (
    attention,
    default_dtype,
    norm,
    plain_mlp,
    uniform_layers,
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
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.tower_parts import (
    Weights,
    clip,
    column_parallel,
    layer_norm,
    plain_torch,
    row_parallel,
    siglip,
    table,
)
from gpufleet.sizing.architectures.unread_keys import ReadConfig, refuse_unread

_CLIP: dict[str, Any] = {
    "text_config": {
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
    },
    "vision_config": {},
}
_SIGLIP: dict[str, Any] = {
    "text_config": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    },
}


def _whole_config(
    config: Mapping[str, Any], name: str, defaults: Mapping[str, Any]
) -> tuple[Fields, Fields]:
    """Return the config with defaults for missing values, and its text part."""
    if not any(isinstance(config.get(key), Mapping) for key in defaults):
        raise Fields(config, name).missing_error(*defaults)
    filled = {
        key: {**default, **{k: v for k, v in (config.get(key) or {}).items() if v is not None}}
        for key, default in defaults.items()
    }
    text = ReadConfig(filled["text_config"])
    return Fields({**config, **filled}, name), Fields(text, name, "text_config.")


def _clip(config: Mapping[str, Any], name: str) -> Architecture:
    """Describe CLIP. Each of its two encoders ends with a matrix that computes the vector."""
    fields, text = _whole_config(config, name, _CLIP)
    width, seen = text.whole("hidden_size"), fields.section("vision_config") or fields
    projected = fields.whole("projection_dim", default=512)
    seen_width = seen.whole("hidden_size", default=768)
    heads = text.whole("num_attention_heads")
    return _two_towers(
        fields,
        text,
        cache=FullCache(heads, width // max(heads, 1)),
        head=plain_torch((table("text_projection", projected, width),)),
        tower=(
            *clip(fields),
            *layer_norm("vision_model.post_layernorm", seen_width),
            table("visual_projection", projected, seen_width),
        ),
    )


def _siglip(config: Mapping[str, Any], name: str) -> Architecture:
    """Describe SigLIP. Its image encoder ends with attention over all patches."""
    fields, text = _whole_config(config, name, _SIGLIP)
    width, seen = text.whole("hidden_size"), fields.section("vision_config") or fields
    seen_width, inner = seen.whole("hidden_size"), seen.whole("intermediate_size")
    pooled: Weights = ()
    if seen.flag("vision_use_head", default=True):
        prefix = "vision_model.head."
        pooled = (
            vector(f"{prefix}probe", seen_width),
            table(f"{prefix}attention.in_proj", 3 * seen_width, seen_width),
            vector(f"{prefix}attention.in_proj.bias", 3 * seen_width),
            table(f"{prefix}attention.out_proj", seen_width, seen_width),
            vector(f"{prefix}attention.out_proj.bias", seen_width),
            *layer_norm(f"{prefix}layernorm", seen_width),
            *column_parallel(f"{prefix}mlp.fc1", inner, seen_width),
            *row_parallel(f"{prefix}mlp.fc2", seen_width, inner),
        )
    projected = text.whole("projection_size", default=width)
    head = (table("text_model.head", projected, width), vector("text_model.head.bias", projected))
    return _two_towers(fields, text, cache=None, head=head, tower=(*siglip(fields), *pooled))


def _two_towers(
    fields: Fields, text: Fields, *, cache: Cache | None, head: Weights, tower: Weights
) -> Architecture:
    """
    Return an architecture whose layers are the text encoder, and whose tower is the image encoder.
    """
    width, heads = text.whole("hidden_size"), text.whole("num_attention_heads")
    inner, vocabulary = text.whole("intermediate_size"), text.whole("vocab_size")
    length = text.whole("max_position_embeddings")
    weights = (
        *attention(width, heads, heads, width // max(heads, 1), bias=True, out_bias=True),
        *plain_mlp(width, inner, bias=True),
        *norm("layer_norm1", width, bias=True),
        *norm("layer_norm2", width, bias=True),
    )
    tables = tuple(
        Weight(f"embeddings.{key}", rows, width, Split.VOCABULARY, linear=False)
        for key, rows in (("token_embedding", vocabulary), ("position_embedding", length))
    )
    layers = text.whole("num_hidden_layers")
    if isinstance(text.config, ReadConfig):
        read = set(text.config.read)  # before the copy reads all of it
        refuse_unread(dict(text.config), read, fields.name)
    return Architecture(
        name=fields.name,
        hidden_size=width,
        vocab_size=vocabulary,
        heads=heads,
        kv_heads=heads,
        layers=(Layer(weights),) * layers
        if cache is None
        else uniform_layers(weights, [cache] * layers),
        parts=(
            Part("embedding", tables, StagePlacement.FIRST),
            Part("norm", norm("final_layer_norm", width, bias=True), StagePlacement.LAST),
            Part("score", head, StagePlacement.LAST),
            Part("tower", tower, StagePlacement.FIRST),
        ),
        max_model_len=length,
        dtype=default_dtype(fields),
        intermediate_size=inner,
        lengths=(((0,), length, length),),
        multimodal=True,
        pooling=True,
        pipeline=False,
        prefix="text_model.encoder.layers.",
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "CLIPModel": partial(_clip, name="CLIPModel"),
    "SiglipModel": partial(_siglip, name="SiglipModel"),
}
"""The builder of each architecture, by its name in `architectures`."""
