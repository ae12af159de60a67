"""The ranks of a replica restart in one run, or none of them does.  Pure.

A rank that was started with something else than the others waits for them, and they for it. So a
run that changes some nodes of a replica, and leaves others as they are, would end what serves and
start nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from gpufleet.formatting import listed
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving.unit import argument_lines
from gpufleet.settings.node_settings import NodeSettings


def halves(
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

    `running` is what has a unit on any node, `releases` the id of the release by node, `reached`
    the nodes that the run is about (`--limit`), `serial` whether it takes one after the other.
    What is to be repaired on one node while the others are as planned is no half.
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
            if units.get((stage.node, name)) != _arguments(stage, settings, releases)
        }
        here = {stage.node for stage in ranks} & set(reached)
        nodes = listed(stage.node for stage in ranks)
        if here and (without := sorted(stale - here)):
            yield (
                f"{name} belongs on {nodes}, and this run leaves out {listed(without)}, where it "
                "is not as planned: ranks that differ wait for each other, and serve nothing: take "
                "all of its nodes into --limit, or none"
            )
        elif serial and stale & here and len(ranks) > 1:
            yield (
                f"--serial: {name} starts on {nodes} together, and the first of them would wait "
                "for the others, whose turn comes after it: leave --serial out"
            )


def _arguments(
    stage: Stage, settings: Mapping[str, NodeSettings], releases: Mapping[str, str]
) -> tuple[str, ...]:
    """Return what the stage's unit is to say, as a probe reads it."""
    here = settings[stage.node]
    if here.vllm is None:
        return ()
    model = here.serving[stage.model]
    return tuple(argument_lines(stage, model, here.vllm, release=releases[stage.node]))
