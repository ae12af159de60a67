"""Run `gpufleet preflight` once: query nodes and gateways, and turn the answers into lines.

Border: the module queries nodes over SSH and gateways over HTTP, and reads git and the project's
files. Every wait has a deadline, so a round of questions ends in time even if a node hangs.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import click
import gevent

from gpufleet.cli.bounded_questions import Timed, ask_bounded
from gpufleet.cli.common_options import operator_name
from gpufleet.cli.preflight_requests import (
    RefusedWork,
    UnfinishedWork,
    ask_gateways,
    git_state,
    read_questions,
    run_bounded,
    secret_files,
)
from gpufleet.errors import FleetError
from gpufleet.fleet import assessment, drift, fleet_plan, inventory_check
from gpufleet.fleet.inventory_check import Validation
from gpufleet.formatting import count_of, node_ranges
from gpufleet.inventory.loader import read
from gpufleet.load_test import result
from gpufleet.load_test.level_runs import read_key
from gpufleet.load_test.subjects import measurements_folder
from gpufleet.node.topology import Node, node_from_probe
from gpufleet.planning.stage import Running, Stage
from gpufleet.preflight import (
    alert_lines,
    gateway_lines,
    network_lines,
    node_lines,
    objective_lines,
    plan_lines,
    rehearsal_lines,
    service_lines,
    storage_lines,
    tls_lines,
)
from gpufleet.preflight.alert_lines import Receipt
from gpufleet.preflight.line import Line, Preflight, order_lines, unknown
from gpufleet.preflight.network_lines import ClockReading
from gpufleet.remote import payload
from gpufleet.remote.query import Answer
from gpufleet.serving.status import fleet_status
from gpufleet.upgrade.plan.policy import fleet_policy
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from gpufleet.upgrade.run import node_questions, observe, upgrade_journal
from gpufleet.upgrade.run.connections import Nodes, open_nodes
from gpufleet.upgrade.run.journal_entry import Entry
from gpufleet.upgrade.run.node_answers import NodeLook
from gpufleet.upgrade.run.node_questions import NodeQuestion

WHOLE_SECONDS = 55.0
"""Time limit in seconds for all rounds together. With it, a run takes less than a minute."""
PROBE_SECONDS, LOOK_SECONDS, LOAD_SECONDS = 20.0, 20.0, 10.0
"""Time limits in seconds for the rounds of questions."""
PLAN_SECONDS = 8.0
"""Time limit in seconds for the plan. It may query the Hub about models that no node has."""


SILENT = "the node did not answer: see the line of the node in node-checks"
"""
The text that other checks show for a node that did not answer.

It is the same for all such nodes, so that a check lists all of them in one line.
"""


@dataclass(frozen=True)
class PreflightOptions:
    """The parsed command line."""

    key_file: str | None = None
    ca_file: str | None = None
    test_alert: bool = False
    interactive: bool = False
    """Whether the command can ask the operator if the test alert has arrived."""


class Session:
    """One run of preflight checks on a fleet."""

    def __init__(self, inventory_file: str, wanted: PreflightOptions) -> None:
        self.inventory, self.wanted = inventory_file, wanted
        self._end = time.monotonic() + WHOLE_SECONDS
        self.fleet = read(inventory_file)
        self.now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        self.key = read_key(wanted.key_file) if wanted.key_file else None
        self.settings = {name: each.settings for name, each in self.fleet.nodes.items()}
        self.gpu_settings = {name: each.settings for name, each in self.fleet.gpu_nodes.items()}
        self.answers: dict[str, Answer] = {}
        self.planned: tuple[Stage, ...] = ()
        self.plan_problems: tuple[str, ...] = ()
        self.no_plan = ""
        """Why it is unknown whether a plan exists."""
        self.running: tuple[Running, ...] = ()
        self.topology: dict[str, Node] = {}
        self.looks: dict[str, Answer] = {}
        self.clocks: dict[str, ClockReading | str] = {}
        self.changes: dict[str, NodeLook] = {}
        self.keep = 1
        """The setting `upgrade.keep`."""

    def look(self) -> Preflight:
        """Query everything, and return the lines."""
        asked = count_of(len(self.settings), "node")
        click.echo(f"querying {asked}, which takes at most a minute", err=True)
        git = gevent.spawn(git_state, self.fleet.root, secret_files(self.fleet))
        fronts = gevent.spawn(ask_gateways, self.fleet.nodes, self.wanted.ca_file, self.key)
        lines: list[Line] = []
        with open_nodes(self.inventory) as nodes:
            self._probe(nodes)
            self._plan()
            homes = {(each.model, each.node) for each in self.running}
            homes |= {(each.model, each.node) for each in self.planned}
            self.questions = read_questions(self.fleet, homes, self.answers, self.wanted.ca_file)
            status = self._look_around(nodes)
            lines += self._load_lines(nodes)
            receipts = self._test_alert(nodes) if self.wanted.test_alert else {}
        lines += self._fleet_lines(status)
        without, with_key = fronts.get()
        lines += gateway_lines.refusal_lines(without, self.settings)
        lines += gateway_lines.key_lines(with_key, self.key, self.settings, self.inventory)
        lines += gateway_lines.limit_lines(self.settings)
        lines += self._node_lines(receipts)
        lines += self._rehearsal_lines()
        lines.append(rehearsal_lines.backup_line(git.get(), self.fleet.root.name))
        return Preflight(self.inventory, self.now, version("gpufleet"), order_lines(lines))

    def _left(self, most: float) -> float:
        """
        Return the deadline of a round in seconds: `most`, or less if less time is left in total.
        """
        return max(1.0, min(most, self._end - time.monotonic()))

    # -- asking

    def _probe(self, nodes: Nodes) -> None:
        """Probe the GPU nodes. At the same time, connect to the other nodes."""
        probes = observe.survey_questions(self.fleet, PROBE_SECONDS)
        hello = NodeQuestion(
            payload.program("converge/read_files", paths=[], most=0), PROBE_SECONDS, "it"
        )
        asked = {("probe", name): probes.get(name, hello) for name in self.settings}
        found = {name: each.answer for (_, name), each in
                 ask_bounded(nodes, asked, self._left(PROBE_SECONDS)).items()}  # fmt: skip
        self.answers = {name: found[name] for name in self.gpu_settings}
        self.silent = node_lines.silent_nodes(found)
        documents = {n: each for n, each in self.answers.items() if not isinstance(each, str)}
        for name, document in documents.items():
            try:
                running = fleet_plan.running_stages({name: document})
                self.topology[name] = node_from_probe(name, document)
                self.running += tuple(running)
            except (FleetError, KeyError, TypeError, ValueError) as error:
                self.silent[name] = self.answers[name] = (
                    f"the probe of the node cannot be read: {error}"
                )

    def _plan(self) -> None:
        if silent := node_lines.silent_nodes(self.answers):
            self.no_plan = (
                "a plan needs an answer from every node, but these nodes did not answer: "
                f"{node_ranges(silent)}"
            )
            return
        found = run_bounded(
            self._left(PLAN_SECONDS),
            "the plan",
            lambda: assessment.plan_fleet(
                self.answers, self.fleet.gpu_nodes, inventory=self.inventory
            ),
        )
        if isinstance(found, UnfinishedWork):
            self.no_plan = found.why
        elif isinstance(found, RefusedWork):
            self.plan_problems = found.problems
        else:
            self.planned = found.plan.stages

    def _look_around(self, nodes: Nodes) -> dict[str, Answer]:
        """
        Query all nodes that answered before, in one round.

        Returns the answers of `serving/status`.
        """
        asked: dict[tuple[str, str], NodeQuestion] = {}
        status = payload.program("serving/status", completion=False)
        for name, here in self.settings.items():
            if name in self.silent:
                continue
            given = self.questions.parameters(name, here)
            program = payload.program("preflight/node_look", **given)
            asked["look", name] = NodeQuestion(program, LOOK_SECONDS, "the look")
            if name in self.gpu_settings:
                asked["status", name] = NodeQuestion(status, LOOK_SECONDS, "the look")
                asked["change", name] = node_questions.look()
        found = ask_bounded(nodes, asked, self._left(LOOK_SECONDS))
        for name in self.settings:
            timed = found.get(("look", name))
            self.looks[name] = timed.answer if timed else SILENT
            self.clocks[name] = _clock(timed) if timed else SILENT
        for name in self.gpu_settings:
            try:
                if timed := found.get(("change", name)):
                    self.changes[name] = NodeLook.read(name, timed.answer)
            except FleetError:
                continue  # the lines then report that its load and marks are unknown
        return {
            name: found[key].answer if (key := ("status", name)) in found else SILENT
            for name in self.gpu_settings
        }

    def _test_alert(self, nodes: Nodes) -> dict[str, Receipt | str]:
        """Send an alert to each Alertmanager, and ask the operator whether it arrived."""
        asked = {
            ("alert", name): NodeQuestion(
                payload.program(
                    "preflight/alert_receipt",
                    url=f"http://{service_lines.host_of(server.listen)}:{server.port}",
                    alert=alert_lines.new_test_alert(
                        name, operator_name(), dt.datetime.now(dt.UTC)
                    ),
                    seconds=alert_lines.RECEIPT_SECONDS,
                ),
                alert_lines.RECEIPT_SECONDS + 15,
                "the test alert",
            )
            for name, here in self.settings.items()
            if here.monitoring and (server := here.monitoring.alertmanager) and server.page
            if name not in self.silent
        }
        found: dict[str, Receipt | str] = {}
        for (_, name), each in ask_bounded(nodes, asked, alert_lines.RECEIPT_SECONDS + 20).items():
            try:
                receipt = alert_lines.read_receipt(name, each.answer)
            except FleetError as error:
                found[name] = "; ".join(error.problems)
                continue
            confirmed = None
            if self.wanted.interactive:
                confirmed = click.confirm(f"{name}: did you receive the test alert?", err=True)
            found[name] = Receipt(receipt.before, receipt.after, confirmed)
        return found

    # -- lines

    def _load_lines(self, nodes: Nodes) -> list[Line]:
        silent = self.silent.keys() & self.gpu_settings.keys()
        missing = sorted({each.node for each in self.running} - self.changes.keys())
        loads: tuple[ReplicaLoad, ...] | str
        try:
            rules = fleet_policy(self.fleet.gpu_nodes)
        except FleetError as error:
            return [unknown("spare-capacity", "; ".join(error.problems), "gpufleet validate")]
        self.keep = rules.keep
        if silent or missing:
            loads = (
                "these nodes do not report which replicas they run: "
                f"{node_ranges({*silent, *missing})}"
            )
        else:
            found = run_bounded(
                self._left(LOAD_SECONDS),
                "the query of loads",
                lambda: observe.loads(
                    nodes, self.running, self.topology, self.gpu_settings, self.changes,
                    inventory=self.inventory, samples=1,
                ),
            )  # fmt: skip
            loads = found if isinstance(found, tuple) else str(found)
        lines = plan_lines.spare_capacity_lines(self.running, loads, rules, self.inventory)
        return list(lines)

    def _fleet_lines(self, status: Mapping[str, Answer]) -> Iterator[Line]:
        validation = run_bounded(
            self._left(PLAN_SECONDS), "the check", lambda: inventory_check.validate(self.fleet)
        )
        if isinstance(validation, Validation):
            yield from plan_lines.settings_lines(validation, self.inventory, len(self.settings))
        else:
            yield unknown("settings", str(validation), f"gpufleet validate {self.inventory}")
        silent = node_lines.silent_nodes(self.answers)
        yield from plan_lines.plan_lines(
            self.plan_problems or self.planned,
            self.gpu_settings,
            self.no_plan,
            self.inventory,
            self.keep,
        )
        moved = drift.drift_from_probes(self.answers, self.gpu_settings, self.now.date())
        yield from node_lines.driver_lines(
            self._short_answers(), moved, self.gpu_settings, self.inventory
        )
        wanted = {node: path.rpartition("/")[2] for node, path in self.questions.releases.items()}
        yield from node_lines.release_lines(self.running, wanted, self.inventory)
        report = assessment.check_nodes(self.answers, self.fleet.gpu_nodes)
        yield from node_lines.check_lines(report, self._all_answers(), self.inventory)
        yield from service_lines.service_lines(self.looks, self.settings, self.inventory)
        found = fleet_status(status, self.fleet.gpu_nodes)
        yield from service_lines.server_lines(found, self.gpu_settings, self.inventory)
        yield from service_lines.adapter_lines(found, self.fleet.gpu_nodes, self.inventory)
        served = {
            name: each for here in self.gpu_settings.values() for name, each in here.serving.items()
        }
        yield from objective_lines.objective_lines(served, self.inventory)
        yield from objective_lines.measured_lines(
            served,
            None if silent else self.running,
            self.topology,
            stored=result.read_measurements(measurements_folder(self.inventory)),
            now=self.now,
            inventory=self.inventory,
        )

    def _short_answers(self) -> dict[str, Answer]:
        """Return the probes. For a node that did not answer, the probe is the sentence `SILENT`."""
        return {n: SILENT if isinstance(each, str) else each for n, each in self.answers.items()}

    def _all_answers(self) -> dict[str, Answer]:
        """
        Return the probes. Nodes without GPUs that did not answer are included, with the reason.
        """
        return {**self.answers, **self.silent}

    def _node_lines(self, receipts: Mapping[str, Receipt | str]) -> Iterator[Line]:
        asked = self.questions
        gpu_looks = {name: self.looks[name] for name in self.gpu_settings}
        yield from storage_lines.model_lines(gpu_looks, asked.models, self.inventory)
        incomplete = {
            node: not all(storage_lines.is_whole(gpu_looks[node], each) for each in models)
            for node, models in asked.models.items()
        }
        yield from network_lines.source_lines(gpu_looks, asked.sources, incomplete, self.inventory)
        yield from storage_lines.disk_lines(
            self._short_answers(), gpu_looks, asked.models, asked.releases, self.inventory
        )
        yield from network_lines.name_lines(self.looks, asked.known, asked.hosts)
        yield from network_lines.clock_lines(self.clocks)
        yield from tls_lines.tls_lines(self.looks, asked.tls, self.settings, self.now)
        yield from alert_lines.alert_lines(self.looks, self.settings, receipts, self.inventory)

    def _rehearsal_lines(self) -> Iterator[Line]:
        journals: list[tuple[Entry, ...]] = []
        problems: list[str] = []
        for path in upgrade_journal.list_journals(self.fleet.root / upgrade_journal.FOLDER):
            try:
                journals.append(upgrade_journal.read(path))
            except FleetError as error:
                problems += error.problems
        drained = sorted({replica for each in self.changes.values() for replica in each.drained})
        yield from rehearsal_lines.rehearsal_lines(
            journals, problems, drained, Path(self.inventory), self.now
        )


def _clock(timed: Timed) -> ClockReading | str:
    if isinstance(timed.answer, str):
        return timed.answer
    return network_lines.clock_reading(
        timed.sent, timed.answered, timed.answer["began"], timed.answer["clock"]
    )
