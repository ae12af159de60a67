"""Find the stages that a deploy would restart, with the differences between unit and plan. Pure.

The result is only information for readers of a plan. The deploy itself decides on the node whether
to restart a stage. It compares the fingerprint of everything with which the process was started.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from gpufleet.artifacts.release import engine_version
from gpufleet.engines.engine import engine
from gpufleet.formatting import join_names
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving.unit import argument_lines
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import EngineSettings

NO_ARGUMENT = "its environment or start program"
"""The text for what a restart changes if no argument of the process changes."""
# This line differs if anything else differs. If no other line differs, no argument differs.
_FINGERPRINT = "--same fingerprint="


def find_restarts(
    stages: Iterable[Stage], running: Iterable[Running], settings: Mapping[str, NodeSettings]
) -> dict[str, str]:
    """
    Return the changes of each planned stage whose unit differs from the plan, by the stage's id.

    The ranks of a multi-node replica restart together, so a change of several ranks is listed only
    once.
    """
    found: dict[str, list[str]] = {}
    units = {(each.node, each.id): each for each in running}
    for stage in stages:
        unit, here = units.get((stage.node, stage.id)), settings[stage.node]
        if unit is None or not unit.arguments:
            continue
        wanted = here.engine_of(stage.model)
        lines = argument_lines(
            stage, here.serving[stage.model], wanted, release=unit.release if stage.group else ""
        )
        changes = [
            *_release_change(unit.release, wanted),
            *(f"- {line}" for line in unit.arguments if line not in lines),
            *(f"+ {line}" for line in lines if line not in unit.arguments),
        ]
        if changes:
            found.setdefault(stage.id, []).extend(changes)
    return {stage: ", ".join(_changes(changes)) for stage, changes in found.items()}


def _release_change(running: str, planned: EngineSettings) -> Iterator[str]:
    name, version = engine_version(running)
    if version not in ("", planned.version) or name != planned.engine:
        now = engine(planned.engine).title if name != planned.engine else ""
        yield f"{engine(name).title} {version} -> {now} {planned.version}".replace("  ", " ")


def _changes(changes: Iterable[str]) -> Iterable[str]:
    """Return each changed argument once, or `NO_ARGUMENT` if no argument differs."""
    every = dict.fromkeys(changes)
    arguments = [each for each in every if not each[2:].startswith(_FINGERPRINT)]
    return arguments or [NO_ARGUMENT]


def partial_restarts(
    stages: Iterable[Stage],
    running: Iterable[Running],
    settings: Mapping[str, NodeSettings],
    releases: Mapping[tuple[str, str], str],
    reached: Collection[str],
    *,
    serial: bool = False,
) -> Iterator[str]:
    """
    Yield a sentence for each multi-node replica that a run would change on only some of its nodes.

    Ranks with different configurations wait for each other, so such a run would end the replica
    without starting it again.

    `running` are the stages with a unit on any node. `releases` has the id of the release, by node
    and engine. `reached` are the nodes of the run (`--limit`). `serial` is true if the run changes
    one node after another. A repair on one node is allowed if the other nodes are as planned.
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
                "where the replica differs from the plan. Ranks with different settings wait for "
                "each other and serve nothing: include all of these nodes in --limit, or none of "
                "them"
            )
        elif serial and stale & here and len(ranks) > 1:
            yield (
                f"--serial: {name} must start on {nodes} at the same time, but with --serial the "
                "first node would wait for the others: remove --serial"
            )


def _unit_arguments(
    stage: Stage,
    settings: Mapping[str, NodeSettings],
    releases: Mapping[tuple[str, str], str],
) -> tuple[str, ...]:
    """Return the planned arguments of a stage's unit, in the form in which a probe reports them."""
    here = settings[stage.node]
    model = here.serving[stage.model]
    return tuple(
        argument_lines(
            stage, model, here.engine_of(stage.model), release=releases[stage.node, stage.engine]
        )
    )
