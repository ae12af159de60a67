"""
Run every check on every node. If a check has no result, it is reported as unknown and never left
out.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpufleet.catalog.checks import CHECKS
from gpufleet.checks import (
    driver,
    fabric_units,
    gpus,
    host,
    kernel_errors,
    kernel_log,
    memory,
    next_reboot,
    nvlink,
    outliers,
)
from gpufleet.checks.finding import Action, Finding, GpuId, Problem, Report, Severity, Step
from gpufleet.checks.probe_facts import CannotTell, DoesNotApply, GpuReading, Needs, Reading, Unread
from gpufleet.errors import answer_fault
from gpufleet.node.probe_document import document_problem
from gpufleet.settings.node_settings import Acceptance, NodeSettings

# Checks of the whole node that do not need an answer from the driver.
WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    **driver.WITHOUT_DRIVER,
    **kernel_log.WITHOUT_DRIVER,
    **kernel_errors.WITHOUT_DRIVER,
    **fabric_units.WITHOUT_DRIVER,
    **host.WITHOUT_DRIVER,
    **next_reboot.WITHOUT_DRIVER,
    **nvlink.WITHOUT_DRIVER,
    **outliers.WITHOUT_DRIVER,
}
# Checks of the whole node that query the driver.
OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    **driver.OF_NODE,
    **gpus.OF_NODE,
    **nvlink.OF_NODE,
}
# Checks that run for each GPU that answers the driver.
OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    **driver.OF_GPU,
    **gpus.OF_GPU,
    **memory.OF_GPU,
    **nvlink.OF_GPU,
    **outliers.OF_GPU,
}

# Exceptions that a check can raise if a broken GPU gives an invalid answer.
_NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# The number of siblings that each node is compared with. It is large enough to outvote a few
# different siblings, and small enough to judge 500 nodes in seconds (comparing all pairs of
# nodes took 240 s).
ASKED_SIBLINGS = 16


def evaluate(
    documents: Mapping[str, Mapping[str, Any] | str],
    settings: Mapping[str, NodeSettings],
    today: dt.date,
    needs: Mapping[str, Needs] | None = None,
    siblings: Mapping[str, tuple[str, ...]] | None = None,
    *,
    only: Collection[str] | None = None,
) -> Report:
    """
    Return every finding about every node, or only about the nodes in `only`.

    `documents` maps each node to the document of its probe, or to the reason why it has none. Nodes
    that are not in `settings` are judged with the default settings. `siblings` maps each node to
    the nodes that should be equal to it. Without `siblings`, all nodes are siblings of each other.
    `today` decides which acceptances of findings are still valid.
    """
    alone = {
        name: Reading(name, document, settings.get(name, NodeSettings()), today=today)
        for name, document in documents.items()
        if not isinstance(document, str) and document_problem(document) is None
    }
    holders = _holders(alone.values())
    findings: list[Finding] = []
    for name, document in sorted(documents.items()):
        if only is not None and name not in only:
            continue
        if name not in alone:
            findings.append(_accepted(_no_probe(name, document), settings.get(name), today))
            continue
        alike = siblings.get(name, ()) if siblings is not None else tuple(alone)
        node = replace(
            alone[name],
            needs=(needs or {}).get(name, Needs()),
            siblings=_nearest(alone[name], [alone[each] for each in alike if each in alone]),
            claimed=_claimed(alone[name], holders),
        )
        findings += _with_consequences(
            [_accepted(found, node.settings, today) for found in _of_node(node)]
        )
    facts = {name: reading.document for name, reading in alone.items()}
    return Report(tuple(findings), facts, tuple(sorted(documents)))


def _with_consequences(findings: Sequence[Finding]) -> Iterator[Finding]:
    """
    Yield the findings. If a check was skipped because of a different finding, and that finding is
    accepted, the skipped check is accepted too.
    """
    accepted = {
        (each.check, each.gpu and each.gpu.index): each.accepted
        for each in findings
        if each.accepted is not None
    }
    for each in findings:
        why = accepted.get((each.cause, each.gpu and each.gpu.index)) if each.cause else None
        yield replace(each, accepted=why) if why and each.accepted is None else each


def _nearest(node: Reading, alike: Sequence[Reading]) -> tuple[Reading, ...]:
    """
    Return up to `ASKED_SIBLINGS` other nodes with the same GPU model: those that follow in the
    order of names, which starts again at its end.

    So each node has its own siblings, and not every node is compared with the same few.
    """
    others = [each for each in alike if each.product == node.product]
    others.sort(key=lambda each: each.name)
    after = [each for each in others if each.name > node.name]
    before = [each for each in others if each.name < node.name]
    return tuple((after + before)[:ASKED_SIBLINGS])


def _holders(nodes: Iterable[Reading]) -> Mapping[str, list[str]]:
    """Return a dict that maps the UUID of each GPU to the nodes that report this GPU."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for gpu in node.gpus:
            if gpu.id.uuid and node.name not in found[gpu.id.uuid]:
                found[gpu.id.uuid].append(node.name)
    return found


def _claimed(node: Reading, holders: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    uuids = {gpu.id.uuid for gpu in node.gpus if gpu.id.uuid}
    return {
        uuid: tuple(sorted(set(holders[uuid]) - {node.name}))
        for uuid in uuids
        if len(holders[uuid]) > 1
    }


def _no_probe(name: str, document: Mapping[str, Any] | str) -> Finding:
    if isinstance(document, str):
        found, remedy = document, "ssh to the node; then check again"
    else:
        found, remedy = (
            f"its probe {document_problem(document)}",
            "probe the node again with this version",
        )
    return Finding(
        "probe",
        name,
        Severity.UNKNOWN,
        found,
        "an answer from the probe",
        "docs/reference/probe.md",
        (Step(Action.LOOK, remedy),),
    )


def _of_node(node: Reading) -> Iterator[Finding]:
    yield Finding("probe", node.name, Severity.OK, "the probe answered")
    for check, ask in WITHOUT_DRIVER.items():
        yield from _answers(check, node, partial(ask, node))
    if not node.driver_answers:
        for check in (*OF_NODE, *OF_GPU):
            yield _not_asked(check, node, "the driver does not answer", "driver-loaded")
        return
    for check, ask in OF_NODE.items():
        yield from _answers(check, node, partial(ask, node))
    for check, ask_gpu in OF_GPU.items():
        for gpu in node.gpus:
            yield from _answers(check, node, partial(ask_gpu, gpu), gpu.id)
        for absent in node.silent_gpus:
            yield _not_asked(check, node, "the GPU does not answer", "gpu-answers", absent)


def _answers(
    check: str,
    node: Reading,
    ask: Callable[[], Iterator[Problem]],
    gpu: GpuId | None = None,
) -> Iterator[Finding]:
    """
    Yield the findings of one check, or one finding with severity OK if the check found no problem.
    """
    problems = []
    try:
        for problem in ask():
            problems.append(problem)  # noqa: PERF402  # those before an exception count too
    except DoesNotApply as why:
        problems.append(Problem(Severity.OK, f"does not apply: {why}", "", ""))
    except CannotTell as why:
        problems.append(Problem(Severity.INFO, f"not checked: {why}", "", ""))
    except Unread as why:
        problems.append(_unknown(check, node, str(why)))
    except _NONSENSE as why:
        said = f"the probe's answer is invalid: {answer_fault(why)}"
        problems.append(_unknown(check, node, said))
    for problem in problems or [Problem(Severity.OK, "passed", "", "")]:
        about = gpu if problem.gpu is None else node.id_of(problem.gpu)
        yield Finding(
            check,
            node.name,
            problem.severity,
            problem.found,
            problem.expected,
            problem.source,
            problem.remedy,
            about,
        )


def _unknown(check: str, node: Reading, said: str) -> Problem:
    root = CHECKS[check].root
    if root and "no permission" in said and node.known("user", "uid") != 0:
        said = f"{said}: only root can read {root}"
    return Problem(
        Severity.UNKNOWN,
        said,
        "an answer",
        "docs/reference/probe.md",
        (
            Step(
                Action.LOOK,
                "find out why gpufleet cannot read this value, or accept this check by name "
                "(checks.accept)",
            ),
        ),
    )


def _not_asked(
    check: str, node: Reading, why: str, cause: str, gpu: GpuId | None = None
) -> Finding:
    found = f"not queried: {why}"
    return Finding(check, node.name, Severity.UNKNOWN, found, gpu=gpu, cause=cause)


def _accepted(found: Finding, settings: NodeSettings | None, today: dt.date) -> Finding:
    if found.severity <= Severity.INFO or settings is None:
        return found
    for acceptance in settings.checks.accept:
        if _covers(acceptance, found) and today <= acceptance.until:
            until = f"until {acceptance.until}"
            why = f"{acceptance.reason}, {until}" if acceptance.reason else until
            return Finding(**{**vars(found), "accepted": why})
    if ended := [each.until for each in settings.checks.accept if _covers(each, found)]:
        text = f"{found.found}; this finding was accepted until {max(ended)} (checks.accept)"
        return Finding(**{**vars(found), "found": text})
    return found


def _covers(acceptance: Acceptance, found: Finding) -> bool:
    return (
        acceptance.check == found.check
        and acceptance.node in {found.node, "*"}
        and acceptance.gpu in {None, found.gpu.index if found.gpu else None}
    )
