"""Which stages a deploy would restart, and for what: their units against the plan.  Pure.

A guide for people who read a plan: what decides is the fingerprint of everything that a process was
started with, which the deploy compares on the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpufleet.planner import Running, Stage
from gpufleet.settings import NodeSettings
from gpufleet.units import argument_lines


def restarts(
    stages: Iterable[Stage], running: Iterable[Running], settings: Mapping[str, NodeSettings]
) -> dict[str, str]:
    """Return, for each planned stage whose unit says otherwise, what changes: by the stage's id."""
    found: dict[str, str] = {}
    units = {(each.node, each.id): each for each in running}
    for stage in stages:
        unit, here = units.get((stage.node, stage.id)), settings[stage.node]
        if unit is None or here.vllm is None or not unit.arguments:
            continue
        lines = argument_lines(stage, here.serving[stage.model], here.vllm)
        changes = [
            *(f"- {line}" for line in unit.arguments if line not in lines),
            *(f"+ {line}" for line in lines if line not in unit.arguments),
        ]
        version = unit.release.rpartition("-")[0]
        if version and version != here.vllm.version:
            changes.insert(0, f"vLLM {version} -> {here.vllm.version}")
        if changes:
            found[stage.id] = ", ".join(changes)
    return found
