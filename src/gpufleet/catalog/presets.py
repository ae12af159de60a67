"""
Load presets, which are flags for serving situations.

A preset is a file of `data/presets/`. It has a situation, and for each flag the possible values
with their releases and reasons. Pure, except that it reads its own data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from yaml import safe_load

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.versions import numbers

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Subject:
    """
    The facts that determine a preset's choices.

    None means that a fact is unknown. A choice that needs an unknown fact does not apply.
    """

    model: str
    """The model's name or path."""
    vllm: tuple[int, ...]
    architecture: str | None = None
    caches: frozenset[str] | None = None
    """Types of KV cache in the model's layers: full, window, chunk, latent, state."""
    capability: tuple[int, int] | None = None
    """The lowest compute capability of the GPUs that may serve the model."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(_Entry):
    """A value of a flag, and the condition under which it is chosen."""

    value: Any
    because: str
    since: str | None = None
    table: Literal["families"] | None = None
    """The table that has the real value. The name in `value` is the key."""
    without: tuple[str, ...] = ()
    """The choice does not apply to models with one of these cache types."""
    capability: float | None = None
    """The minimum compute capability of the GPUs."""
    architectures: tuple[str, ...] = ()
    """The choice applies only to these architectures. If empty, it applies to all."""


class Need(_Entry):
    """A flag whose value only the operator can know."""

    flag: str
    what: str


class Preset(_Entry):
    """Flags for one situation."""

    situation: str
    objective: Literal["balanced", "latency", "throughput", "memory"] = "balanced"
    needs: tuple[Need, ...] = ()
    flags: dict[str, tuple[Choice, ...]]
    """
    The choices of each flag. The first choice that applies is used. If none applies, the flag keeps
    the release's default.
    """


class Family(BaseModel):
    """The syntax of one model family's tool calls and reasoning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    tool_call_parser: str | None = Field(None, alias="tool-call-parser")
    reasoning_parser: str | None = Field(None, alias="reasoning-parser")
    also: tuple[str, ...] = ()
    """Other parsers that the prompt templates of the family's models can request."""
    since: str = "0.18.0"


@cache
def names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(path.stem for path in (DATA / "presets").glob("*.yml")))


@cache
def load(name: str) -> Preset:
    """Return a preset. Raises `FleetError` if no preset has this name."""
    if name not in names():
        raise FleetError(
            f"there is no preset {name!r}{suggestion(name, list(names()))}; `gpufleet presets` "
            "lists them"
        )
    return Preset.model_validate(safe_load((DATA / "presets" / f"{name}.yml").read_text("utf-8")))


@cache
def families() -> tuple[Family, ...]:
    """Return the families in the order in which they are searched."""
    return tuple(
        Family.model_validate(entry) for entry in safe_load((DATA / "families.yml").read_text())
    )


def presets_setting(flag: str) -> tuple[str, ...]:
    """Return the presets that set a flag. The flag has the form `--max-num-seqs`."""
    return tuple(name for name in names() if flag.removeprefix("--") in load(name).flags)


def choose(preset: str, choices: tuple[Choice, ...], subject: Subject) -> tuple[Any, str] | None:
    """
    Return the value of a preset's flag for a subject, and the reason; None if no choice applies.

    Raises `FleetError` if the value depends on an unknown model family, or if the family has no
    parser of this type or needs a newer release.
    """
    for choice in choices:
        if not _holds(choice, subject):
            continue
        if choice.table is not None:
            return _of_family(preset, str(choice.value), subject), choice.because
        return choice.value, choice.because
    return None


def _holds(choice: Choice, subject: Subject) -> bool:
    if choice.since is not None and subject.vllm < numbers(choice.since):
        return False
    if choice.without and (subject.caches is None or subject.caches & set(choice.without)):
        return False
    if choice.capability is not None:
        major, minor = divmod(round(choice.capability * 10), 10)
        if subject.capability is None or subject.capability < (major, minor):
            return False
    return not choice.architectures or subject.architecture in choice.architectures


def _of_family(preset: str, parser: str, subject: Subject) -> str:
    name = subject.model.rstrip("/").rpartition("/")[2]
    for family in families():
        if not re.search(family.model, name, re.IGNORECASE):
            continue
        found = getattr(family, parser.replace("-", "_"))
        if found is None:
            raise FleetError(
                f"preset {preset}: vLLM has no {parser} for models like {name}: remove the preset, "
                f"or set `flags.{parser}` yourself"
            )
        if subject.vllm < numbers(family.since):
            raise FleetError(
                f"preset {preset}: the {parser} of {name}, {found}, needs vLLM {family.since} or "
                f"later: use a newer release, or set `flags.{parser}` yourself"
            )
        return str(found)
    raise FleetError(
        f"preset {preset}: gpufleet knows no {parser} for {name}: set `flags.{parser}` yourself to "
        "the value on the model's card"
    )


def cache_kinds(caches: Iterable[object]) -> frozenset[str]:
    """Return the cache types from the names of classes. For example, `LatentCache` is "latent"."""
    return frozenset(type(each).__name__.removesuffix("Cache").lower() for each in caches)
