"""The longest context of a model, as vLLM derives it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Where a config may say how many positions it has; the smallest counts."""

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "text_model")

DEFAULT = 2048
"""Where a config says nothing."""

_SCALED = {"su", "longrope", "llama3"}
"""Kinds of rotary scaling whose length in the config is the scaled one."""
_SCALED_YARN = _SCALED | {"yarn", "deepseek_yarn", "deepseek_llama_scaling"}

_YARN_IS_SCALED = (0, 30)
_LONGROPE_IS_SHORT = (0, 11)


def max_model_len(config: Mapping[str, Any], vllm: tuple[int, ...] | None = None) -> int:
    """
    Return the tokens of the longest context that vLLM takes without being told.

    `config` is a parsed config.json; its text part counts where it has one. `vllm`: the release,
    the newest when None. Source: _get_and_verify_max_len in vllm/config/model.py of 0.8.5 to
    0.33.0, which differ in two things: up to 0.28 YaRN's length is its original length times its
    factor, from 0.30 the config's own; from 0.11 LongRoPE starts with the original length.
    """
    text = text_part(config)
    lengths = [text[key] for key in _LENGTHS if isinstance(text.get(key), int | float)]
    length: float = min(lengths, default=DEFAULT)
    if text.get("model_max_length"):
        length = text["model_max_length"]
    scalings = rope_parameters(text)
    newest = vllm is None
    if "gemma3" not in str(text.get("model_type", "")):
        factor = 1.0
        yarn_is_scaled = newest or (vllm or ()) >= _YARN_IS_SCALED
        for scaling in scalings:
            kind = _kind(scaling)
            if kind in (_SCALED_YARN if yarn_is_scaled else _SCALED):
                continue
            factor = scaling.get("factor") or factor
            if kind == "yarn":
                length = scaling.get("original_max_position_embeddings") or length
        length *= factor
    longrope = any(_kind(scaling) == "longrope" for scaling in scalings)
    if longrope and (newest or (vllm or ()) >= _LONGROPE_IS_SHORT):
        length = text.get("original_max_position_embeddings") or length
    return int(length)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the decoder: itself, or `text_config`."""
    for key in _TEXT_PARTS:
        if isinstance(part := config.get(key), Mapping):
            return text_part(part)
    return config


def rope_parameters(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the rotary scalings, under either name; one for each kind of layer where nested."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if not isinstance(found, Mapping) or not found:
            continue
        nested = [part for part in found.values() if isinstance(part, Mapping)]
        if nested and len(nested) == sum(part is not None for part in found.values()):
            return tuple(nested)
        return (found,)
    return ()


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    return {"su": "longrope", "mrope": "default"}.get(kind, kind)
