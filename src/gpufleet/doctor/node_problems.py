"""What is wrong with nodes: silence, failed checks, the kernel's log, marks that remain.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpufleet.checks.finding import Finding, Severity
from gpufleet.doctor.fleet_diagnosis import Impact, Problem, span
from gpufleet.doctor.sights import Sights
from gpufleet.formatting import node_ranges

MOST_EXAMPLES = 4
"""Of one check: more nodes or GPUs say no more."""


def node_problems(sights: Sights, inventory: str) -> list[Problem]:
    """Return what is wrong with nodes, but for marks."""
    return [*_silent(sights), *_checks(sights, inventory), *_kernels(sights)]


def _silent(sights: Sights) -> Iterator[Problem]:
    for node, why in sorted(sights.status.silent.items()):
        # Replicas that are missing may be there.
        hurts = sights.ranks_on(node) or sights.status.missing
        yield Problem(
            node,
            f"{node} cannot be asked: {why}",
            Impact.DEGRADED if hurts else Impact.RISK,
            do=f"`ssh {node}`; if it does not answer, its BMC says whether it has power",
            page="docs/alerts/node-down.md",
            nodes=(node,),
        )


def _checks(sights: Sights, inventory: str) -> Iterator[Problem]:
    """Yield a problem for each check that nodes fail, those of one check and verdict together."""
    alike: dict[tuple[str, Severity], list[Finding]] = defaultdict(list)
    for each in sights.report.findings:
        known = each.accepted is None and each.cause is None and each.severity >= Severity.WARN
        # A node that does not answer is named as such.
        if known and each.node not in sights.status.silent:
            alike[each.check, each.severity].append(each)
    unfit = {each.node for found in alike.values() for each in found if each.stops}
    hurt = {
        rank.node
        for replica in sights.status.replicas
        for rank in replica.ranks
        if not rank.health.good
    }
    for (check, severity), found in alike.items():
        nodes = sorted({each.node for each in found})
        first = found[0]
        impact = Impact.NOTICE
        if severity.stops:
            impact = Impact.DEGRADED if hurt & unfit & set(nodes) else Impact.RISK
        more = len(found) - 1
        where = first.node if first.gpu is None else f"{first.node} GPU {first.gpu.name}"
        steps = "\n".join(step.text for step in first.remedy)
        yield Problem(
            f"check {check} on {node_ranges(nodes)}",
            f"{where}: {first.found}" + (f" (and {more} more)" if more else ""),
            impact,
            tuple(
                f"{each.node}{'' if each.gpu is None else f' GPU {each.gpu.name}'}: {each.found}"
                for each in found[1 : 1 + MOST_EXAMPLES]
            ),
            do=(steps or f"`gpufleet check INVENTORY --limit {nodes[0]}`").replace(
                "INVENTORY", inventory
            ),
            page=f"docs/checks/{check}.md",
            nodes=tuple(nodes),
        )


def _kernels(sights: Sights) -> Iterator[Problem]:
    """Yield what the kernels' logs have about hosts; GPUs are the node check's."""
    for node, causes in sorted(sights.kernels.items()):
        for each in causes:
            hurt = any(not rank.health.good for rank in sights.ranks_on(node))
            yield Problem(
                f"kernel of {node}",
                f"{node}: {each.what}",
                Impact.DEGRADED if hurt else Impact.RISK,
                (each.quote,),
                each.cause,
                each.do,
                each.page,
                each.at,
                (node,),
            )


def marks_of(sights: Sights, now: float, inventory: str) -> Iterator[Problem]:
    """Yield cordons, and upgrades that have not ended."""
    for node, mark in sights.status.out.cordoned:
        yield Problem(
            f"{node} (cordon)",
            f"{node} was cordoned {span(now - mark.since)} ago by {mark}",
            Impact.NOTICE,
            do=f"`gpufleet uncordon {inventory} {node}` once it is well",
            page="docs/operate/cordon-and-drain.md",
            at=mark.since,
            nodes=(node,),
        )
    for change in sights.status.out.changes:
        yield Problem(
            f"upgrade {change.lock.id}",
            f"upgrade {change.lock.id} of {change.lock.owner} has not ended: {change.lock.what}",
            Impact.RISK,
            (f"it holds {node_ranges(change.nodes)} since {span(now - change.lock.since)}",),
            do=f"`gpufleet upgrade {inventory} --resume`, or `gpufleet rollback {inventory}`",
            page="docs/upgrade/upgrades.md",
            at=change.lock.since,
            nodes=change.nodes,
        )
