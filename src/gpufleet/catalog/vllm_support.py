"""
Return which architectures and quantizations each vLLM release serves, and on which GPUs. Pure.

tests/data/release_limits.py makes `data/vllm_support.json` from the sources of the releases in this
file. For a release between two known releases, a fact is known if both agree on it, and unknown if
they differ. A release that is newer than all known releases is treated as the newest known one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

_DATA = Path(__file__).with_name("data") / "vllm_support.json"

Version: TypeAlias = tuple[int, ...]
"""A release as numbers, for example (0, 19, 0)."""


@dataclass(frozen=True)
class QuantizationNeeds:
    """What a release requires for a quantization method."""

    capability: int
    """
    The minimum compute capability. 80 means 8.0 (`get_min_capability` of the method's class).
    """
    dtypes: tuple[str, ...]
    """The model dtypes that the method supports (`get_supported_act_dtypes`)."""


def releases() -> tuple[Version, ...]:
    """Return the known releases, oldest first."""
    return tuple(_version(text) for text in _document()["releases"])


def supports_architecture(architecture: str, vllm: Version) -> bool | None:
    """Return whether a release serves an architecture, or None if this is unknown."""
    return _held(_spans(architecture, "served"), vllm)


def supports_pipeline(architecture: str, vllm: Version) -> bool | None:
    """
    Return whether the architecture's class supports pipeline stages (`SupportsPP`).

    If this is unknown, return None.
    """
    return _held(_spans(architecture, "pipeline"), vllm)


def supports_lora(architecture: str, vllm: Version) -> bool | None:
    """
    Return whether the architecture's class supports LoRA (`SupportsLoRA`).

    If this is unknown, return None.
    """
    return _held(_spans(architecture, "lora"), vllm)


def limits_by_experts(architecture: str, vllm: Version) -> bool | None:
    """
    Return whether the architecture's class refuses more tensor-parallel ranks than experts.

    If this is unknown, return None.
    """
    return _held(_spans(architecture, "expert_limit"), vllm)


def refuses_float16(architecture: str, vllm: Version) -> bool | None:
    """
    Return whether a release refuses float16 for models of an architecture, or None if unknown.
    """
    return _held(_spans(architecture, "no_float16"), vllm)


def nearest_serving(architecture: str, vllm: Version) -> Version | None:
    """
    Return the release nearest to `vllm` that serves an architecture, or None if no release does.
    """
    serving = [one for one in releases() if supports_architecture(architecture, one)]
    newer = [one for one in serving if one >= vllm]
    return newer[0] if newer else serving[-1] if serving else None


def is_known_method(method: str) -> bool:
    """Return whether at least one known release has the quantization method."""
    return method in _document()["quantization"]


def quantization_needs(method: str, vllm: Version) -> QuantizationNeeds | None:
    """
    Return what a release requires for a quantization method, or None if it lacks the method.
    """
    found = None
    for row in _document()["quantization"].get(method, ()):
        if _version(row["since"]) <= vllm:
            found = row
    if found is None or found.get("gone"):
        return None
    return QuantizationNeeds(found["minimum"], tuple(found["dtypes"]))


def nearest_with_method(method: str, vllm: Version) -> Version | None:
    """
    Return the release nearest to `vllm` that has a quantization method, or None if no release does.
    """
    having = [one for one in releases() if quantization_needs(method, one) is not None]
    newer = [one for one in having if one >= vllm]
    return newer[0] if newer else having[-1] if having else None


def _spans(architecture: str, key: str) -> Sequence[tuple[Version, Version | None]] | None:
    return _by_name().get(architecture, {}).get(key)


def _held(spans: Sequence[tuple[Version, Version | None]] | None, vllm: Version) -> bool | None:
    """
    Return whether a release is in one of the spans.

    The result is None if there are no spans, or if the nearest known releases before and after the
    release differ.
    """
    if spans is None:
        return None

    def within(release: Version) -> bool:
        return any(
            since <= release and (until is None or release < until) for since, until in spans
        )

    before = [one for one in releases() if one <= vllm]
    after = [one for one in releases() if one >= vllm]
    said = {within(one) for one in (*before[-1:], *after[:1])}
    return said.pop() if len(said) == 1 else None


@cache
def _document() -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return document


@cache
def _by_name() -> Mapping[str, Mapping[str, Sequence[tuple[Version, Version | None]]]]:
    return {
        name: {
            key: tuple((_version(since), until and _version(until)) for since, until in spans)
            for key, spans in row.items()
        }
        for name, row in _document()["architectures"].items()
    }


@cache
def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
