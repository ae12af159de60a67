"""Find the architecture of a `config.json`. Pure."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.building_blocks import BY_TRANSFORMERS
from gpufleet.sizing.architectures.components import (
    Architecture,
    ChunkCache,
    CompressedCache,
    FullCache,
    LatentCache,
    StateCache,
    WindowCache,
)
from gpufleet.sizing.architectures.config_fields import ImpossibleError
from gpufleet.sizing.architectures.max_length import lengths_by_release
from gpufleet.sizing.architectures.unread_keys import ReadConfig, refuse_unread

Builder = Callable[[Mapping[str, Any]], Architecture]

FAMILIES = (
    "dense", "moe", "mla", "hybrid", "multimodal", "unsized", "poolers", "encoders",
    "image_embedders", "speech",
)  # fmt: skip
"""
Modules of this package that have BUILDERS. They are imported when they are first needed, because
there are many.
"""


def architecture(config: Mapping[str, Any]) -> Architecture:
    """
    Return the architecture of a parsed `config.json`.

    Raises `FleetError` if the architecture is unknown (the message has similar names), if its cache
    has no size in tokens, or if the config does not have a required value.
    """
    names = config.get("architectures")
    if isinstance(names, str):
        raise FleetError(
            f"`architectures` in config.json is the text {names!r}, but must be a list of names: "
            "use the publisher's original file"
        )
    if not isinstance(names, list | tuple) or not names:
        raise FleetError(
            "config.json has no `architectures` with the name of the model's class: use the "
            "publisher's original file"
        )
    for name in map(str, names):
        if name in builders():
            try:
                return build_architecture(name, config)
            except UNREADABLE as error:
                raise unreadable_error(name, error) from error
    raise _unknown_error(str(names[0]))


def build_architecture(name: str, config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of this class; `name` must be in `builders()`."""
    watched = ReadConfig(config)
    model = builders()[name](watched)
    if not model.multimodal:  # keys of a multimodal model's config are not those of its text part
        refuse_unread(config, watched.read, name)
    if not (model.pooling and model.lengths):  # the class of an encoder determines its length
        model = replace(model, lengths=lengths_by_release(config, model.max_model_len))
    _check(model)
    if name not in _ON_EVERY_STAGE:
        return model
    parts = tuple(
        replace(part, everywhere=True, everywhere_until=BY_TRANSFORMERS.get(name))
        if part.name == "embedding" or (part.name == "head" and name not in _HEAD_ON_THE_LAST)
        else part
        for part in model.parts
    )
    return replace(model, parts=parts)


_LONGEST = 1 << 40
"""
Maximum length of a context in tokens. The longest context of a public model is 10 million tokens
(Llama 4 Scout).
"""
_WIDEST = 1 << 32
"""Maximum of one dimension of a layer's cache. In public models, it is at most some thousands."""
_STATE_DTYPES = {"model", "float32", "bfloat16", "float16"}


def _check(model: Architecture) -> None:
    """Raise `ImpossibleError` for a length, a cache or heads that no model can have."""
    for length in {model.max_model_len, *(each for row in model.lengths for each in row[1:])}:
        if not 0 < length <= _LONGEST:
            raise ImpossibleError(f"the context has {length} tokens")
    seen = {each for layer in model.layers + model.draft_layers for each in layer.caches}
    for found in seen:
        if isinstance(found, StateCache):
            if unknown := set(found.dtypes) - _STATE_DTYPES:
                raise ImpossibleError(f"a state has the dtype {', '.join(unknown)}")
            sizes = [size for shape in found.shapes for size in shape]
        elif isinstance(found, LatentCache):
            sizes = [found.rank]
        elif isinstance(found, CompressedCache):
            sizes = [found.dim, found.window]
        else:
            sizes = [found.kv_heads, found.head_dim]
        if not all(0 < size <= _WIDEST for size in sizes):
            raise ImpossibleError(f"the attention has the sizes {', '.join(map(str, sizes))}")
        if isinstance(found, FullCache | WindowCache | ChunkCache) and (
            not model.heads or model.heads % found.kv_heads
        ):
            raise ImpossibleError(
                f"the {model.heads} attention heads cannot be divided evenly among the "
                f"{found.kv_heads} KV heads"
            )


_HEAD_ON_THE_LAST = {
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Gemma2ForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "MPTForCausalLM",
    "MptForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
}

_ON_EVERY_STAGE = _HEAD_ON_THE_LAST | {
    "ArcticForCausalLM",
    "BaiChuanForCausalLM",
    "BaichuanForCausalLM",
    "BambaForCausalLM",
    "BloomForCausalLM",
    "ChatGLMForConditionalGeneration",
    "ChatGLMModel",
    "DbrxForCausalLM",
    "FalconForCausalLM",
    "FalconMambaForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "GemmaForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HYV3ForCausalLM",
    "InternLM2ForCausalLM",
    "JambaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiniCPMForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "OrionForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "PhiMoEForCausalLM",
    "Plamo3ForCausalLM",
    "QWenLMHeadModel",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "RWForCausalLM",
    "StableLMEpochForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
}
"""
Classes that create the embedding on every pipeline stage, even if the stage does not use it.

Except for those in `_HEAD_ON_THE_LAST`, they do the same with the head. Source: the modules of the
classes in model_executor/models of 0.10.2 to 0.33.0, which do not use PPMissingLayer there.
"""


UNREADABLE = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""The exceptions that Python raises if a value in a config has an unexpected type."""


def unreadable_error(what: str, error: Exception) -> FleetError:
    """Return the error for a file's unusable value."""
    why = f" ({error})" if isinstance(error, ImpossibleError) else ""
    return FleetError(
        f"config.json of {what} has a value of an unexpected type{why}: use the publisher's "
        "original file"
    )


@cache
def builders() -> dict[str, Builder]:
    """Return the function that builds each architecture, by its name in `architectures`."""
    found: dict[str, Builder] = {}
    for family in FAMILIES:
        module = importlib.import_module(f"gpufleet.sizing.architectures.{family}")
        found.update(module.BUILDERS)
    return found


def _unknown_error(name: str) -> FleetError:
    near = difflib.get_close_matches(name, builders(), n=3, cutoff=0.6)
    others = f" (known classes with similar names: {', '.join(near)})" if near else ""
    return FleetError(
        f"gpufleet does not know the architecture {name} (`architectures` in config.json){others}, "
        "and cannot estimate the model's size: set the parallel sizes and "
        "`--gpu-memory-utilization` yourself, and read the number of KV cache tokens that vLLM "
        "logs at its start"
    )
