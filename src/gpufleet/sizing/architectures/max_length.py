"""Compute the default and the longest context of a model by vLLM's rules. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpufleet.errors import FleetError

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
"""Keys of a config that may have the number of positions. The smallest of the values is used."""

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "text_model")

DEFAULT = 2048
"""The length in tokens if the config does not state one."""

_SCALED = {"su", "longrope", "llama3"}
"""Types of rotary scaling with which the length in the config already includes the scaling."""
_SCALED_YARN = _SCALED | {"yarn", "deepseek_yarn", "deepseek_llama_scaling"}

_YARN_IS_SCALED = (0, 30)
_LONGROPE_IS_SHORT = (0, 11)


def max_model_len(config: Mapping[str, Any], vllm: tuple[int, ...] | None = None) -> int:
    """
    Return the context length, in tokens, that vLLM uses by default.

    `config` is a parsed config.json. If it has a text part, that part is used. `vllm` is the
    release. None means the newest release. Source: _get_and_verify_max_len in vllm/config/model.py
    of 0.8.5 to 0.33.0, with two changes: Up to 0.29, the length with YaRN is its original length
    times its factor; since 0.30, it is the length in the config. Since 0.11, the default with
    LongRoPE is the original length.
    """
    text = text_part(config)
    short = vllm is None or vllm >= _LONGROPE_IS_SHORT
    if short and any(_kind(scaling) == "longrope" for scaling in rope_parameters(text)):
        return int(text.get("original_max_position_embeddings") or longest_model_len(text, vllm))
    return longest_model_len(text, vllm)


def longest_model_len(config: Mapping[str, Any], vllm: tuple[int, ...] | None = None) -> int:
    """
    Return the largest `--max-model-len` in tokens.

    It is equal to `max_model_len` except for LongRoPE.
    """
    text = text_part(config)
    length: float = min(_stated(text), default=DEFAULT)
    if text.get("model_max_length"):
        length = text["model_max_length"]
    if "gemma3" in str(text.get("model_type", "")):
        return int(length)
    factor = 1.0
    scaled = _SCALED_YARN if vllm is None or vllm >= _YARN_IS_SCALED else _SCALED
    for scaling in rope_parameters(text):
        kind = _kind(scaling)
        if kind in scaled:
            continue
        factor = scaling.get("factor") or factor
        if not isinstance(factor, int | float):
            raise FleetError(
                f"the rotary scaling's `factor` in config.json or --hf-overrides is {factor!r}, "
                "but must be a number: write the number without quotes"
            )
        if kind == "yarn":
            length = scaling.get("original_max_position_embeddings") or length
    return int(length * factor)


def lengths_by_release(
    config: Mapping[str, Any], otherwise: int
) -> tuple[tuple[tuple[int, ...], int, int], ...]:
    """
    Return (release, default length, largest accepted length) for each release that changed them.

    If the config states no length, both lengths are `otherwise`, which is the default of the class.
    """
    if not _stated(text_part(config)):
        return (((0,), otherwise, otherwise),)
    return tuple(
        (since, max_model_len(config, since), longest_model_len(config, since))
        for since in ((0,), _LONGROPE_IS_SHORT, _YARN_IS_SCALED)
    )


def _stated(text: Mapping[str, Any]) -> list[float]:
    return [text[key] for key in _LENGTHS if isinstance(text.get(key), int | float)]


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the decoder: `text_config`, or the whole."""
    for key in _TEXT_PARTS:
        if isinstance(part := config.get(key), Mapping):
            return text_part(part)
    return config


def rope_parameters(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """
    Return the rotary scalings of a config, under the new or the old name of the key.

    If they are nested, there is one for each type of layer.
    """
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
