"""What nodes' probes and variables come to: findings, and the plan that they allow.

One road for deploys, live inventories and recordings. Knows nothing of pyinfra; reads the locks
that settings name, and the date.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpufleet import planner, release, stage_flags
from gpufleet.checks.admission import admitted, sentence
from gpufleet.checks.finding import Report
from gpufleet.checks.judge import judge
from gpufleet.checks.reading import Needs
from gpufleet.errors import FleetError
from gpufleet.planner import FleetPlan
from gpufleet.settings import NodeSettings
from gpufleet.topology import Node, node_from_probe
from gpufleet.variables import Origin


class Declared(Protocol):
    """What variables say of one node, as `nodevars.NodeVars` has it."""

    @property
    def groups(self) -> tuple[str, ...]: ...

    @property
    def settings(self) -> NodeSettings: ...

    @property
    def origins(self) -> Mapping[str, Origin]: ...


@dataclass(frozen=True)
class Assessment:
    """The plan, the nodes that it is made on, and sentences worth knowing beside it."""

    nodes: Mapping[str, Node]
    plan: FleetPlan
    remarks: tuple[str, ...]


def judged(
    answers: Mapping[str, Mapping[str, Any] | str], declared: Mapping[str, Declared]
) -> Report:
    """
    Return what the checks find on nodes; `answers` has a document or a sentence for each.

    Siblings are nodes in the same groups. Nodes that nothing is declared of are judged by the
    defaults, as each other's siblings.
    """
    settings = {name: declared[name].settings for name in answers if name in declared}
    groups = {name: declared[name].groups if name in declared else () for name in answers}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, its_groups in groups.items():
        alike.setdefault(its_groups, []).append(name)
    return judge(
        answers,
        settings,
        dt.datetime.now(dt.UTC).date(),
        {name: _needs(each) for name, each in settings.items()},
        {name: tuple(alike[its_groups]) for name, its_groups in groups.items()},
    )


def planned(
    answers: Mapping[str, Mapping[str, Any] | str],
    declared: Mapping[str, Declared],
    *,
    unfit_stops: bool = True,
) -> Assessment:
    """
    Return the plan for all nodes.

    Raises `FleetError` naming nodes without an answer, everything that checks find unfit, what does
    not fit, and what vLLM would refuse. With `unfit_stops=False`, for looking at what runs there
    already, what is unfit is a remark and flags are not judged.
    """
    documents = every(answers)
    settings = {name: each.settings for name, each in declared.items()}
    report = judged(documents, declared)
    nodes = {name: node_from_probe(name, document) for name, document in documents.items()}
    if not unfit_stops:
        unfit = (each for each in report.findings if each.stops and each.cause is None)
        plan = planner.plan(nodes.values(), settings)
        return Assessment(nodes, plan, tuple(map(sentence, unfit)))
    fit = admitted(report, nodes.values(), settings)
    plan = planner.plan(fit.values(), settings)
    origins = {name: each.origins for name, each in declared.items()}
    return Assessment(fit, plan, stage_flags.judge_plan(plan.stages, settings, origins))


def every(answers: Mapping[str, Mapping[str, Any] | str]) -> dict[str, Mapping[str, Any]]:
    """
    Return the documents of all nodes.

    Raises `FleetError` naming every node that gave none: a plan without them would move their
    replicas to other nodes.
    """
    missing = [f"{name}: {said}" for name, said in answers.items() if isinstance(said, str)]
    if missing:
        raise FleetError(
            *missing,
            "every node of the inventory is needed to plan: bring them back, or take them out "
            "of the inventory (their replicas then move to the others)",
        )
    return {name: said for name, said in answers.items() if not isinstance(said, str)}


def _needs(settings: NodeSettings) -> Needs:
    """Return what the vLLM release that the settings name asks of a node."""
    vllm = settings.vllm
    if vllm is None or vllm.device != "cuda":
        return Needs()
    try:
        lock = Path(vllm.lock).read_bytes()
    except OSError:
        return Needs()  # the role that installs the release says what is wrong with its lock
    return Needs(release.cuda_of(lock), f"the CUDA runtime in {vllm.lock}")
