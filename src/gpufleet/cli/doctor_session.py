"""Read everything for `gpufleet doctor INVENTORY`, from all nodes at once.

Border: the module queries nodes over SSH.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpufleet.artifacts.model_files import checkpoint
from gpufleet.artifacts.operator_files import read as read_file
from gpufleet.cli.bounded_questions import Questions, ask_bounded
from gpufleet.cli.preflight_requests import RefusedWork, UnfinishedWork, run_bounded
from gpufleet.doctor import (
    fleet_problems,
    gateway_problems,
    journal_causes,
    planned_memory,
    replica_speed,
)
from gpufleet.doctor.fleet_diagnosis import Diagnosis
from gpufleet.doctor.node_evidence import NodeEvidence, node_evidence
from gpufleet.doctor.observations import Alert, FleetObservations
from gpufleet.doctor.support_bundle import bundle_files
from gpufleet.engines.engine import line_beginnings
from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.formatting import join_names
from gpufleet.inventory.loader import Fleet, read
from gpufleet.monitoring.rules.rule import runbook_page
from gpufleet.network import haproxy
from gpufleet.redact import find_secrets
from gpufleet.remote import payload
from gpufleet.remote.query import Answer
from gpufleet.serving import credentials
from gpufleet.serving.status import fleet_status
from gpufleet.settings.monitoring_settings import Objectives
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.sizing.options import Sizing
from gpufleet.upgrade.gates import baseline
from gpufleet.upgrade.gates.baseline import Alerts
from gpufleet.upgrade.run import observe, wave_silences
from gpufleet.upgrade.run.connections import Nodes, open_nodes
from gpufleet.upgrade.run.node_questions import NodeQuestion

JOURNAL_LINES = 1500
"""
The number of log lines to read for each replica.

A start that fails with a traceback on eight ranks logs about 1,000 lines.
"""
CONNECT_SHARE = 0.3
"""
The part of the time limit that may be used to connect, so that unreachable nodes delay no others.
"""
PLAN_SECONDS = 3.0
"""Time limit in seconds for the plan. It may query the Hub about models that no node has."""
ABOUT = ("instance", "model_name", "model", "gateway", "node")
"""Labels of an alert that may name what the alert is about. The first label found is used."""


@dataclass(frozen=True)
class _Answers:
    status: Mapping[str, Answer]
    probes: Mapping[str, Answer]
    gateways: Mapping[str, haproxy.GatewayState | str]
    alerts: Alerts
    journals: Mapping[str, Answer]
    gateway_logs: Mapping[str, Answer]
    speeds: Mapping[str, Answer]


@dataclass(frozen=True)
class FleetLook:
    """The results of one query of a fleet."""

    inventory: str
    declared: Fleet
    observed: FleetObservations
    now: float
    """The time of the query, in seconds since 1970."""

    def diagnosis(self, name: str = "") -> Diagnosis:
        """
        Return the diagnosis. With a name, return only the problems of this model, replica or node.

        Raises `FleetError` for an unknown name.
        """
        found = fleet_problems.diagnose(self.observed, self.now, self.inventory)
        if not name:
            return found
        return fleet_problems.problems_of(found, name, self.observed.status, self.declared.nodes)

    def write_bundle(self, file: Path) -> None:
        """Write an archive for a vendor or an issue. Only its owner can read it."""
        nodes = self.declared.gpu_nodes
        secrets = {each for name in nodes for each in _secrets(nodes[name].settings)}
        settings = {
            name: each.settings.model_dump(mode="json", exclude_unset=True)
            for name, each in self.declared.nodes.items()
        }
        secrets.update(find_secrets(settings))
        files = bundle_files(self.diagnosis(), self.observed, settings, secrets, self.now)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, text in files.items():
                raw = text.encode()
                member = tarfile.TarInfo(f"{file.name.split('.')[0]}/{name}")
                member.size, member.mtime, member.mode = len(raw), int(self.now), 0o600
                archive.addfile(member, io.BytesIO(raw))
        _write_private(file, packed.getvalue())


def _write_private(file: Path, content: bytes) -> None:
    """Write a file atomically. Only its owner can read it. Raises `FleetError`."""
    new = file.with_name(f".{file.name}.new")
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
            written.write(content)
            os.fsync(written.fileno())
        new.replace(file)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise FleetError(f"--bundle {file}: cannot be written: {error.strerror}") from None


def _secrets(settings: NodeSettings) -> Iterator[str]:
    """Yield the contents of the secret files that the settings name."""
    if settings.servers is not None:
        for path in credentials.secret_files(settings.servers, settings.serving).values():
            with suppress(FleetError):
                yield read_file(path).decode("utf-8", "replace").strip()


def look(inventory_file: str, seconds: float) -> FleetLook:
    """
    Query all nodes of an inventory, within a limit in seconds.

    Raises `FleetError` for an inventory with mistakes.
    """
    declared = read(inventory_file)
    with open_nodes(inventory_file) as nodes:
        answers = _ask(nodes, declared, seconds)
    now = time.time()
    status = fleet_status(answers.status, declared.gpu_nodes)
    evidence = {name: _evidence(name, each) for name, each in answers.journals.items()}
    for name, each in answers.gateway_logs.items():
        log = _evidence(name, each)
        known = evidence.get(name, log)
        evidence[name] = replace(
            known,
            stages={**known.stages, **log.stages},
            connections={**known.connections, **log.connections},
        )
    report = assessment.check_nodes(answers.probes, declared.gpu_nodes)
    logs = {
        **journal_causes.replica_causes(status, evidence, report, inventory_file),
        **journal_causes.gateway_causes(evidence, inventory_file),
    }
    sizes, unsized = _sizes(answers.probes, declared, planned_memory.short_of_memory(status, logs))
    observed = FleetObservations(
        status,
        report,
        answers.gateways,
        evidence,
        logs,
        {
            name: journal_causes.kernel_causes(each, inventory_file)
            for name, each in evidence.items()
        },
        replica_speed.replica_speeds(answers.speeds),
        _objectives(declared),
        sizes,
        [
            Alert(
                each.name,
                each.summary,
                next((label[1] for label in each.labels if label[0] in ABOUT), each.node),
                f"docs/alerts/{runbook_page(each.name)}.md",
                each.since,
            )
            for each in answers.alerts.alerts
        ],
        (*answers.alerts.problems, *unsized),
    )
    return FleetLook(inventory_file, declared, observed, now)


def _objectives(declared: Fleet) -> dict[str, Objectives]:
    """Return the objectives of each model."""
    return {
        model: served.objectives
        for each in declared.gpu_nodes.values()
        for model, served in each.settings.serving.items()
    }


def _sizes(
    probes: Mapping[str, Answer], declared: Fleet, models: Collection[str]
) -> tuple[dict[tuple[str, str], Sizing], tuple[str, ...]]:
    """Return the planned memory by (model, node), and problems that explain why it is unknown."""
    if not models:
        return {}, ()
    known = {name: each for name, each in probes.items() if not isinstance(each, str)}
    there = {name: each for name, each in declared.gpu_nodes.items() if name in known}
    found = run_bounded(
        PLAN_SECONDS, "the plan", lambda: assessment.plan_fleet(known, there, unfit_stops=False)
    )
    if isinstance(found, UnfinishedWork | RefusedWork):
        return {}, (f"the planned memory of {join_names(sorted(models))} is unknown: {found}",)
    return planned_memory.planned_sizes(found.plan, models), ()


def _evidence(node: str, answer: Answer) -> NodeEvidence:
    """Return what a node's logs contain. If the answer is invalid, the result has the reason."""
    try:
        return node_evidence(node, answer)
    except FleetError as error:
        return NodeEvidence(node, unread=error.problems)


def _ask(nodes: Nodes, declared: Fleet, seconds: float) -> _Answers:
    """Query everything at once. If an answer is late, a sentence about this replaces the answer."""

    def then(what: str, node: str, answer: Answer) -> Questions:
        if what == "status":
            return _journals(node, answer, seconds, declared)
        return _gateway_log(node, answer, seconds) if what == "gateway" else {}

    status = payload.program("serving/status", completion=False)
    speeds = payload.program(
        "doctor/replica_metrics",
        families=list(line_beginnings(*replica_speed.MEASURES)),
        apart=replica_speed.APART_SECONDS,
    )
    drains = payload.program("network/gateway_drains", do="show", servers=[])
    homes = wave_silences.alertmanagers(declared.nodes)
    gateways = [name for name, each in declared.nodes.items() if each.settings.gateway]
    asked = {
        **{
            ("status", name): NodeQuestion(status, seconds, "the look")
            for name in declared.gpu_nodes
        },
        **{
            ("probe", name): question
            for name, question in observe.survey_questions(declared, seconds).items()
        },
        **{
            ("speeds", name): NodeQuestion(speeds, seconds, "the query of metrics")
            for name in declared.gpu_nodes
        },
        **{
            ("gateway", name): NodeQuestion(drains, seconds, "the gateway's state")
            for name in gateways
        },
        **{
            ("alerts", name): NodeQuestion(program, seconds, "the query of alerts")
            for name, home in homes.items()
            if (program := baseline.program(name, [], home))
        },
    }
    found = ask_bounded(nodes, asked, seconds, connect_seconds=seconds * CONNECT_SHARE, then=then)
    said = {key: each.answer for key, each in found.items()}

    def of(what: str) -> dict[str, Answer]:
        return {name: answer for (kind, name), answer in said.items() if kind == what}

    return _Answers(
        of("status"),
        of("probe"),
        {
            name: each if isinstance(each, str) else haproxy.parse_gateway_state(each)
            for name, each in of("gateway").items()
        },
        baseline.read_answers(of("alerts"), [], time.time(), homes).alerts,
        of("journals"),
        of("gateway logs"),
        of("speeds"),
    )


def _journals(node: str, answer: Answer, seconds: float, declared: Fleet) -> Questions:
    """
    Return the question for the logs of a node. It depends on the node's status.

    The journals of replicas that span nodes are always read, because one node does not know whether
    the whole replica serves. If a node did not report its status, it is not queried again.
    """
    status = fleet_status({node: answer}, {}, whole=False)
    if status.silent:
        return {}
    stages = fleet_problems.journals_to_read(status, time.time()).get(node, ())
    served = declared.gpu_nodes[node].settings.serving
    models = {
        stage: wanted.directory
        for stage in stages
        if (entry := served.get(stage.rpartition("-")[0])) and (wanted := checkpoint(entry))
    }
    ranks = fleet_problems.ranks_to_connect(status).get(node, ())
    return {("journals", node): _log_question(stages, seconds, models, ranks)}


def _gateway_log(node: str, answer: Answer, seconds: float) -> Questions:
    """
    Return the question for the log of a gateway.

    If the gateway runs, the question is instead whether the ports of servers that the gateway
    cannot reach accept connections.
    """
    if isinstance(answer, str):
        return {}
    state = haproxy.parse_gateway_state(answer)
    stages = () if state.runs else (journal_causes.GATEWAY,)
    places = gateway_problems.servers_to_connect(state)
    return {("gateway logs", node): _log_question(stages, seconds, places=places)}


def _log_question(
    stages: Iterable[str],
    seconds: float,
    models: Mapping[str, str] | None = None,
    ranks: Iterable[str] = (),
    places: Mapping[str, tuple[str, int]] | None = None,
) -> NodeQuestion:
    program = payload.program(
        "doctor/failure_evidence",
        stages=list(stages),
        models=dict(models or {}),
        ranks=list(ranks),
        places=dict(places or {}),
        lines=JOURNAL_LINES,
        seconds=fleet_problems.RECENT_SECONDS,
    )
    return NodeQuestion(program, seconds, "the query of journals")
