"""Read PEFT's `adapter_config.json` of an adapter, in the same way as vLLM. Pure.

Source: PEFTHelper of vllm/lora/peft_helper.py of 0.32.0. When a server starts, PEFTHelper reads the
same keys and refuses the same features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FILE = "adapter_config.json"
_CLASSIFIERS = {"classifier", "score"}


@dataclass(frozen=True)
class AdapterConfig:
    """The properties of a LoRA adapter that a plan needs."""

    rank: int
    """The largest rank of the adapter's modules."""
    base: str = ""
    """The model for which the adapter was trained, as free text; "" if it is not stated."""
    problems: tuple[str, ...] = ()
    """Why vLLM does not load the adapter, as `the adapter's adapter_config.json has ...`."""


def parse_adapter(config: Mapping[str, Any]) -> AdapterConfig:
    """Parse an adapter's config; `problems` has the reasons if vLLM does not load it."""
    if problems := tuple(f"the adapter's {FILE} {problem}" for problem in _problems(config)):
        return AdapterConfig(0, problems=problems)
    patterns = config.get("rank_pattern") or {}
    base = config.get("base_model_name_or_path")
    return AdapterConfig(
        max(config["r"], *patterns.values()) if patterns else config["r"],
        base if isinstance(base, str) else "",
    )


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        yield f"has `peft_type` {kind!r}, but vLLM loads only LORA"
        return
    if not _is_rank(config.get("r")):
        yield f"has no rank: `r` is {config.get('r')!r}, but must be a whole number of 1 or more"
    patterns = config.get("rank_pattern") or {}
    if not isinstance(patterns, Mapping) or not all(map(_is_rank, patterns.values())):
        yield "has a `rank_pattern` with a value that is not a whole number of 1 or more"
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or set(map(str, saved)) - _CLASSIFIERS:
        yield (
            f"has `modules_to_save` {saved!r}, but vLLM does not load full modules: train the "
            "adapter without full modules"
        )
    if config.get("use_dora"):
        yield (
            "has `use_dora`, but vLLM does not support DoRA: merge the adapter into the model, and "
            "serve the merged model"
        )
    if config.get("lora_bias") or config.get("bias", "none") != "none":
        yield (
            "has biases, but vLLM does not support biases: merge the adapter into the model, and "
            "serve the merged model"
        )


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
