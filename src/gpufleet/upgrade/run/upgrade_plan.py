"""Plan the waves of an upgrade or a rollback that an operator requested.  Border."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpufleet.errors import FleetError
from gpufleet.fleet.drift import NODE
from gpufleet.formatting import join_names
from gpufleet.inventory.loader import Fleet
from gpufleet.on_node.common.stage_units import stage_of
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.gates import gates
from gpufleet.upgrade.plan import handover_partners, spare_replica
from gpufleet.upgrade.plan.declare_version import Edit
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from gpufleet.upgrade.plan.wave import Group
from gpufleet.upgrade.plan.wave_plan import WavePlan, plan_waves
from gpufleet.upgrade.run import (
    api_key_change,
    observe,
    upgrade_state,
)
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.journal_entry import Entry
from gpufleet.upgrade.run.observe import FleetView
from gpufleet.upgrade.run.traffic import Frontends


@dataclass(frozen=True)
class UpgradeRequest:
    """The upgrade that an operator requested."""

    inventory: str
    declared: Fleet
    """The declared fleet, with `edits` applied."""
    rules: Upgrade
    by: str
    """user@host"""
    origin: str
    """The directory in which the command was typed."""
    limit: tuple[str, ...] = ()
    """Names of nodes; empty: all."""
    edits: tuple[Edit, ...] = ()
    steal: str | None = None
    accept_outage: tuple[str, ...] = ()
    accept_unknown_load: tuple[str, ...] = ()
    of: str | None = None
    """For a rollback: the upgrade whose kept units are restored."""


def plan_now(
    nodes: Nodes, wanted: UpgradeRequest, before: Sequence[Sequence[Entry]]
) -> tuple[FleetView, WavePlan]:
    """Probe the fleet, and return its state and the waves that it needs. Changes nothing."""
    below = changes_below_vllm(wanted)
    found = observe.view_fleet(nodes, wanted.declared, below=below)
    settings = {name: each.settings for name, each in wanted.declared.gpu_nodes.items()}
    differs = _limit(found.groups(settings), wanted.limit)
    if not differs:
        return found, plan_waves((), (), wanted.rules)
    front = Frontends(nodes, wanted.declared)
    if problems := api_key_change.find_problems(nodes, front, differs, settings):
        raise FleetError(*problems)
    loads = _loads(nodes, wanted, found)
    alone = (
        *spare_replica.remarks(
            differs, found.found, found.documents, wanted.declared.gpu_nodes, before
        ),
        *handover_partners.remarks(differs, settings),
    )
    try:
        plan = plan_waves(
            differs,
            loads,
            wanted.rules,
            cordoned=found.cordoned,
            journals=before,
            accept_outage=wanted.accept_outage,
            accept_unknown_load=wanted.accept_unknown_load,
        )
    except FleetError as error:
        raise FleetError(*error.problems, *alone) from None
    plan = replace(plan, remarks=(*plan.remarks, *alone))
    drained = {replica for look in found.looks.values() for replica in look.drained}
    judged = {r for each in differs for r in each.replicas if r not in {*each.comes, *each.goes}}
    silent = {
        each.replica: each.unknown
        for each in loads
        if each.unknown and each.replica in judged - drained
    }
    plan = replace(plan, remarks=(*plan.remarks, *gates.silent_replicas(silent)))
    come = {replica for each in differs for replica in each.comes}
    if come and front.is_declared() and not front.gateways:
        said = (
            f"new: {join_names(come)}. Add each new replica to your load balancer before the "
            "replica serves, because the waves rely on its capacity from then on"
        )
        plan = replace(plan, remarks=(*plan.remarks, said))
    if not front.is_declared():
        said = (
            "no node has `gateway`, and `balancer` is not set, so requests to a replica "
            "fail while the replica changes"
        )
        plan = replace(plan, remarks=(*plan.remarks, said))
    return found, plan


def rollback_waves(
    nodes: Nodes,
    wanted: UpgradeRequest,
    found: FleetView,
    of: str,
    before: Sequence[Sequence[Entry]] = (),
) -> WavePlan:
    """Return the waves that restore every unit that upgrade `of` has replaced."""
    told = next((e for e in before if e and upgrade_state.fold(e).id == of), ())
    groups = [each.group for each in upgrade_state.fold(told).groups.values()] or _kept_groups(
        found, of
    )
    differs = tuple(
        Group(
            each.id,
            "stages",
            each.nodes,
            each.replicas,
            (f"back to the state before {of}",),
            # What came goes, and what went comes.
            comes=each.goes,
            goes=each.comes,
        )
        for each in groups
        if _has_kept(each, found, of)
    )
    if not differs:
        return plan_waves((), (), wanted.rules)
    loads = _loads(nodes, wanted, found)
    return plan_waves(
        differs,
        loads,
        wanted.rules,
        cordoned=found.cordoned,
        journals=before,
        accept_outage=wanted.accept_outage,
        accept_unknown_load=wanted.accept_unknown_load,
    )


def _loads(nodes: Nodes, wanted: UpgradeRequest, found: FleetView) -> tuple[ReplicaLoad, ...]:
    settings = {name: each.settings for name, each in wanted.declared.gpu_nodes.items()}
    return observe.loads(
        nodes,
        found.found.running,
        found.found.nodes,
        settings,
        found.looks,
        inventory=wanted.inventory,
    )


def last_kept(found: FleetView) -> str | None:
    """
    Return the id of the upgrade with the newest kept units on any node; None: nothing is kept.
    """
    every = {(kept.at, name) for each in found.looks.values() for name, kept in each.kept.items()}
    return max(every)[1] if every else None


def _kept_groups(found: FleetView, of: str) -> list[Group]:
    """Return a group for each replica kept for upgrade `of`, if no journal has its groups."""
    nodes: dict[str, set[str]] = {}
    for name, each in found.looks.items():
        for unit in each.kept[of].units if of in each.kept else ():
            nodes.setdefault(stage_of(unit), set()).add(name)
    return [Group(each, "stages", tuple(sorted(at)), (each,)) for each, at in nodes.items()]


def _has_kept(group: Group, found: FleetView, of: str) -> bool:
    """Return whether a kept unit of a group differs from the running one."""
    for name in group.nodes:
        kept = found.looks[name].kept.get(of) if name in found.looks else None
        for unit, fingerprint in (kept.units if kept else {}).items():
            if stage_of(unit) not in group.replicas:
                continue
            seen = found.looks[name].units.get(unit)
            if (seen is not None) != (fingerprint is not None):
                return True
            if seen and not seen.is_running_with(fingerprint):
                return True
    return False


def changes_below_vllm(wanted: UpgradeRequest) -> dict[str, str]:
    """
    Return the changes that deploys/node.py would make, by node; nodes without a lock are skipped.

    Raises `FleetError` with the reasons for a refused deploy, and for failed comparisons.
    """
    locked = [n for n, each in wanted.declared.gpu_nodes.items() if each.settings.gpu_lock]
    if not locked:
        return {}
    from gpufleet.fleet.dry_run import dry_run

    seen = dry_run(wanted.inventory, dict.fromkeys(locked, (NODE,)), tuple(locked))
    problems = [
        *seen.refused,
        *(f"{n}: {u.source}: {u.why}" for n, each in seen.nodes.items() for u in each.unread),
    ]
    if problems:
        raise FleetError(*problems)
    return {
        name: "; ".join(dict.fromkeys(m.what for m in each.moved))
        for name, each in seen.nodes.items()
        if each.moved
    }


def _limit(found: Sequence[Group], limit: Sequence[str]) -> tuple[Group, ...]:
    """
    Return the groups on these nodes. Raises `FleetError` for groups that also span other nodes.
    """
    if not limit:
        return tuple(found)
    here = [each for each in found if set(each.nodes) & set(limit)]
    if halves := [each for each in here if not set(each.nodes) <= set(limit)]:
        raise FleetError(
            *(
                f"--limit: {each.id} changes on {join_names(each.nodes)} at the same time: "
                "include all of these nodes in --limit, or none of them"
                for each in halves
            )
        )
    return tuple(here)
