"""Plan a fleet from its nodes' probes, or collect everything that prevents a plan.

This module does not import pyinfra. It reads the lock files that settings name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from gpufleet.artifacts.model_lock import judge_models
from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.node.topology import Node, value_or
from gpufleet.planning import adapter_flags, planner, suspect_settings
from gpufleet.planning.explanation import Change, candidate_rows, plan_changes
from gpufleet.planning.flag_layers import (
    LayeredFlag,
    apply_layers,
    preset_flags,
    release_name,
    resolve_layers,
)
from gpufleet.planning.gpu_placement import NearNics
from gpufleet.planning.gpu_totals import Totals, count_gpus
from gpufleet.planning.kind_flags import kind_problems, resolve_kinds
from gpufleet.planning.multinode import consistency, disaggregation
from gpufleet.planning.multinode.disaggregation import Pairs
from gpufleet.planning.multinode.open_ports import require_guarded_ports
from gpufleet.planning.multinode.rank_groups import join_ranks, network_sentences
from gpufleet.planning.planner import FleetPlan
from gpufleet.planning.quantization_advice import advice
from gpufleet.planning.stage import Running
from gpufleet.serving import flag_check, flag_files
from gpufleet.serving.declared_flags import declared_problems, refused_flags
from gpufleet.serving.restarts import find_restarts
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import ModelKind, Served
from gpufleet.sizing.architectures.description import Described
from gpufleet.sizing.fit import size
from gpufleet.sizing.model_kinds import KindReading


@dataclass(frozen=True)
class Assessment:
    """A plan, its nodes, and remarks."""

    nodes: Mapping[str, Node]
    plan: FleetPlan
    remarks: tuple[str, ...]
    running: tuple[Running, ...] = ()
    """The stages that have units on the nodes."""
    layers: Mapping[tuple[str, str], tuple[LayeredFlag, ...]] = field(default_factory=dict)
    """Every flag that a layer sets, by (model, name of its release)."""
    restarts: Mapping[str, str] = field(default_factory=dict)
    """Stages whose process differs from the plan, with the differences."""
    totals: Totals = field(default_factory=Totals)
    reserved: Mapping[str, Collection[int]] = field(default_factory=dict)
    """The GPUs that `gpus.reserved` keeps for others, by node."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return the plan's changes to the running stages."""
        return plan_changes(self.plan, self.running, self.restarts, self.nodes.values())

    @property
    def usable_nodes(self) -> list[Node]:
        """Return the nodes for planning, without the GPUs that `gpus.reserved` keeps for others."""
        return [
            planner.without_reserved(node, self.reserved.get(name, ()))
            for name, node in self.nodes.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """
        Return plain values for `json.dumps`: the values of the plan, and in addition

            {"candidates": [...], "changes": [...], "flags": {"llama": [...]}, "remarks": [...],
             "totals": {"gpus": 16, "planned": 12, "free": 4, ...}}
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
            "totals": asdict(self.totals),
        }


# Flags whose absence may increase a model's memory, or change how it runs.
_COUNTED = frozenset(
    {
        "convert",
        "cpu-offload-gb",
        "decode-context-parallel-size",
        "enforce-eager",
        "gpu-memory-utilization",
        "hf-overrides",
        "kv-cache-dtype",
        "kv-cache-memory-bytes",
        "language-model-only",
        "limit-mm-per-prompt",
        "max-model-len",
        "max-num-batched-tokens",
        "max-num-seqs",
        "quantization",
        "rope-scaling",
        "runner",
        "speculative-config",
        "task",
    }
)


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan by node, and the models by their names in `serving`."""

    documents: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, NodeSettings]
    origins: Mapping[str, flag_check.Origins]
    nodes: Mapping[str, Node]
    nics: Mapping[str, NearNics]
    models: Mapping[str, Described]
    groups: Mapping[str, Collection[str]] = field(default_factory=dict)
    kinds: Mapping[str, KindReading] = field(default_factory=dict)
    """The kinds of the models, from their files."""

    def without(self, models: Collection[str]) -> PlanInputs:
        """Return the same inputs, without models that must not be planned."""
        return self.changed(lambda model, served: None if model in models else served)

    def changed(self, change: Callable[[str, Served], Served | None]) -> PlanInputs:
        """
        Return the same inputs, with each model replaced by the result of `change`.

        If the result is None, the model is removed.
        """
        settings = {name: wanted.with_serving(change) for name, wanted in self.settings.items()}
        return replace(self, settings=settings)


def further_problems(there: PlanInputs, hidden: Collection[str]) -> tuple[str, ...]:
    """
    Return the problems that are not consequences of unusable nodes.

    gpufleet plans as if these nodes were repaired. `hidden` are the nodes of which the usable
    hardware after the repair is unknown. gpufleet does not judge whether the models of these nodes
    fit.
    """
    left_out = {model for name in hidden for model in there.settings[name].serving}
    pairs = {
        (model, served.prefill)
        for wanted in there.settings.values()
        for model, served in wanted.serving.items()
        if served.prefill
    }
    while more := {model for pair in pairs if left_out & {*pair} for model in pair} - left_out:
        left_out |= more
    try:
        plan_known_nodes(there.without(left_out))
    except FleetError as error:
        found = error.problems
    else:
        found = ()
    found += tuple(_problems_of_any_plan(there)) if left_out else ()
    if left_out:
        found += (
            f"it is not yet known whether {join_names(sorted(left_out))} can be placed, "
            f"because this depends on what {join_names(sorted(hidden))} will use after the "
            "correction",
        )
    return tuple(dict.fromkeys(found))


def _problems_of_any_plan(there: PlanInputs) -> Iterator[str]:
    """Yield the problems of settings and flags that do not depend on a plan."""
    yield from declared_problems(there.settings, there.origins)
    yield from kind_problems(there.settings)
    try:
        judge_models(there.settings)
    except FleetError as error:
        yield from error.problems


def plan_known_nodes(there: PlanInputs, *, judged: bool = True) -> Assessment:
    """
    Return the plan. If `judged` is true, also check its flags and settings, and add remarks.

    Raises `FleetError` with everything that prevents the plan. If `judged` is true, the error also
    contains the errors of settings and flags that any plan would have.
    """
    try:
        return _placed(there, judged=judged)
    except FleetError as error:
        if not judged:
            raise
        wrong = refused_flags(there.settings, there.origins)
        found = _problems_without(there, wrong) if wrong else error.problems
        every = (*found, *_problems_of_any_plan(there))
        raise FleetError(*dict.fromkeys(every or error.problems)) from None


def _problems_without(there: PlanInputs, wrong: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """
    Return the problems of a plan without the flags in `wrong`, which are refused anyway.

    The problems of a model whose size depends on one of these flags are left out.
    """
    unsure = tuple(f"serving.{model}: " for model, names in wrong.items() if names & _COUNTED)

    def accepted(model: str, served: Served) -> Served:
        flags = {flag: value for flag, value in served.flags.items()
                 if flag not in wrong.get(model, ())}  # fmt: skip
        return served.model_copy(update={"flags": flags})

    try:
        _placed(there.changed(accepted), judged=True)
    except FleetError as error:
        return tuple(each for each in error.problems if not each.startswith(unsure))
    return ()


def _placed(there: PlanInputs, *, judged: bool) -> Assessment:
    settings, models, documents = there.settings, there.models, there.documents
    layers = resolve_layers(settings, models, there.nodes)
    locks = _locks(settings)
    pairs = disaggregation.handover_pairs(settings, layers, models, locks)
    layers = _with_roles(layers, pairs, models)
    runs = tuple(running_stages(documents))
    kinds = resolve_kinds(settings, there.kinds, runs, locks, judged=judged)
    layers = {key: kinds.flags(key[0], flags) for key, flags in layers.items()}
    reserved = {name: each.gpus.reserved for name, each in settings.items()}
    effective = apply_layers(settings, layers)
    plan = planner.plan(
        there.nodes.values(),
        effective,
        models,
        runs,
        reserved=reserved,
        nics=there.nics,
        groups=there.groups,
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
                flags=preset_flags(
                    layers[stage.model, release_name(settings[stage.node], stage.model)]
                ),
                kind=kinds.kind(stage.model),
                engine=settings[stage.node].serving[stage.model].engine,
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
    remarks: tuple[str, ...] = ()
    if judged:
        remarks = _all_remarks(
            lambda: kinds.remarks,
            lambda: disaggregation.remarks(pairs, layers),
            lambda: adapter_flags.remarks(serving, models),
            lambda: judge_models(effective),
            lambda: suspect_settings.remarks(plan.stages, effective, there.nodes, documents),
            lambda: consistency.check_consistency(plan.stages, settings, there.nodes, locks),
            lambda: flag_check.check_plan(plan.stages, settings, there.origins),
            lambda: flag_files.check_files(plan.stages, settings, documents, there.origins),
            lambda: require_guarded_ports(plan.stages, settings, there.origins),
        )
    restarts = find_restarts(plan.stages, runs, settings)
    totals = count_gpus(plan, there.nodes.values(), reserved)
    return Assessment(there.nodes, plan, remarks, runs, layers, restarts, totals, reserved)


def _all_remarks(*judges: Callable[[], Iterable[str] | None]) -> tuple[str, ...]:
    """
    Call all `judges` and return their remarks. Raises `FleetError` with all problems that they
    raise.
    """
    remarks: list[str] = []
    problems: list[str] = []
    for judge in judges:
        try:
            remarks += judge() or ()
        except FleetError as error:
            problems += error.problems
    if problems:
        raise FleetError(*dict.fromkeys(problems))
    return tuple(remarks)


def running_stages(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[Running]:
    """Yield the stages with units on nodes, from the nodes' probes."""
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
                    kind=_kind(unit.get("kind")),
                    side_channel=int(unit.get("side_channel", 0)),
                )


def _kind(name: object) -> ModelKind:
    """Return a unit's model kind.

    A kind that this gpufleet does not know, from a newer gpufleet, counts as `generate`.
    """
    return next((each for each in get_args(ModelKind) if each == name), "generate")


def _locks(settings: Mapping[str, NodeSettings]) -> dict[str, str]:
    """
    Return the text of each readable lock file, by path. The role reports unreadable lock files.
    """
    names = {each.lock for wanted in settings.values() for each in wanted.engines.values()}
    return {name: Path(name).read_text("utf-8") for name in names if Path(name).is_file()}


def _with_roles(
    layers: Mapping[tuple[str, str], tuple[LayeredFlag, ...]],
    pairs: Pairs,
    models: Mapping[str, Described],
) -> dict[tuple[str, str], tuple[LayeredFlag, ...]]:
    """Add the flags of each entry's role: prefill or decode."""
    return {
        (model, vllm): pairs.flags(model, vllm, flags, models.get(model))
        for (model, vllm), flags in layers.items()
    }
