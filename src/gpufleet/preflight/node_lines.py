"""Report on the driver, the release and the checks of nodes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpufleet.checks.driver import loaded_version
from gpufleet.checks.finding import Finding, Report, Severity, worst_first
from gpufleet.checks.probe_facts import Reading
from gpufleet.fleet.drift import NodeDrift
from gpufleet.formatting import count_of, join_names
from gpufleet.planning.stage import Running
from gpufleet.preflight.line import Line, Status, Verdict, by_node, unknown
from gpufleet.remote.query import Answer
from gpufleet.settings.node_settings import NodeSettings

_LOCK = "gpu_lock.driver"
"""
The `source` that `fleet/drift.py` writes into findings about a driver that differs from the lock.
"""
NAMED = 3
"""The most findings of a node that a line shows. `gpufleet check` shows all."""


def driver_lines(
    answers: Mapping[str, Answer],
    drift: Mapping[str, NodeDrift],
    settings: Mapping[str, NodeSettings],
    inventory: str,
) -> tuple[Line, ...]:
    """
    Return lines on whether each node's driver has the version in the node's lock.

    `answers` are the probes of the nodes, and `drift` is the result of `drift_from_probes`.
    """
    return by_node(
        "driver",
        {
            node: _driver(node, answer, drift.get(node, NodeDrift()), settings[node], inventory)
            for node, answer in answers.items()
        },
    )


def _driver(
    node: str, answer: Answer, drift: NodeDrift, settings: NodeSettings, inventory: str
) -> Verdict:
    if isinstance(answer, str):
        return Verdict(
            Status.UNKNOWN, "could not be checked", answer, f"gpufleet probe {inventory}"
        )
    loaded = loaded_version(Reading(node, answer))
    said = f"driver {loaded} is loaded" if loaded else "no driver is loaded"
    if settings.gpu_lock is None:
        what = "has no lock, so any update may install a different driver"
        remedy = f"gpufleet lock {inventory} --group GROUP"
        return Verdict(Status.WARN, what, f"{said}; `gpu_lock` is not set", remedy)
    wanted = settings.gpu_lock.driver
    if moved := [each for each in drift.moved if each.source == _LOCK]:
        proof = "; ".join(each.what for each in moved)
        return Verdict(
            Status.FAIL, "differs from the lock", proof, f"gpufleet deploy node {inventory}"
        )
    if loaded is None:
        proof = f"{said}; the lock has {wanted}"
        return Verdict(Status.FAIL, "is not loaded", proof, f"gpufleet deploy node {inventory}")
    return Verdict(Status.OK, "has the version of the lock", f"{said}, the lock has {wanted}")


def release_lines(
    running: Iterable[Running], wanted: Mapping[str, str], inventory: str
) -> tuple[Line, ...]:
    """
    Return lines on whether replicas run the declared release.

    `wanted` maps nodes to the id of their declared release. Nodes without a declared release are
    not in it.
    """
    here: dict[str, set[str]] = defaultdict(set)
    for each in running:
        here[each.node].add(each.release)
    found = {}
    for node, release in wanted.items():
        names = sorted(name for name in here.get(node, ()) if name)
        if not here.get(node):
            found[node] = Verdict(
                Status.UNKNOWN, "could not be checked", f"no replica runs on the node; {release} "
                f"is declared",
                f"gpufleet deploy vllm {inventory}",
            )  # fmt: skip
        elif "" in here[node]:
            found[node] = Verdict(
                Status.UNKNOWN, "could not be checked", "a unit does not contain the name of a "
                "release",
                f"gpufleet drift {inventory}",
            )  # fmt: skip
        elif names != [release]:
            found[node] = Verdict(
                Status.FAIL, "differs from the declared release",
                f"runs {join_names(names)}; {release} is declared",
                f"gpufleet upgrade {inventory}",
            )  # fmt: skip
        else:
            found[node] = Verdict(
                Status.OK, "is the declared release", f"all replicas run {release}"
            )
    if not found:
        return (unknown("release", "no node has `vllm`", f"gpufleet validate {inventory}"),)
    return by_node("release", found)


_STATUS = {
    Severity.OK: Status.OK,
    Severity.INFO: Status.OK,
    Severity.WARN: Status.WARN,
    Severity.UNKNOWN: Status.UNKNOWN,
    Severity.BLOCK: Status.FAIL,
}


def check_lines(report: Report, answers: Mapping[str, Any], inventory: str) -> tuple[Line, ...]:
    """
    Return lines with the verdict of the checks on each node. A node without an answer is FAIL.
    """
    found = {}
    for node, answer in answers.items():
        if isinstance(answer, str):
            remedy = f"gpufleet probe {inventory} --limit {node}"
            found[node] = Verdict(Status.FAIL, "does not answer", answer, remedy)
        else:
            found[node] = _checked(report.node_findings[node], report.verdict(node), inventory)
    return by_node("node-checks", found)


def _checked(findings: tuple[Finding, ...], verdict: Severity, inventory: str) -> Verdict:
    status = _STATUS[verdict]
    accepted = [each for each in findings if each.accepted is not None]
    also = f"; accepted: {join_names(sorted({e.check for e in accepted}))}" if accepted else ""
    if status is Status.OK:
        checks = len({each.check for each in findings})
        return Verdict(status, "passes its checks", f"{count_of(checks, 'check')} passed{also}")
    worst = [
        each
        for each in worst_first(findings)
        if each.accepted is None and each.severity is verdict and each.cause is None
    ]
    said = "; ".join(dict.fromkeys(f"{each.check}: {each.found}" for each in worst[:NAMED]))
    more = f"; and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
    remedy = next((each.remedy[0].text for each in worst if each.remedy), "")
    return Verdict(
        status,
        {
            Status.WARN: "has warnings",
            Status.UNKNOWN: "could not be checked",
            Status.FAIL: "is not fit to serve",
        }[status],
        f"{said}{more}{also}",
        remedy.replace("INVENTORY", inventory) or f"gpufleet check {inventory}",
    )


def silent_nodes(answers: Mapping[str, Answer]) -> dict[str, str]:
    """Return the nodes without an answer, each with the reason."""
    return dict(_silent(answers))


def _silent(answers: Mapping[str, Answer]) -> Iterator[tuple[str, str]]:
    for node, answer in answers.items():
        if isinstance(answer, str):
            yield node, answer
