"""One run of `gpufleet preflight`: ask nodes and gateways at once, and make lines of what they say.

Border: it asks nodes over SSH, gateways over HTTP, git, and files of the project. Every wait has an
end: a round of questions is over after its seconds, whatever a node does.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import click
import gevent

from gpufleet.artifacts.model_lock import Models, read_lock
from gpufleet.artifacts.operator_files import release_of
from gpufleet.cli.common_options import operator_name
from gpufleet.cli.preflight_requests import (
    GATEWAY_SECONDS,
    Timed,
    ask_bounded,
    ask_gateways,
    bounded,
    git_state,
    read_texts,
)
from gpufleet.errors import FleetError
from gpufleet.fleet import assessment, drift, fleet_plan, inventory_check
from gpufleet.formatting import count_of
from gpufleet.inventory.loader import read
from gpufleet.load_test import result
from gpufleet.load_test.level_runs import read_key
from gpufleet.load_test.subjects import measurements_folder
from gpufleet.node.topology import Node, node_from_probe
from gpufleet.planning.stage import Running, Stage
from gpufleet.preflight import (
    alert_lines,
    gateway_lines,
    look_questions,
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
from gpufleet.preflight.line import Line, Preflight, in_order, unknown
from gpufleet.preflight.look_questions import LookQuestions
from gpufleet.preflight.network_lines import ClockReading, KnownNode
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

PROBE_SECONDS, LOOK_SECONDS, LOAD_SECONDS = 20.0, 20.0, 10.0
"""Of each round of questions; with the plan they stay below a minute."""
PLAN_SECONDS = 8.0
"""A plan of models that no node has reads their descriptions from the Hub."""


@dataclass(frozen=True)
class Wanted:
    """What was typed."""

    key_file: str | None = None
    ca_file: str | None = None
    test_alert: bool = False
    interactive: bool = False
    """Whether an operator can be asked whether a test alert has arrived."""


class Session:
    """One look at a fleet."""

    def __init__(self, inventory_file: str, wanted: Wanted) -> None:
        self.inventory, self.wanted = inventory_file, wanted
        self.fleet = read(inventory_file)
        self.now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        self.key = read_key(wanted.key_file) if wanted.key_file else None
        self.settings = {name: each.settings for name, each in self.fleet.nodes.items()}
        self.gpu_settings = {name: each.settings for name, each in self.fleet.gpu_nodes.items()}
        self.answers: dict[str, Answer] = {}
        self.stages: tuple[Stage, ...] | tuple[str, ...] = ()
        self.running: tuple[Running, ...] = ()
        self.topology: dict[str, Node] = {}
        self.looks: dict[str, Answer] = {}
        self.clocks: dict[str, ClockReading | str] = {}
        self.changes: dict[str, NodeLook] = {}

    def look(self) -> Preflight:
        """Ask everything, and return the lines."""
        asked = count_of(len(self.settings), "node")
        click.echo(f"asking {asked}, at most a minute", err=True)
        git = gevent.spawn(git_state, self.fleet.root)
        fronts = gevent.spawn(ask_gateways, self.fleet.nodes, self.wanted.ca_file, self.key)
        lines: list[Line] = []
        with open_nodes(self.inventory) as nodes:
            self._probe(nodes)
            self._plan()
            self.questions = self._questions()
            status = self._look_around(nodes)
            lines += self._load_lines(nodes)
            receipts = self._test_alert(nodes) if self.wanted.test_alert else {}
        lines += self._fleet_lines(status)
        without, with_key = fronts.get(timeout=4 * GATEWAY_SECONDS)
        lines += gateway_lines.refusal_lines(without, self.settings)
        lines += gateway_lines.key_lines(with_key, self.key, self.settings, self.inventory)
        lines += gateway_lines.limit_lines(self.settings)
        lines += self._node_lines(receipts)
        lines += self._rehearsal_lines()
        lines.append(rehearsal_lines.backup_line(git.get(), self.fleet.root.name))
        return Preflight(self.inventory, self.now, version("gpufleet"), in_order(lines))

    # -- asking

    def _probe(self, nodes: Nodes) -> None:
        """Probe the GPU nodes; connect to the others meanwhile."""
        probes = observe.survey_questions(self.fleet, PROBE_SECONDS)
        hello = NodeQuestion(
            payload.program("converge/read_files", paths=[], most=0), PROBE_SECONDS, "it"
        )
        asked = {("probe", name): probes.get(name, hello) for name in self.settings}
        found = {name: each.answer for (_, name), each in
                 ask_bounded(nodes, asked, PROBE_SECONDS).items()}  # fmt: skip
        self.answers = {name: found[name] for name in self.gpu_settings}
        self.silent = node_lines.silent_nodes(found)
        documents = {n: each for n, each in self.answers.items() if not isinstance(each, str)}
        for name, document in documents.items():
            try:
                running = fleet_plan.running_stages({name: document})
                self.topology[name] = node_from_probe(name, document)
                self.running += tuple(running)
            except (FleetError, KeyError, TypeError, ValueError) as error:
                self.silent[name] = self.answers[name] = f"its probe cannot be read: {error}"

    def _plan(self) -> None:
        if node_lines.silent_nodes(self.answers):
            return
        found = bounded(
            PLAN_SECONDS,
            "the plan",
            lambda: assessment.plan_fleet(
                self.answers, self.fleet.gpu_nodes, inventory=self.inventory
            ),
        )
        self.stages = found if isinstance(found, tuple) else found.plan.stages

    def _questions(self) -> LookQuestions:
        homes = {(e.model, e.node) for e in self.running}
        homes |= {(e.model, e.node) for e in self.stages if isinstance(e, Stage)}
        locks: dict[str, Models] = {}
        releases: dict[str, str] = {}
        for node, here in self.gpu_settings.items():
            if here.vllm is None:
                continue
            # What cannot be read, the line about settings names.
            try:
                locks.setdefault(here.vllm.models_lock, read_lock(Path(here.vllm.models_lock)))
                releases[node] = release_of(here.vllm).directory
            except FleetError:
                continue
        models = look_questions.wanted_models(homes, self.gpu_settings, locks)
        files = look_questions.authority_files(self.fleet.nodes, self.wanted.ca_file)
        return LookQuestions(
            known={
                name: KnownNode(
                    each.address,
                    network_lines.own_addresses(probe)
                    if not isinstance(probe := self.answers.get(name, ""), str)
                    else frozenset(),
                )
                for name, each in self.fleet.nodes.items()
            },
            models=models,
            sources=look_questions.download_pages(models, self.gpu_settings),
            tls=look_questions.tls_servers(
                self.fleet.nodes, self.wanted.ca_file, dict(read_texts(files))
            ),
            releases=releases,
        )

    def _look_around(self, nodes: Nodes) -> dict[str, Answer]:
        """Ask all nodes that answered, in one round; return what `serving/status` says."""
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
        found = ask_bounded(nodes, asked, LOOK_SECONDS)
        for name in self.settings:
            timed = found.get(("look", name))
            self.looks[name] = timed.answer if timed else self.silent[name]
            self.clocks[name] = _clock(timed) if timed else self.silent[name]
        for name in self.gpu_settings:
            try:
                if timed := found.get(("change", name)):
                    self.changes[name] = NodeLook.read(name, timed.answer)
            except FleetError:
                continue  # its load and its marks are unknown then, and the lines say so
        return {
            name: found[key].answer if (key := ("status", name)) in found else self.silent[name]
            for name in self.gpu_settings
        }

    def _test_alert(self, nodes: Nodes) -> dict[str, Receipt | str]:
        """Send an alert to each Alertmanager; ask the operator whether it arrived."""
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
                confirmed = click.confirm(f"{name}: did the test alert arrive?", err=True)
            found[name] = Receipt(receipt.before, receipt.after, confirmed)
        return found

    # -- lines

    def _load_lines(self, nodes: Nodes) -> list[Line]:
        silent = {n: why for n, why in self.silent.items() if n in self.gpu_settings}
        missing = sorted({each.node for each in self.running} - self.changes.keys())
        loads: tuple[ReplicaLoad, ...] | str
        try:
            rules = fleet_policy(self.fleet.gpu_nodes)
        except FleetError as error:
            return [unknown("spare-capacity", "; ".join(error.problems), "gpufleet validate")]
        if silent or missing:
            loads = f"not all nodes say what runs: {', '.join(sorted({*silent, *missing}))}"
        else:
            found = bounded(
                LOAD_SECONDS,
                "the look at loads",
                lambda: observe.loads(
                    nodes, self.running, self.topology, self.gpu_settings, self.changes,
                    inventory=self.inventory, samples=1,
                ),
            )  # fmt: skip
            loads = (
                "; ".join(map(str, found))
                if found and isinstance(found[0], str)
                else tuple(each for each in found if isinstance(each, ReplicaLoad))
            )
        lines = plan_lines.spare_capacity_lines(self.running, loads, rules, self.inventory)
        return list(lines)

    def _fleet_lines(self, status: Mapping[str, Answer]) -> Iterator[Line]:
        validation = bounded(
            PLAN_SECONDS, "the check", lambda: inventory_check.validate(self.fleet)
        )
        if isinstance(validation, tuple):
            yield unknown("settings", "; ".join(validation), f"gpufleet validate {self.inventory}")
        else:
            yield from plan_lines.settings_lines(validation, self.inventory, len(self.settings))
        silent = node_lines.silent_nodes(self.answers)
        yield from plan_lines.plan_lines(self.stages, self.gpu_settings, silent, self.inventory)
        moved = drift.drift_from_probes(self.answers, self.gpu_settings, self.now.date())
        yield from node_lines.driver_lines(self.answers, moved, self.gpu_settings, self.inventory)
        wanted = {node: path.rpartition("/")[2] for node, path in self.questions.releases.items()}
        yield from node_lines.release_lines(self.running, wanted, self.inventory)
        report = assessment.check_nodes(self.answers, self.fleet.gpu_nodes)
        yield from node_lines.check_lines(report, self._all_answers(), self.inventory)
        yield from service_lines.service_lines(self.looks, self.settings, self.inventory)
        found = fleet_status(status, self.fleet.gpu_nodes)
        yield from service_lines.server_lines(found, self.gpu_settings, self.inventory)
        served = {
            name: each for here in self.gpu_settings.values() for name, each in here.serving.items()
        }
        yield from objective_lines.objective_lines(served, self.inventory)
        yield from objective_lines.measured_lines(
            served,
            None if silent else self.running,
            self.topology,
            stored=result.stored(measurements_folder(self.inventory)),
            now=self.now,
            inventory=self.inventory,
        )

    def _all_answers(self) -> dict[str, Answer]:
        """Return the probes, and the sentences of nodes without GPUs that did not answer."""
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
            self.answers, gpu_looks, asked.models, asked.releases, self.inventory
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
