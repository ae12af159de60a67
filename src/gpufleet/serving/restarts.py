"""Which stages a deploy would restart, and for what: their units against the plan.  Pure.

A guide for people who read a plan: what decides is the fingerprint of everything that a process was
started with, which the deploy compares on the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpufleet.planning.planner import Running, Stage
from gpufleet.serving.unit import argument_lines
from gpufleet.settings.node_settings import NodeSettings

# Tells that something else differs; alone, that it is no argument.
_FINGERPRINT = "--same fingerprint="


def restarts(
    stages: Iterable[Stage], running: Iterable[Running], settings: Mapping[str, NodeSettings]
) -> dict[str, str]:
    """
    Return, for each planned stage whose unit says otherwise, what changes: by the stage's id.

    The ranks of a replica over nodes restart together: what differs on any of them is said once.
    """
    found: dict[str, list[str]] = {}
    units = {(each.node, each.id): each for each in running}
    for stage in stages:
        unit, here = units.get((stage.node, stage.id)), settings[stage.node]
        if unit is None or here.vllm is None or not unit.arguments:
            continue
        lines = argument_lines(
            stage, here.serving[stage.model], here.vllm, release=unit.release if stage.group else ""
        )
        version = unit.release.rpartition("-")[0]
        changes = [
            *(
                [f"vLLM {version} -> {here.vllm.version}"]
                if version not in ("", here.vllm.version)
                else []
            ),
            *(f"- {line}" for line in unit.arguments if line not in lines),
            *(f"+ {line}" for line in lines if line not in unit.arguments),
        ]
        if changes:
            found.setdefault(stage.id, []).extend(changes)
    return {stage: ", ".join(_told(changes)) for stage, changes in found.items()}


def _told(changes: Iterable[str]) -> Iterable[str]:
    """Return each change once."""
    every = dict.fromkeys(changes)
    arguments = [each for each in every if not each[2:].startswith(_FINGERPRINT)]
    return arguments or ["its environment, or what starts it"]
