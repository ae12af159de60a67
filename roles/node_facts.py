"""Our own facts of a node, every minute, in the node exporter's textfile directory."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from weakref import WeakKeyDictionary

from pyinfra import host, logger
from pyinfra.api import State, StringCommand, deploy, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.artifacts.operator_files import release_of
from gpufleet.checks.finding import Report
from gpufleet.converge.desired import UNIT_DIRECTORY, Directory, File, Unit, Wanted
from gpufleet.errors import FleetError
from gpufleet.fleet import node_records, run
from gpufleet.fleet.assessment import judged
from gpufleet.inventory import loader
from gpufleet.on_node.common.textfile import DIRECTORY
from gpufleet.on_node.monitoring.node_facts import DECLARED, FILE
from gpufleet.on_node.monitoring.record import DEPLOYS
from gpufleet.operations.converge import Converge, probed_changes
from gpufleet.operations.wait_ready import Metrics
from gpufleet.remote import payload
from gpufleet.remote.query import Answer, ask, survey
from gpufleet.sanitize import printable
from gpufleet.settings.node_settings import NodeExporter, NodeSettings
from gpufleet.templates import read_template

SERVICE, TIMER = "gpufleet-facts.service", "gpufleet-facts.timer"
UNITS = (SERVICE, TIMER)
PROGRAM = "/usr/local/libexec/gpufleet/node-facts"
FACTS = f"{DIRECTORY}/{FILE}"
# There whatever else could not be read.
FAMILIES = ("gpufleet_facts_failed", "gpufleet_facts_timestamp_seconds")
# The program's own deadlines end it within TimeoutStartSec= of the unit.
START_SECONDS = 60
# Two small files; connecting is what may take time.
RECORD_SECONDS = 20

_REPORTS: WeakKeyDictionary[State, Report] = WeakKeyDictionary()


@deploy("node facts")
def node_facts(settings: NodeSettings) -> None:
    """
    Converge the program, its timer and what the node is told of itself; have facts there.

    For every node of the fleet: one without GPUs has no facts of any.
    """
    told = wanted(settings, gpus() if settings.gpu_node else None)
    node = Converge(told, watch=(FACTS,), probed=False)
    node.files(name="program, units and declaration")
    node.units(name="timer")
    first(node, name="facts are there", _timeout=START_SECONDS)


def wanted(settings: NodeSettings, gpus: int | None) -> Wanted:
    """Return what a node needs to have facts; `gpus` are those on its PCI bus."""
    told = node_records.declaration(settings, gpus=gpus, release=release(settings))
    return Wanted(
        # The exporter, which is not root, goes through it; what is secret in it is root's own.
        Directory("/var/lib/gpufleet"),
        Directory(DIRECTORY),
        Directory(DEPLOYS),
        Directory("/etc/gpufleet"),
        File(DECLARED, told),
        # What the run's own programs are compiled to, so that the next run need not.
        Directory(payload.CODE.rpartition("/")[0]),
        Directory(payload.CODE, mode=0o700),
        Directory("/usr/local/libexec/gpufleet", mode=0o755),
        File(PROGRAM, payload.archive("monitoring/node_facts", nvml=True), mode=0o755),
        *(File(f"{UNIT_DIRECTORY}/{each}", read_template(each).encode()) for each in UNITS),
        Unit(TIMER),
    )


def release(settings: NodeSettings) -> str | None:
    """Return the id of the release that the node is to serve; None: of none that can be told."""
    if settings.vllm is None or not settings.gpu_node:
        return None
    try:
        return release_of(settings.vllm).id
    except FleetError:
        return None  # whoever installs it says what is wrong with its lock


def gpus() -> int | None:
    """Return how many GPUs are on this node's PCI bus, driver or not; None: it is unknown."""
    answer = run.documents(ctx_state.get())[host.name]
    return None if isinstance(answer, str) else node_records.gpus_on_bus(answer)


def served(exporter: Metrics, wanted: NodeExporter) -> Metrics:
    """Return what the node exporter must serve: of ours, too, unless it is not to read files."""
    if "textfile" in wanted.without:
        return exporter
    return replace(exporter, families=(*exporter.families, *FAMILIES))


@operation()
def first(node: Converge) -> Generator[StringCommand]:
    """Have the facts of a node that has none read now; later its timer does."""
    if node.snapshot().file(FACTS).exists:
        host.noop("the node has facts")
        return
    would = "" if ctx_state.get().is_executing else "would "
    logger.info("%s%sread the node's facts: there are none", host.print_prefix, would)
    yield StringCommand("systemctl", "start", SERVICE)
    node.forget()


@operation()
def recorded(deploy: str) -> Generator[StringCommand]:
    """
    Write down on the node that a deploy came to its end, and what the check found. No change of it.

    For nodes with GPUs it is the check of the probe that the run began with; one of a node that the
    run has changed since is made anew.
    """
    if ctx_state.get().is_executing:
        # What is raised here would end the run for every node, of which all is done already.
        try:
            problems = _record(deploy)
        except Exception as error:  # noqa: BLE001
            problems = [f"what was found is not recorded: {type(error).__name__}: {error}"]
        for problem in problems:
            logger.warning("%s%s", ctx_host.get().print_prefix, printable(problem))
    host.noop("what was found is written down when a deploy ends")
    yield from ()


def _record(deploy: str) -> list[str]:
    """Write it down; return what went wrong."""
    state, here = ctx_state.get(), ctx_host.get()
    files = {}
    if here.name in loader.current().gpu_nodes:
        report, answer = _report(state)
        at = node_records.probed_at(answer, time.time())
        files = {node_records.CHECK: node_records.of_check(report.of_nodes[here.name], at)}
    program = payload.program("monitoring/record", files=files, deploy=deploy)
    answers = ask(state, [here], lambda _: program, RECORD_SECONDS, "the record", short=True)
    return node_records.unrecorded(answers, "what was found is")


def _report(state: State) -> tuple[Report, Answer]:
    """Return what is known of this node now: the fleet's report, and the probe behind it."""
    here = ctx_host.get()
    answers = run.documents(state)
    declared = loader.current().gpu_nodes
    if probed_changes():
        answers = {**answers, **survey(state, [here])}
        return judged(answers, declared, {here.name}), answers[here.name]
    if state not in _REPORTS:
        _REPORTS[state] = judged(answers, declared)
    return _REPORTS[state], answers[here.name]
