"""Which architecture is this `config.json` of?  Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from gpufleet.architecture import dense, multimodal
from gpufleet.architecture.parts import Architecture
from gpufleet.errors import FleetError

Builder = Callable[[Mapping[str, Any]], Architecture]

BUILDERS: dict[str, Builder] = {**dense.BUILDERS, **multimodal.BUILDERS}
"""Every known name that `architectures` in config.json may have, with what reads it."""


def architecture(config: Mapping[str, Any]) -> Architecture:
    """
    Return what the model of this parsed `config.json` is made of.

    Raises `FleetError` for an architecture that is not known (with near names), for one whose
    cache has no size by tokens, and for a config without what the size follows from.
    """
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names:
        raise FleetError(
            "config.json has no `architectures`, which names the model's class; take the file as "
            "the model's publisher has it"
        )
    for name in names:
        if builder := BUILDERS.get(str(name)):
            return builder(config)
    raise _unknown(str(names[0]))


def _unknown(name: str) -> FleetError:
    near = difflib.get_close_matches(name, BUILDERS, n=3, cutoff=0.6)
    others = f"; near names that are: {', '.join(near)}" if near else ""
    return FleetError(
        f"the architecture {name} (`architectures` in config.json) is not known{others}; its size "
        "is not guessed: give the parallel sizes and `--gpu-memory-utilization` yourself and read "
        "the tokens that vLLM reports at start"
    )
