"""
Decoders that classify or score: without a head, with a few rows in its place.  Pure.

vLLM loads the class of the same name that generates, as one that pools: `--runner auto` takes the
suffix for `--convert classify`. They keep the KV cache of every token as the decoder does. Source:
_SUFFIX_TO_DEFAULTS in vllm/config/model.py, as_seq_cls_model in model_executor/models/adapters.py
of 0.31.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gpufleet.sizing.architectures.components import Architecture, Part, StagePlacement, Weight
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.registry import build_architecture

_DECODERS = {
    f"{family}ForSequenceClassification": f"{family}ForCausalLM"
    for family in ("Gemma", "Gemma2", "Llama", "Mistral", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe")
}


def _classifier(config: Mapping[str, Any], decoder: str) -> Architecture:
    """Return the decoder with a classifier in place of its head: one row of weights per label."""
    read = build_architecture(decoder, {**config, "architectures": [decoder]})
    fields = Fields(config, decoder)
    names = fields.value("id2label")
    labels = len(names) if isinstance(names, Mapping) else fields.whole("num_labels", default=2)
    score = Part(
        "score", (Weight("score", labels, read.hidden_size, linear=False),), StagePlacement.LAST
    )
    parts = (*(part for part in read.parts if part.name != "head"), score)
    return replace(read, parts=parts, pooling=True)


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    name: partial(_classifier, decoder=decoder) for name, decoder in _DECODERS.items()
}
"""Each name that `architectures` may have, with what reads such a config."""
