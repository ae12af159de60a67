"""Return the flags of `vllm serve` that follow from an entry's `adapters`.  Pure.

Each server loads the adapters when it starts, from the paths in `--lora-modules NAME=PATH`. Clients
send the name of an adapter, never a path. If the adapters change, the flag changes too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpufleet.artifacts.model_files import adapter_directory
from gpufleet.errors import FleetError
from gpufleet.settings.serving_settings import Argument, Served
from gpufleet.sizing.adapter_config import AdapterConfig
from gpufleet.sizing.launch_rules.length_rules import LORA_RANKS

if TYPE_CHECKING:
    from gpufleet.sizing.architectures.description import Description

LAYER = "adapters"
MODULES = "lora-modules"
_RANK = "max-lora-rank"
_IN_A_BATCH = "max-loras"
_IN_MEMORY = "max-cpu-loras"
DERIVED = frozenset({"enable-lora", MODULES, _RANK})
"""
Flags that gpufleet sets because of `adapters`. If a preset needs such a flag, the operator does not
have to set it.
"""

MOST_IN_A_BATCH = 4
"""
Maximum number of adapters in one batch, unless `max-loras` is set.

Each adapter of the batch needs memory on every GPU.
"""
_RANKS = (1, *LORA_RANKS)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def derive(
    served: Served, flags: Mapping[str, Argument], description: Description | str | None
) -> dict[str, tuple[Argument, str]]:
    """
    Return the flags that the entry's adapters need in addition to `flags`, each with its reason.

    Raises `FleetError` if an adapter cannot be served. Each message begins with a key inside the
    entry, for example `flags.max-lora-rank`.
    """
    known = _configs(served, description)
    if problems := [*_unloadable(known), *_rank_problems(known, flags)]:
        raise FleetError(*problems)
    modules: list[Any] = [
        f"{name}={adapter_directory(each)}" for name, each in sorted(served.adapters.items())
    ]
    found: dict[str, tuple[Argument, str]] = {
        "enable-lora": (True, "the model has adapters"),
        MODULES: (
            modules,
            (
                "vLLM loads the adapters at its start, from paths that contain a hash of their "
                "content"
            ),
        ),
    }
    if flags.get(_RANK) is None:
        largest = _largest(known)
        reason = (
            f"the smallest value that vLLM accepts and that is at least {largest}, the largest "
            "rank of the adapters"
        )
        found[_RANK] = (next(each for each in _RANKS if each >= largest), reason)
    if flags.get(_IN_A_BATCH) is None:
        found[_IN_A_BATCH] = (
            min(len(modules), MOST_IN_A_BATCH),
            f"one for each adapter, but at most {MOST_IN_A_BATCH}, because each one needs memory "
            "on the GPU",
        )
    in_a_batch = found[_IN_A_BATCH][0] if _IN_A_BATCH in found else flags[_IN_A_BATCH]
    if flags.get(_IN_MEMORY) is None and isinstance(in_a_batch, int) and len(modules) > in_a_batch:
        found[_IN_MEMORY] = (
            len(modules),
            ("all adapters, so that vLLM reads none of them from the disk again"),
        )
    return found


def module_names(modules: object) -> tuple[str, ...]:
    """
    Return the adapters' names from the arguments of `--lora-modules`, which have the form
    NAME=PATH.

    Arguments in the form of JSON are ignored. on_node/serving/status.py ignores them too when it
    reads the arguments of running servers.
    """
    words = [each for each in modules if isinstance(each, str)] if isinstance(modules, list) else []
    pairs = (each.partition("=") for each in words if not each.startswith("{"))
    return tuple(sorted(name for name, equals, _ in pairs if equals))


def remarks(
    serving: Mapping[str, Served], models: Mapping[str, Description | str | None]
) -> tuple[str, ...]:
    """
    Return a sentence for each adapter that was made for a different model than the entry serves.
    """
    return tuple(
        f"serving.{model}.adapters.{name}: the base model in the adapter's adapter_config.json "
        f"is {config.base}, but you serve the adapter with {served.model}. If the shapes of the "
        "two models differ, the servers do not start. If only the weights differ, the answers of "
        "the adapter are worse"
        for model, served in sorted(serving.items())
        for name, config in _configs(served, models.get(model)).items()
        if isinstance(config, AdapterConfig)
        and not served.is_path
        and _HUB_ID.fullmatch(config.base)
        and config.base.lower() != served.model.lower()
    )


def _configs(
    served: Served, description: Description | str | None
) -> dict[str, AdapterConfig | str]:
    if description is None or isinstance(description, str):
        why = description or "gpufleet did not read the model"
        return dict.fromkeys(
            served.adapters, (f"gpufleet could not read the adapter's model ({why})")
        )
    return {name: description.adapters.get(name, "not read") for name in served.adapters}


def _unloadable(known: Mapping[str, AdapterConfig | str]) -> Iterator[str]:
    for name, config in sorted(known.items()):
        if isinstance(config, AdapterConfig):
            yield from (f"adapters.{name}: {problem}" for problem in config.problems)


def _rank_problems(
    known: Mapping[str, AdapterConfig | str], flags: Mapping[str, Argument]
) -> Iterator[str]:
    own = flags.get(_RANK)
    for name, config in sorted(known.items()):
        if isinstance(config, str):
            if own is None:
                yield (
                    f"adapters.{name}: gpufleet does not know the adapter's rank: {config}. Set "
                    f"`flags.{_RANK}` to at least the largest rank of the adapters, or make the "
                    "file readable"
                )
        elif config.rank > _RANKS[-1]:
            yield (
                f"adapters.{name}: the adapter's rank is {config.rank}, but vLLM allows at most "
                f"{_RANKS[-1]}"
            )
        elif isinstance(own, int) and config.rank > own:
            yield (
                f"flags.{_RANK}: the value is {own}, but the adapter {name} has rank "
                f"{config.rank}. Remove the flag, and gpufleet sets the smallest sufficient value"
            )


def _largest(known: Mapping[str, AdapterConfig | str]) -> int:
    return max(each.rank for each in known.values() if isinstance(each, AdapterConfig))
