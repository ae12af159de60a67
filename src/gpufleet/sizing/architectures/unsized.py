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
    "embeds or scores and keeps no KV cache that grows with tokens, so it has no size in tokens; "
    "start it with a `--gpu-memory-utilization` that leaves room for its weights"
)
_CROSS = (
    "keeps a cache of its encoder's output beside that of its tokens, whose size is unknown, so "
    "its size cannot be estimated: read the KV cache tokens that vLLM logs at startup"
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
