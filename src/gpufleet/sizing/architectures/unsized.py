"""Refuse classes of vLLM that are known, but whose memory cannot be estimated. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import Architecture


def _refuse(config: Mapping[str, Any], name: str, why: str) -> Architecture:
    """Raise `FleetError` for a known class that cannot be sized."""
    raise FleetError(f"{name} ({config.get('model_type', 'no model_type')}) {why}")


_NO_CACHE = (
    "embeds or scores. The class keeps no KV cache that grows with tokens, so gpufleet cannot "
    "compute a size in tokens: set a `--gpu-memory-utilization` that leaves room for the weights"
)
_CROSS = (
    "keeps a cache of the encoder's output in addition to the cache of tokens. The size of the "
    "encoder's cache is unknown, so gpufleet cannot estimate the model's size: read the number of "
    "KV cache tokens that vLLM logs at its start"
)

_REASONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "EmbeddingGemma2Model",
            "Terratorch",
        ),
        _NO_CACHE,
    ),
    **dict.fromkeys(
        (
            "MllamaForConditionalGeneration",
            "BartForConditionalGeneration",
            "T5ForConditionalGeneration",
            "NemotronParseForConditionalGeneration",
        ),
        _CROSS,
    ),
}
"""The reason for each known class whose size is not estimated."""

BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    name: partial(_refuse, name=name, why=why) for name, why in _REASONS.items()
}
"""The function that refuses each architecture, by its name in `architectures`."""
