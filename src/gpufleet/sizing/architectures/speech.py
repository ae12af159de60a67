"""
Describe speech models, whose decoder also caches the output of an audio encoder. Pure.

Source: whisper.py in vLLM's model_executor/models of 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpufleet.sizing.architectures.building_blocks import (
    attention,
    default_dtype,
    final_norm,
    norm,
    plain_mlp,
    vector,
)
from gpufleet.sizing.architectures.components import (
    Architecture,
    CrossCache,
    FullCache,
    Layer,
    Part,
    Split,
    StagePlacement,
    Weight,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.tower_parts import TowerLayers

_NAME = "WhisperForConditionalGeneration"


def _whisper(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Whisper. Each decoder layer has a cache of tokens and a cache of the encoder's output.
    """
    fields = Fields(config, _NAME)
    width, vocab = fields.whole("d_model"), fields.whole("vocab_size")
    heads, inner = fields.whole("decoder_attention_heads"), fields.whole("decoder_ffn_dim")
    positions = fields.whole("max_target_positions", default=448)
    size = width // max(heads, 1)
    weights = (
        *attention(width, heads, heads, size, bias=True, out_bias=True),
        *attention(width, heads, heads, size, prefix="encoder_attn.", bias=True, out_bias=True),
        *plain_mlp(width, inner, prefix="", names=("fc1", "fc2"), bias=True),
        *(
            each
            for name in ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
            for each in norm(name, width, bias=True)
        ),
    )
    caches = FullCache(heads, size), CrossCache(heads, size)
    decoder = "model.decoder."
    tables = (
        Weight(f"{decoder}embed_tokens", vocab, width, Split.VOCABULARY, linear=False),
        Weight(f"{decoder}embed_positions", positions, width, linear=False),
    )
    return Architecture(
        name=_NAME,
        hidden_size=width,
        vocab_size=vocab,
        heads=heads,
        kv_heads=heads,
        layers=tuple(
            Layer(weights, caches[0], caches[1:]) for _ in range(fields.whole("decoder_layers"))
        ),
        parts=(
            Part("embedding", tables, StagePlacement.FIRST),
            Part("encoder", _encoder(fields, width), StagePlacement.FIRST),
            final_norm(width, f"{decoder}layer_norm", bias=True),
        ),
        max_model_len=positions,
        dtype=default_dtype(fields),
        tied=True,
        intermediate_size=inner,
        pipeline=False,
        prefix=f"{decoder}layers.",
        notes=("the memory that the encoder needs for its run at the start is not counted",),
    )


def _encoder(fields: Fields, width: int) -> tuple[Weight, ...]:
    prefix = "model.encoder."
    bins = fields.whole("num_mel_bins", default=80)
    layers = TowerLayers(
        f"{prefix}layers.0.",
        fields.whole("encoder_layers"),
        width,
        fields.whole("encoder_attention_heads"),
        fields.whole("encoder_ffn_dim"),
        mlp=("fc1", "fc2"),
    )
    positions = fields.whole("max_source_positions", default=1500)
    return (
        *layers.weights(),
        Weight(f"{prefix}conv1", width, bins * 3, linear=False),
        Weight(f"{prefix}conv2", width, width * 3, linear=False),
        Weight(f"{prefix}embed_positions", positions, width, linear=False),
        *(vector(f"{prefix}{name}.bias", width) for name in ("conv1", "conv2")),
        *norm(f"{prefix}layer_norm", width, bias=True),
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {_NAME: _whisper}
"""The builder of each architecture, by its name in `architectures`."""
