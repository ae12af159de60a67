"""Apply `--hf-overrides` to a config.json.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpufleet.sizing.architectures.description import ModelFiles


def with_overrides(files: ModelFiles, overrides: Mapping[str, Any]) -> ModelFiles:
    """
    Return a model's files with `--hf-overrides` applied in the same way as in vLLM.

    An override replaces the config's value. If the key has a nested config (`text_config`), the
    override replaces only single keys in it. An override of `rope_scaling` or `rope_parameters`
    replaces both keys. Source: get_config in vllm/transformers_utils/config.py, and
    _apply_dict_overrides in vllm/config/model.py.
    """
    if not overrides:
        return files
    return replace(files, config=_merged(files.config, overrides))


_ROPE = ("rope_scaling", "rope_parameters")
"""The old and the new name of the same key. The release determines which name it reads."""


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    if any(key in overrides for key in _ROPE):
        found = {key: value for key, value in found.items() if key not in _ROPE}
    for key, value in overrides.items():
        below = config.get(key)
        part = isinstance(below, Mapping) and isinstance(value, Mapping) and _is_part(key)
        found[key] = _merged(below, value) if part else value  # type: ignore[arg-type]
    return found


def _is_part(key: str) -> bool:
    """
    Return whether the key's value is a nested config, in which an override changes single keys.
    """
    return key.endswith("_config") and key != "quantization_config"
