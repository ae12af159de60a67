"""What nodes' probes and variables come to: findings, and the plan that they allow.

One road for deploys, live inventories and recordings. Knows nothing of pyinfra; reads the locks
that settings name, and the date.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gpufleet.artifacts import release
from gpufleet.artifacts.model_lock import judge_models
from gpufleet.checks.admission import admitted_nodes, finding_sentence
from gpufleet.checks.evaluate import evaluate
from gpufleet.checks.finding import Report
from gpufleet.checks.probe_facts import Needs
from gpufleet.errors import FleetError
from gpufleet.fleet.model_configs import describe_models
from gpufleet.node import cordon
from gpufleet.node.machine import Machine, System, from_probe
from gpufleet.node.nic_affinity import nearest_nics
from gpufleet.node.topology import Node, node_from_probe, value_or
from gpufleet.planning import planner, suspect_settings
from gpufleet.planning.explanation import Change, candidate_rows, plan_changes
from gpufleet.planning.flag_layers import (
    LayeredFlag,
    apply_layers,
    preset_flags,
    resolve_layers,
    vllm_version,
)
from gpufleet.planning.multinode import consistency, disaggregation
from gpufleet.planning.multinode.disaggregation import Pairs
from gpufleet.planning.multinode.open_ports import require_guarded_ports
from gpufleet.planning.multinode.rank_groups import join_ranks, network_sentences
from gpufleet.planning.planner import FleetPlan
from gpufleet.planning.quantization_advice import advice
from gpufleet.planning.stage import Running
from gpufleet.remote.answer_forms import reading
from gpufleet.serving import flag_check, vllm_node
from gpufleet.serving.restarts import find_restarts
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from gpufleet.sizing.architectures.description import Described
from gpufleet.sizing.fit import size


@dataclass(frozen=True)
class Assessment:
    """The plan, the nodes that it is made on, and sentences worth knowing beside it."""

    nodes: Mapping[str, Node]
    plan: FleetPlan
    remarks: tuple[str, ...]
    running: tuple[Running, ...] = ()
    """The stages that have units on the nodes."""
    layers: Mapping[tuple[str, str], tuple[LayeredFlag, ...]] = field(default_factory=dict)
    """By model and release: every flag that a layer sets."""
    restarts: Mapping[str, str] = field(default_factory=dict)
    """Stages whose process was started with something else than the plan says, and with what."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """What carrying the plan out does to what runs."""
        return plan_changes(self.plan, self.running, self.restarts, self.nodes.values())

    def as_json(self) -> dict[str, Any]:
        """
        Plain values for `json.dumps`: the plan's, and beside them

            {"candidates": [...], "changes": [...], "flags": {"llama": [...]}, "remarks": [...]}
        """
        return {
            **self.plan.as_json(),
            "candidates": [asdict(row) for row in candidate_rows(self.plan)],
            "changes": [each.as_json() for each in self.changes],
            "flags": {
                f"{model} {vllm}".strip(): [asdict(each) for each in flags]
                for (model, vllm), flags in self.layers.items()
            },
            "remarks": list(self.remarks),
        }


def machine_of(name: str, answer: Mapping[str, Any] | str) -> tuple[System, Machine] | None:
    """Return what a node is built of, as its probe says; None: it cannot be told."""
    try:
        with reading(name):
            return None if isinstance(answer, str) else from_probe(answer)
    except FleetError:
        return None


def check_nodes(
    answers: Mapping[str, Mapping[str, Any] | str],
    declared: Mapping[str, NodeVars],
    only: Collection[str] | None = None,
) -> Report:
    """
    Return what the checks find on nodes, or `only` on some.

    `answers` has a document or a sentence for each, also for those that others are compared with.

    Siblings are nodes in the same groups. Nodes that nothing is declared of are judged by the
    defaults, as each other's siblings.
    """
    settings = {name: declared[name].settings for name in answers if name in declared}
    groups = {name: declared[name].groups if name in declared else () for name in answers}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, its_groups in groups.items():
        alike.setdefault(its_groups, []).append(name)
    return evaluate(
        answers,
        settings,
        dt.datetime.now(dt.UTC).date(),
        {name: _needs(settings[name]) for name in settings if only is None or name in only},
        {name: tuple(alike[its_groups]) for name, its_groups in groups.items()},
        only=only,
    )


def plan_fleet(
    answers: Mapping[str, Mapping[str, Any] | str],
    declared: Mapping[str, NodeVars],
    *,
    unfit_stops: bool = True,
) -> Assessment:
    """
    Return the plan for all nodes.

    Raises `FleetError` naming nodes without an answer, everything that checks find unfit, what does
    not fit, and what vLLM would refuse. With `unfit_stops=False`, for looking at what runs there
    already, what is unfit is a remark and flags are not judged.
    """
    documents = require_documents(answers)
    settings = {name: each.settings for name, each in declared.items()}
    report = check_nodes(documents, declared)
    nodes, nics = {}, {}
    for name, document in documents.items():
        with reading(name):
            nodes[name], nics[name] = node_from_probe(name, document), nearest_nics(document)
    remarks = tuple(
        finding_sentence(each) for each in report.findings if each.stops and each.cause is None
    )
    unknown = tuple(
        f"{name}: whether it is cordoned is not known ({why}): the plan takes it for not cordoned"
        for name, document in documents.items()
        if (why := cordon.unknown_reason(document))
    )
    if unfit_stops:
        unserved = tuple(vllm_node.system_problems(documents, settings))
        try:
            nodes, remarks = admitted_nodes(report, nodes.values(), settings), ()
        except FleetError as error:
            raise FleetError(*unserved, *error.problems) from None
        if unserved:
            raise FleetError(*unserved)
    models = describe_models(declared, documents)
    layers = resolve_layers(settings, models, nodes)
    locks = _locks(settings)
    pairs = disaggregation.handover_pairs(settings, layers, models, locks)
    layers = _with_roles(layers, pairs, models)
    runs = tuple(running_stages(documents))
    effective = apply_layers(settings, layers)
    plan = planner.plan(
        nodes.values(),
        effective,
        models,
        runs,
        reserved={name: each.gpus.reserved for name, each in settings.items()},
        nics=nics,
    )
    serving = {
        model: served for wanted in effective.values() for model, served in wanted.serving.items()
    }
    plan = replace(
        plan,
        reasons=(*plan.reasons, *advice(plan.candidates, serving, models, size)),
        stages=tuple(
            replace(
                stage,
                flags=preset_flags(layers[stage.model, vllm_version(settings[stage.node])]),
            )
            for stage in plan.stages
        ),
    )
    handed = disaggregation.check_divisions(plan.stages, pairs, layers, models)
    plan = replace(
        plan,
        reasons=(*plan.reasons, *handed),
        stages=join_ranks(plan.stages, documents, settings, models, pairs, runs=runs),
    )
    plan = replace(plan, reasons=(*plan.reasons, *network_sentences(plan.stages)))
    if unfit_stops:
        origins = {name: each.origins for name, each in declared.items()}
        require_guarded_ports(plan.stages, settings, origins)
        remarks = (
            *disaggregation.remarks(pairs, layers),
            *judge_models(effective),
            *suspect_settings.remarks(plan.stages, effective, nodes),
            *consistency.check_consistency(plan.stages, settings, nodes, locks),
            *flag_check.check_plan(plan.stages, settings, origins),
        )
    remarks = (*unknown, *remarks)
    return Assessment(
        nodes, plan, remarks, runs, layers, find_restarts(plan.stages, runs, settings)
    )


def require_documents(
    answers: Mapping[str, Mapping[str, Any] | str],
) -> dict[str, Mapping[str, Any]]:
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
            "of the inventory (their replicas then move to the others; one over several nodes "
            "only with `when_a_node_leaves: replan`)",
        )
    return {name: said for name, said in answers.items() if not isinstance(said, str)}


def running_stages(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[Running]:
    """Yield the stages that have units on nodes, as their probes found them."""
    for node, document in documents.items():
        for unit in value_or(document.get("stages")) or ():
            if "missing" not in unit and not unit.get("foreign"):
                yield Running(
                    model=unit["model"],
                    replica=unit["replica"],
                    node=node,
                    gpu_uuids=tuple(unit["gpus"]),
                    port=unit["port"],
                    rank=unit["rank"],
                    release=str(unit.get("release", "")),
                    arguments=tuple(unit.get("arguments", ())),
                    side_channel=int(unit.get("side_channel", 0)),
                )


def _locks(settings: Mapping[str, NodeSettings]) -> dict[str, str]:
    """Return the text of each lock that can be read; the role says what is wrong with others."""
    names = {wanted.vllm.lock for wanted in settings.values() if wanted.vllm}
    return {name: Path(name).read_text("utf-8") for name in names if Path(name).is_file()}


def _with_roles(
    layers: Mapping[tuple[str, str], tuple[LayeredFlag, ...]],
    pairs: Pairs,
    models: Mapping[str, Described],
) -> dict[tuple[str, str], tuple[LayeredFlag, ...]]:
    """Add the flags that tell an entry whether it computes prompts or answers."""
    return {
        (model, vllm): pairs.flags(model, vllm, flags, models.get(model))
        for (model, vllm), flags in layers.items()
    }


def _needs(settings: NodeSettings) -> Needs:
    """Return what the vLLM release that the settings name asks of a node."""
    vllm = settings.vllm
    if vllm is None or vllm.device != "cuda":
        return Needs()
    try:
        lock = Path(vllm.lock).read_bytes()
    except OSError:
        return Needs()  # the role that installs the release says what is wrong with its lock
    return Needs(release.cuda_release(lock), f"the CUDA runtime in {vllm.lock}")
