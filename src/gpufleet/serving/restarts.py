"""Find the stages that a deploy would restart, and why: their units against the plan. Pure.

It is informational, for readers of a plan: the deploy decides on the node, by the fingerprint of
everything that a process was started with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from gpufleet.formatting import join_names
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving.unit import argument_lines
from gpufleet.settings.node_settings import NodeSettings

NO_ARGUMENT = "its environment or start program"
"""What differs of a process that has its arguments."""
# Tells that something else differs; alone, that it is no argument.
_FINGERPRINT = "--same fingerprint="


def find_restarts(
    stages: Iterable[Stage], running: Iterable[Running], settings: Mapping[str, NodeSettings]
) -> dict[str, str]:
    """
    Return the changes of each planned stage whose unit differs, by the stage's id.

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
    return {stage: ", ".join(_changes(changes)) for stage, changes in found.items()}


def _changes(changes: Iterable[str]) -> Iterable[str]:
    """Return each change once."""
    every = dict.fromkeys(changes)
    arguments = [each for each in every if not each[2:].startswith(_FINGERPRINT)]
    return arguments or [NO_ARGUMENT]


def partial_restarts(
    stages: Iterable[Stage],
    running: Iterable[Running],
    settings: Mapping[str, NodeSettings],
    releases: Mapping[str, str],
    reached: Collection[str],
    *,
    serial: bool = False,
) -> Iterator[str]:
    """
    Yield a sentence for each replica over nodes that a run would change on some of them only.

    A rank started with another configuration than the others waits for them, and they for it. Such
    a run would end the replica without starting it again.

    `running` is what has a unit on any node, `releases` the id of the release by node, `reached`
    the nodes that the run is about (`--limit`), `serial` whether it takes one after the other.
    Repairs on one node while the others are as planned do not count.
    """
    units = {(each.node, each.id): each.arguments for each in running}
    replicas: dict[str, list[Stage]] = {}
    for stage in stages:
        if stage.group:
            replicas.setdefault(stage.id, []).append(stage)
    for name, ranks in replicas.items():
        stale = {
            stage.node
            for stage in ranks
            if units.get((stage.node, name)) != _unit_arguments(stage, settings, releases)
        }
        here = {stage.node for stage in ranks} & set(reached)
        nodes = join_names(stage.node for stage in ranks)
        if here and (without := sorted(stale - here)):
            yield (
                f"{name} is planned on {nodes}, but this run leaves out {join_names(without)}, "
                "where it is not as planned: ranks that differ wait for each other and serve "
                "nothing: name all of its nodes in --limit, or none"
            )
        elif serial and stale & here and len(ranks) > 1:
            yield (
                f"--serial: {name} must start on {nodes} at the same time, and with --serial the "
                "first would wait for the others: remove --serial"
            )


def _unit_arguments(
    stage: Stage, settings: Mapping[str, NodeSettings], releases: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the arguments that the stage's unit should have, as a probe reads them."""
    here = settings[stage.node]
    if here.vllm is None:
        return ()
    model = here.serving[stage.model]
    return tuple(argument_lines(stage, model, here.vllm, release=releases[stage.node]))
