"""
Warn that a model with a single replica is unavailable while it loads. Pure.

The warning has the load time and the steps that avoid the outage. The planner decides whether the
present fleet has room for one more replica. All running replicas must keep their GPUs for this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.formatting import format_duration, ranges
from gpufleet.planning.stage import Stage
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from gpufleet.upgrade.plan.duration import Entry, load_seconds
from gpufleet.upgrade.plan.wave import Group, model_of

HOW = "docs/upgrade/upgrades.md, A model with one replica"


def remarks(
    groups: Iterable[Group],
    found: Assessment,
    documents: Mapping[str, Mapping[str, Any]],
    declared: Mapping[str, NodeVars],
    journals: Sequence[Sequence[Entry]] = (),
) -> Iterator[str]:
    """Yield a sentence for each model whose only replica is changed by `groups`."""
    run = Counter(model_of(replica) for replica in {each.id for each in found.running})
    changed = {
        model_of(replica)
        for group in groups
        for replica in {*group.replicas} - {*group.comes} - {*group.goes}
    }
    seconds = load_seconds(journals)
    for model in sorted(each for each in changed if run[each] == 1):
        served = [
            each.settings.serving[model]
            for each in declared.values()
            if model in each.settings.serving
        ]
        if not served:
            continue
        took = (
            f"{format_duration(seconds[model])} the last time"
            if model in seconds
            else "not measured yet; "
            f"{format_duration(max(each.start_seconds for each in served))} at most, "
            "its `start_seconds`"
        )
        yield (
            f"{model} has only one replica, so it does not answer while it loads ({took}): "
            f"{_room(model, found, documents, declared)}"
        )


def _room(
    model: str,
    found: Assessment,
    documents: Mapping[str, Mapping[str, Any]],
    declared: Mapping[str, NodeVars],
) -> str:
    """
    Return a sentence with the nodes that have room for one more replica, or why there is no room.
    """
    counts = {
        each.settings.serving[model].replicas
        for each in declared.values()
        if model in each.settings.serving
    }
    (count, *others) = counts
    if others or not isinstance(count, int):
        return "`replicas: fit` already uses all GPUs, so one more replica does not fit"
    more = {
        name: replace(each, settings=_with(each.settings, model, count + 1))
        for name, each in declared.items()
    }
    try:
        then = assessment.plan_fleet(documents, more)
    except FleetError as error:
        return f"one more replica does not fit ({error.problems[0]})"
    before, after = _places(found.plan.stages), _places(then.plan.stages)
    new = [stage for stage in then.plan.stages if (stage.node, stage.id) not in before]
    if any(after.get(key) != place for key, place in before.items()) or not new:
        return "one more replica fits only if other replicas move"
    where = " and ".join(
        f"{stage.node} (GPU {ranges(stage.gpus)})" for stage in sorted(new, key=lambda s: s.node)
    )
    return (
        f"{where} has room for one more replica, without moves or restarts. Before you change "
        f"anything else, set `serving.{model}.replicas: {count + 1}`, run `gpufleet deploy vllm "
        f"INVENTORY` and upgrade. Then set it to {count} again and upgrade once more: {HOW}"
    )


def _places(stages: Iterable[Stage]) -> dict[tuple[str, str], tuple[object, ...]]:
    """Return each stage's GPUs, port and parallel sizes, by (node, id)."""
    return {
        (each.node, each.id): (
            each.gpu_uuids,
            each.port,
            each.nodes,
            each.tensor_parallel,
            each.pipeline_parallel,
            each.data_parallel,
        )
        for each in stages
    }


def _with(settings: NodeSettings, model: str, replicas: int) -> NodeSettings:
    return settings.with_serving(
        lambda name, served: (
            served.model_copy(update={"replicas": replicas}) if name == model else served
        )
    )
