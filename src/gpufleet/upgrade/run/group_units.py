"""Find a group's units and replicas on a node, from the node's own report. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpufleet.on_node.common.stage_units import stage_of, unit_of
from gpufleet.upgrade.plan.wave import Group
from gpufleet.upgrade.run.node_answers import NodeLook


def units_on(group: Group, looks: Mapping[str, NodeLook]) -> dict[str, list[str]]:
    """Return the group's former and new units on each of its nodes."""
    found = {}
    for name, each in looks.items():
        there = {*each.next.units, *each.next.remove} if each.next else set(each.units)
        found[name] = sorted(unit_names(group) & there)
    return found


def expected_units(
    group: Group, looks: Mapping[str, NodeLook], kept: str, *, old: bool
) -> dict[str, list[str]]:
    """Return the group's units that must run now, by node."""
    found = {}
    for name, each in looks.items():
        if old:
            before = each.kept[kept].units if kept in each.kept else {}
            there = {unit for unit, fingerprint in before.items() if fingerprint is not None}
            # Not switched yet, so nothing is kept: the running units are the former ones.
            there |= set(each.units) - set(before)
        else:
            there = set(each.next.units) if each.next else set(each.units)
        found[name] = sorted(unit_names(group) & there)
    return found


def replicas_on(group: Group, looks: Mapping[str, NodeLook]) -> dict[str, tuple[str, ...]]:
    named = {name: {*map(stage_of, each)} for name, each in units_on(group, looks).items()}
    return {name: tuple(sorted(each)) for name, each in named.items()}


def marked_on(
    group: Group, looks: Mapping[str, NodeLook], upgrade: str
) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(
            replica
            for replica, mark in sorted(each.drained.items())
            if replica in group.replicas and mark.upgrade == upgrade
        )
        for name, each in looks.items()
    }


def unit_names(group: Group) -> set[str]:
    return {*map(unit_of, group.replicas)}


def is_out_of_service(look: NodeLook, unit: str) -> bool:
    """Return whether a person has cordoned the node, or drained the unit's replica."""
    marks = [look.cordon, look.drained.get(stage_of(unit))]
    return any(mark is not None and mark.upgrade is None for mark in marks)


def cordoned_by_people(looks: Mapping[str, NodeLook]) -> list[str]:
    """Return a sentence for each node that a person has cordoned."""
    return [
        f"{name} was cordoned by {look.cordon}, so gpufleet does not stop its units. When that "
        f"work is done, run `gpufleet uncordon INVENTORY {name}`"
        for name, look in sorted(looks.items())
        if look.cordon and look.cordon.upgrade is None
    ]
