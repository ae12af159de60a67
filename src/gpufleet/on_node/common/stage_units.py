"""RUNS ON THE NODE, and the controller imports it: the systemd units of stages, by name."""

from __future__ import annotations

PREFIX, SUFFIX = "vllm-", ".service"
GLOB = PREFIX + "*" + SUFFIX
"""What systemctl takes for all of them."""


def unit_of(stage: str) -> str:
    """Return the unit of a stage: `vllm-llama-0.service` of `llama-0`."""
    return PREFIX + stage + SUFFIX


def is_stage_unit(name: str) -> bool:
    """Return whether a name is that of a stage's unit."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def stage_of(unit: str) -> str:
    """Return the stage of a unit; of a stage, itself."""
    return unit[len(PREFIX) : -len(SUFFIX)] if is_stage_unit(unit) else unit
