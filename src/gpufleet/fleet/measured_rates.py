"""Return the measured rates of replicas, from stored results that apply to them.

Border: this module reads the results next to the inventory, and the lock files that settings name.
It does not import pyinfra.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpufleet.artifacts.operator_files import release_of
from gpufleet.artifacts.release import engine_version
from gpufleet.errors import FleetError
from gpufleet.fleet.fleet_plan import Assessment, running_stages
from gpufleet.inventory.loader import Fleet
from gpufleet.load_test import result
from gpufleet.load_test.load_target import contract_from
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.result import MeasuredRate, Measurement, StoredMeasurements
from gpufleet.load_test.subjects import measurements_folder, subject_of
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.node.topology import Node, node_from_probe
from gpufleet.planning.gpu_totals import replica_names
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving.unit import argument_lines
from gpufleet.settings.node_settings import NodeSettings

RateOrReason: TypeAlias = MeasuredRate | str
"""The rate that a replica can serve, or a sentence why the rate is unknown."""


@dataclass(frozen=True)
class ModelRate:
    """The measured rate of a group of replicas of one model that have the same rate."""

    model: str
    replicas: tuple[int, ...]
    """Numbers of the replicas."""
    planned: RateOrReason
    """The rate with the planned settings."""
    running: RateOrReason | None
    """The rate with the running settings; None if the replicas do not run."""

    @property
    def rate(self) -> MeasuredRate | None:
        """
        Return the measured rate with the planned settings, or else with the running settings.

        The result is None if both rates are unknown.
        """
        known = (each for each in (self.planned, self.running) if isinstance(each, MeasuredRate))
        return next(known, None)

    @property
    def holds_for(self) -> tuple[str, ...]:
        """Return the states that the rate applies to: "planned", "running"."""
        return tuple(
            name
            for name, each in (("planned", self.planned), ("running", self.running))
            if self.rate and each == self.rate
        )

    def __str__(self) -> str:
        """Return the sentence of `gpufleet plan`."""
        names, rate = replica_names(self.model, self.replicas), self.rate
        if rate is None:
            return f"{names}: {str(self.planned).removeprefix(f'{self.model} ')}"
        missed = f", but not {rate.missed:.3g}" if rate.missed else ""
        held = {"planned": "is planned", "running": "runs"}
        found = (
            f"{names}: measured {rate.age}: each can serve {rate.requests_per_second:.3g} "
            f"requests/s{missed}; this applies to what "
            + " and ".join(held[each] for each in self.holds_for)
        )
        if "planned" not in self.holds_for:
            return f"{found}, but not to what is planned: {self.planned}"
        if isinstance(self.running, MeasuredRate) and self.running != rate:
            return (
                f"{found}; what runs now serves {self.running.requests_per_second:.3g} requests/s"
            )
        if isinstance(self.running, str):
            return f"{found}, but not to what runs now: {self.running}"
        return found

    def as_json(self) -> dict[str, Any]:
        """
        Return plain values for `json.dumps`.

            {"model": "llama", "replicas": ["llama-0"], "requests_per_second": 12.5,
             "missed_at": 14.0, "measured": "2026-11-20T12:30:05+00:00", "target": "gateway",
             "workload": {...}, "holds_for": ["planned", "running"], "why": ""}

        `why` is the reason why no rate applies to the plan, or "" if a rate applies.
        """
        rate = self.rate
        return {
            "model": self.model,
            "replicas": [f"{self.model}-{number}" for number in self.replicas],
            "requests_per_second": rate.requests_per_second if rate else None,
            "missed_at": rate.missed if rate else None,
            "measured": rate.when.isoformat() if rate else None,
            "target": rate.target if rate else None,
            "workload": dict(rate.workload) if rate else None,
            "holds_for": list(self.holds_for),
            "why": self.planned if isinstance(self.planned, str) else "",
        }


def stored_results(inventory_file: str) -> StoredMeasurements:
    """Return the stored results next to an inventory file. The result may be empty."""
    return result.read_measurements(measurements_folder(inventory_file))


def replica_rates(
    known: Sequence[Measurement],
    stages: Iterable[Running],
    nodes: Mapping[str, Node],
    settings: Mapping[str, NodeSettings],
    now: dt.datetime,
) -> dict[str, RateOrReason]:
    """Return each replica's rate, or why no rate applies, by the replica's id.

    Replicas of undeclared models have no entry.
    """
    replicas: dict[str, list[Running]] = {}
    for each in stages:
        replicas.setdefault(each.id, []).append(each)
    found: dict[str, RateOrReason] = {}
    for replica, ranks in replicas.items():
        here = settings.get(ranks[0].node)
        model = here.serving.get(ranks[0].model) if here else None
        if model is None:
            continue
        found[replica] = result.measured_rate(
            known,
            ranks[0].model,
            subject_of(ranks, model, nodes, ranks).fingerprint,
            now,
            # Results for the default share only: 50 % of requests in time is not a service level.
            contract_from(model.objectives, Contract().share),
        )
    return found


def stored_rates(
    inventory_file: str,
    stages: Sequence[Running],
    nodes: Mapping[str, Node],
    settings: Mapping[str, NodeSettings],
) -> dict[str, RateOrReason]:
    """
    Return each replica's rate from the stored results of an inventory, or why no rate applies.

    The keys are the replicas' ids.

    A model that was never measured has no entry.
    """
    known = stored_results(inventory_file).measurements
    measured = {each.model for each in known}
    mine = [each for each in stages if each.model in measured]
    return replica_rates(known, mine, nodes, settings, dt.datetime.now(dt.UTC))


def measured_replicas(
    known: Sequence[Measurement],
    running: Iterable[Running],
    nodes: Mapping[str, Node],
    settings: Mapping[str, NodeSettings],
) -> tuple[MeasuredReplica, ...]:
    """Return the running replicas that have a stored result which applies to them.

    Prometheus' rules use these replicas.
    """
    running = tuple(running)
    first: dict[str, Running] = {}
    for each in sorted(running, key=lambda each: (each.model, each.replica, each.rank, each.node)):
        first.setdefault(each.id, each)
    # Rules do not depend on the age.
    rates = replica_rates(known, running, nodes, settings, dt.datetime.now(dt.UTC))
    return tuple(
        MeasuredReplica(
            each.model,
            replica,
            each.node,
            each.release,
            rate.requests_per_second,
            rate.when.astimezone(dt.UTC).date(),
        )
        for replica, each in first.items()
        if isinstance(rate := rates.get(replica, ""), MeasuredRate)
    )


def rates_for_rules(
    fleet: Fleet, answers: Mapping[str, Mapping[str, Any] | str]
) -> tuple[tuple[MeasuredReplica, ...], tuple[str, ...]]:
    """
    Return the measured rates that Prometheus' rules need, and remarks.

    `answers` are the probes of the fleet's nodes. Replicas on a node without an answer are left
    out.
    """
    there = stored_results(str(fleet.root / fleet.inventory))
    if not there.measurements:
        return (), there.problems
    documents, nodes = {}, {}
    for name, said in answers.items():
        if not isinstance(said, str):
            with suppress(FleetError):  # plans and checks report its problems
                nodes[name] = node_from_probe(name, said)
                documents[name] = said
    settings = {name: each.settings for name, each in fleet.gpu_nodes.items()}
    found = measured_replicas(there.measurements, running_stages(documents), nodes, settings)
    return found, there.problems


def plan_rates(
    known: Sequence[Measurement],
    found: Assessment,
    settings: Mapping[str, NodeSettings],
    now: dt.datetime,
) -> tuple[ModelRate, ...]:
    """Return the measured rates of a plan's replicas. Without measurements, the result is empty."""
    if not known:
        return ()
    planned = as_units(found.plan.stages, found.running, settings)
    of_plan = replica_rates(known, planned, found.nodes, settings, now)
    of_units = replica_rates(known, found.running, found.nodes, settings, now)
    alike: list[tuple[str, RateOrReason, RateOrReason | None, list[int]]] = []
    for stage in {each.id: each for each in planned}.values():
        both = (stage.model, of_plan[stage.id], of_units.get(stage.id))
        for *others, numbers in alike:
            if tuple(others) == both:
                numbers.append(stage.replica)
                break
        else:
            alike.append((*both, [stage.replica]))
    return tuple(
        ModelRate(model, tuple(numbers), planned_rate, running_rate)
        for model, planned_rate, running_rate, numbers in alike
    )


def as_units(
    stages: Iterable[Stage], running: Iterable[Running], settings: Mapping[str, NodeSettings]
) -> tuple[Running, ...]:
    """
    Return planned stages in the form in which a probe would report their units.

    If the lock file cannot be read, the unit's release is used, if it has the planned version.
    Otherwise the planned version alone is used as the release.
    """
    units = {(each.node, each.id): each.release for each in running}
    found = []
    for stage in stages:
        here = settings[stage.node]
        engine = here.engine_of(stage.model)
        try:
            release = release_of(engine).id
        except FleetError:
            release = units.get((stage.node, stage.id), "")
            if engine_version(release) != (engine.engine, engine.version):
                release = engine.version
        lines = argument_lines(stage, here.serving[stage.model], engine, release=release)
        found.append(
            Running(
                stage.model,
                stage.replica,
                stage.node,
                stage.gpu_uuids,
                stage.port,
                stage.node_rank,
                release,
                tuple(lines),
            )
        )
    return tuple(found)
