"""Plan or refuse an upgrade's waves, and describe the plan before the upgrade begins. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.formatting import format_duration
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan import capacity
from gpufleet.upgrade.plan.capacity import RemainingCapacity
from gpufleet.upgrade.plan.change_groups import without_cordoned
from gpufleet.upgrade.plan.duration import Entry, Estimate, estimate, load_seconds
from gpufleet.upgrade.plan.replica_load import ReplicaLoad, remarks
from gpufleet.upgrade.plan.required_replicas import Need, required_replicas
from gpufleet.upgrade.plan.wave import Group, Wave
from gpufleet.upgrade.plan.waves import waves

SCHEMA = 1
"""Version of `WavePlan.as_json()`; increased when a key changes its meaning or is removed."""


@dataclass(frozen=True)
class WavePlan:
    """The waves in order, and the capacity that each leaves."""

    waves: tuple[Wave, ...]
    needs: Mapping[str, Need]
    """The need of each model, from the load at the time of planning."""
    left: tuple[RemainingCapacity, ...]
    estimates: tuple[Estimate, ...]
    """Estimates of the waves, in order."""
    left_out: tuple[Group, ...] = ()
    """Groups left unchanged because a person has cordoned them."""
    remarks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Return the duration of all waves in seconds; None: the duration of a wave is unknown."""
        known = [each.seconds for each in self.estimates if each.seconds is not None]
        return sum(known) if len(known) == len(self.estimates) else None

    @property
    def total(self) -> Estimate:
        """Return the estimated duration of all waves together."""
        return Estimate(0, self.seconds, any(each.at_least for each in self.estimates))

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "waves": [
                {
                    "number": wave.number,
                    "canary": wave.canary,
                    "nodes": list(wave.nodes),
                    "groups": [group.as_json() for group in wave.groups],
                    "left": [each.as_json() for each in self.left if each.wave == wave.number],
                    "seconds": expected.seconds,
                    "at_least": expected.at_least,
                }
                for wave, expected in zip(self.waves, self.estimates, strict=True)
            ],
            "needs": {model: need.as_json() for model, need in self.needs.items()},
            "left_out": [group.as_json() for group in self.left_out],
            "seconds": self.seconds,
            "remarks": list(self.remarks),
        }


def plan_waves(
    groups: Iterable[Group],
    loads: Sequence[ReplicaLoad],
    settings: Upgrade,
    *,
    cordoned: Mapping[str, str] | None = None,
    journals: Iterable[Sequence[Entry]] = (),
    starts: Mapping[str, float] | None = None,
    accept_outage: Collection[str] = (),
    accept_unknown_load: Collection[str] = (),
) -> WavePlan:
    """
    Return the waves in which all groups are changed.

    `cordoned` has the nodes that people have cordoned, with their reasons. `journals` are the
    journals of earlier upgrades, the oldest first. `starts` has the replicas' start times in
    seconds. `accept_outage` and `accept_unknown_load` are the models that the operator named in
    these options.

    Raises `FleetError` with a sentence for each model that would lose more than its load allows, or
    whose load is unknown.
    """
    before = tuple(journals)
    on, off, said = without_cordoned(groups, cordoned or {})
    made = waves(on, settings, loads, accept_outage)
    loading = load_seconds(before)
    problems = [
        *_not_served(accept_outage, loads, capacity.ACCEPT_OUTAGE),
        *_not_served(accept_unknown_load, loads, capacity.ACCEPT_UNKNOWN_LOAD),
        *capacity.refusals(
            made,
            loads,
            settings,
            accept_outage=accept_outage,
            accept_unknown_load=accept_unknown_load,
            load_seconds=loading,
        ),
    ]
    if problems:
        raise FleetError(*problems)
    left = capacity.remaining_capacity(made, loads, settings, accept_outage)
    models = {model for group in on for model in group.models}
    return WavePlan(
        waves=made,
        needs={
            model: need
            for model, need in required_replicas(loads, settings.headroom, settings.keep).items()
            if model in models
        },
        left=left,
        estimates=estimate(made, before, starts, settings.gates.soak_seconds),
        left_out=off,
        remarks=(
            *said,
            *_accepted(left, loading),
            *(
                f"{model}: {'; '.join(need.unknown)}: a replica of unknown load counts as full, as "
                "you accepted"
                for model, need in required_replicas(
                    loads, settings.headroom, settings.keep
                ).items()
                if need.unknown and model in models
            ),
            *remarks(each for each in loads if each.model in models),
        ),
    )


def _not_served(accepted: Iterable[str], loads: Sequence[ReplicaLoad], option: str) -> list[str]:
    models = sorted({each.model for each in loads})
    return [
        f"{option} {name}: no replica of this model runs; models with running replicas: "
        f"{', '.join(models) or 'none'}"
        for name in sorted({*accepted} - {*models})
    ]


def _accepted(left: Iterable[RemainingCapacity], loading: Mapping[str, float]) -> list[str]:
    """Return a sentence on the cost of each accepted outage, by wave and model."""
    said = []
    for each in left:
        if each.enough:
            continue
        seconds = loading.get(each.model)
        cost = (
            f"{format_duration(seconds)} the last time"
            if seconds is not None
            else "for an unknown time"
        )
        what = (
            f"{each.model} does not answer while it loads ({cost})"
            if not each.left
            else f"the load of {each.model} needs {each.needed} replicas, but only {each.left} "
            "still serve"
        )
        said.append(f"wave {each.wave}: {what}. You accepted this with {capacity.ACCEPT_OUTAGE}")
    return said
