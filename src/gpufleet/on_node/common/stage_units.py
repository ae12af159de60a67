"""RUNS ON THE NODE: convert names of stages to systemd units and back.

The controller imports this module too.
"""

from __future__ import annotations

PREFIX, SUFFIX = "vllm-", ".service"
GLOB = PREFIX + "*" + SUFFIX
"""Pattern of all stage units, for systemctl."""


def unit_of(stage: str) -> str:
    """Return a stage's unit: `vllm-llama-0.service` for `llama-0`."""
    return PREFIX + stage + SUFFIX


def is_stage_unit(name: str) -> bool:
    """Return whether a name is the name of a stage's unit."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def stage_of(unit: str) -> str:
    """Return the stage of a unit. A name of any other unit is returned unchanged."""
    return unit[len(PREFIX) : -len(SUFFIX)] if is_stage_unit(unit) else unit
