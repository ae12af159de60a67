"""
Find the problems of nodes: nodes that do not answer, failed checks, entries in kernel logs, and
cordons and upgrades that were not ended. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpufleet.checks.finding import Finding, Severity
from gpufleet.doctor.fleet_diagnosis import Impact, Problem
from gpufleet.doctor.observations import FleetObservations
from gpufleet.formatting import format_duration, node_ranges

MOST_EXAMPLES = 4
"""The most examples for one check. More nodes or GPUs would not help the reader."""


def node_problems(observed: FleetObservations, inventory: str) -> list[Problem]:
    """
    Return the problems of the nodes, without cordons and unfinished upgrades.

    A problem that stopped a replica is linked from the problem of that replica (`Problem.because`).
    """
    return [
        *_silent(observed),
        *(_check(subject, found, inventory) for subject, found in failed_checks(observed)),
        *_kernels(observed),
    ]


def _silent(observed: FleetObservations) -> Iterator[Problem]:
    for node, why in sorted(observed.status.silent.items()):
        yield Problem(
            node,
            f"{node} cannot be queried: {why}",
            Impact.RISK,
            do=f"`ssh {node}`; if the node does not answer, its BMC shows whether the node has "
            f"power",
            page="docs/alerts/node-down.md",
            names=(node,),
        )


def failed_checks(observed: FleetObservations) -> list[tuple[str, list[Finding]]]:
    """
    Return the findings in groups with the same check and severity, each group with its subject.
    """
    alike: dict[tuple[str, Severity], list[Finding]] = defaultdict(list)
    for each in observed.report.findings:
        known = each.accepted is None and each.cause is None and each.severity >= Severity.WARN
        # A node that does not answer is reported as a separate problem.
        if known and each.node not in observed.status.silent:
            alike[each.check, each.severity].append(each)
    return [
        (f"check {check} on {node_ranges(each.node for each in found)}", found)
        for (check, _), found in alike.items()
    ]


def _check(subject: str, found: Sequence[Finding], inventory: str) -> Problem:
    first = found[0]
    nodes = sorted({each.node for each in found})
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    steps = "\n".join(step.text for step in first.remedy)
    return Problem(
        subject,
        f"{_place(first)}: {first.found}{more}",
        Impact.RISK if first.severity.stops else Impact.NOTICE,
        tuple(f"{_place(each)}: {each.found}" for each in found[1 : 1 + MOST_EXAMPLES]),
        do=(steps or f"`gpufleet check INVENTORY --limit {nodes[0]}`").replace(
            "INVENTORY", inventory
        ),
        page=f"docs/checks/{first.check}.md",
        names=tuple(nodes),
    )


def _place(found: Finding) -> str:
    return found.node if found.gpu is None else f"{found.node} GPU {found.gpu.name}"


def kernel_subject(node: str) -> str:
    """Return the subject of the problems in a node's kernel log."""
    return f"kernel of {node}"


def _kernels(observed: FleetObservations) -> Iterator[Problem]:
    """Yield the problems of hosts that kernel logs show. The node's checks judge GPUs."""
    for node, causes in sorted(observed.kernels.items()):
        for each in causes:
            yield Problem(
                kernel_subject(node),
                f"{node}: {each.line}",
                Impact.RISK,
                (each.quote,),
                each.cause,
                each.do,
                at=each.at,
                names=(node,),
            )


def marks_of(observed: FleetObservations, now: float, inventory: str) -> Iterator[Problem]:
    """Yield the nodes that are cordoned, and the upgrades that have not ended."""
    for node, mark in observed.status.out.cordoned:
        yield Problem(
            f"{node} (cordon)",
            f"{node} was cordoned {format_duration(now - mark.since)} ago by {mark}",
            Impact.NOTICE,
            do=f"`gpufleet uncordon {inventory} {node}` when the node is healthy again",
            page="docs/operate/cordon-and-drain.md",
            at=mark.since,
            names=(node,),
        )
    for change in observed.status.out.changes:
        lock = change.lock
        yield Problem(
            f"upgrade {lock.id}",
            f"upgrade {lock.id} of {lock.owner} has not ended: {lock.what}",
            Impact.RISK,
            (
                f"the upgrade has locked {node_ranges(change.nodes)} for "
                f"{format_duration(now - lock.since)}",
            ),
            do=f"`gpufleet upgrade {inventory} --resume`, or `gpufleet rollback {inventory}`",
            page="docs/upgrade/upgrades.md",
            at=lock.since,
            names=change.nodes,
        )
