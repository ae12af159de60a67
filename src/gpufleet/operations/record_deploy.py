"""Record the results of a deploy on the node, and read the node's facts for the first time."""

from __future__ import annotations

import time
from collections.abc import Generator
from weakref import WeakKeyDictionary

from pyinfra import host, logger
from pyinfra.api import State, StringCommand, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.checks.finding import Report
from gpufleet.fleet import node_records, run
from gpufleet.fleet.assessment import check_nodes
from gpufleet.fleet.facts_timer import FACTS, SERVICE
from gpufleet.inventory import loader
from gpufleet.operations.converge import Converge, announce, probed_changes
from gpufleet.remote import payload
from gpufleet.remote.query import Answer, probe_all, query
from gpufleet.sanitize import printable

# The program writes two small files. Only connecting takes time.
RECORD_SECONDS = 20

_REPORTS: WeakKeyDictionary[State, Report] = WeakKeyDictionary()


@operation()
def read_facts(node: Converge) -> Generator[StringCommand]:
    """Read the facts of a node that has none yet. Later, a timer on the node reads them."""
    if node.snapshot().file(FACTS).exists:
        host.noop("the node has facts")
        return
    announce("collect the node's facts, because it has none yet")
    yield StringCommand("systemctl", "start", SERVICE)
    node.forget()


@operation()
def record_deploy(deploy: str) -> Generator[StringCommand]:
    """
    Record on the node that a deploy has ended, and what the check of the node has found.

    The record does not count as a change. Nodes with GPUs are checked by the probe at the start of
    the run. If the run has changed a node since then, the node is probed and checked again.
    """
    if ctx_state.get().is_executing:
        # An exception here would end the run for every node, although all changes are done.
        try:
            problems = _record(deploy)
        except Exception as error:  # noqa: BLE001
            problems = [f"the deploy could not be recorded: {type(error).__name__}: {error}"]
        for problem in problems:
            logger.warning("%s%s", ctx_host.get().print_prefix, printable(problem))
    host.noop("the record is written when a deploy ends")
    yield from ()


def _record(deploy: str) -> list[str]:
    """Write the record, and return the problems."""
    state, here = ctx_state.get(), ctx_host.get()
    files = {}
    if here.name in loader.current().gpu_nodes:
        report, answer = _report(state)
        at = node_records.probed_at(answer, time.time())
        files = {node_records.CHECK: node_records.check_record(report.node_findings[here.name], at)}
    program = payload.program("monitoring/record", files=files, deploy=deploy)
    answers = query(state, [here], lambda _: program, RECORD_SECONDS, "the record", short=True)
    return node_records.record_failures(answers, "its findings are")


def _report(state: State) -> tuple[Report, Answer]:
    """Return the present report on this node, and the probe on which the report is based."""
    here = ctx_host.get()
    answers = run.documents(state)
    declared = loader.current().gpu_nodes
    if probed_changes():
        answers = {**answers, **probe_all(state, [here])}
        return check_nodes(answers, declared, {here.name}), answers[here.name]
    if state not in _REPORTS:
        _REPORTS[state] = check_nodes(answers, declared)
    return _REPORTS[state], answers[here.name]
