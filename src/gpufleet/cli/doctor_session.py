"""Everything that `gpufleet doctor INVENTORY` looks at, asked of all nodes at once.

Border: it asks nodes over SSH.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gevent

from gpufleet.doctor import fleet_problems, journal_causes
from gpufleet.doctor.fleet_diagnosis import Diagnosis
from gpufleet.doctor.node_evidence import NodeEvidence, node_evidence
from gpufleet.doctor.sights import Alert, Sights
from gpufleet.errors import FleetError
from gpufleet.fleet.assessment import check_nodes
from gpufleet.inventory.loader import Fleet, read
from gpufleet.monitoring.rules.rule import runbook_page
from gpufleet.network import haproxy
from gpufleet.remote import payload
from gpufleet.remote.query import Answer
from gpufleet.serving.status import FleetStatus, fleet_status
from gpufleet.upgrade.gates.baseline import Alerts
from gpufleet.upgrade.run import observe, wave_silences
from gpufleet.upgrade.run.connections import Nodes, open_nodes
from gpufleet.upgrade.run.node_questions import NodeQuestion

LOOK_SECONDS = 40.0
"""As `gpufleet status`: a stage's own deadline on the node is 25 s."""
JOURNAL_LINES = 1500
"""Of a replica: a start with its traceback on eight ranks is some 1,000."""
HOMES_OF = ("instance", "model_name", "model", "gateway", "node")
"""Labels that say what an alert is about."""


@dataclass(frozen=True)
class _Answers:
    status: Mapping[str, Answer]
    probes: Mapping[str, Answer]
    gateways: Mapping[str, haproxy.GatewayState]
    alerts: Alerts


def diagnose(inventory_file: str, name: str = "") -> Diagnosis:
    """
    Look at all nodes of an inventory, and say what is wrong.

    With the `name` of a model, a replica or a node, what concerns it. Raises `FleetError`.
    """
    declared = read(inventory_file)
    with open_nodes(inventory_file) as nodes:
        answers = _first_look(nodes, declared)
        status = fleet_status(answers.status, declared.gpu_nodes)
        now = time.time()
        evidence = _evidence(nodes, declared, status, now)
    report = check_nodes(answers.probes, declared.gpu_nodes)
    sights = Sights(
        status,
        report,
        answers.gateways,
        evidence,
        journal_causes.of_replicas(status, evidence, report, inventory_file),
        {name: journal_causes.of_kernel(each, inventory_file) for name, each in evidence.items()},
        [
            Alert(
                each.name,
                each.summary,
                next((label[1] for label in each.labels if label[0] in HOMES_OF), each.node),
                f"docs/alerts/{runbook_page(each.name)}.md",
                each.since,
            )
            for each in answers.alerts.alerts
        ],
        answers.alerts.problems,
    )
    found = fleet_problems.diagnose(sights, now, inventory_file)
    return fleet_problems.concerning(found, name, status, declared.nodes) if name else found


def _first_look(nodes: Nodes, declared: Fleet) -> _Answers:
    """Ask everything at once: a node that does not answer costs its deadline only once."""
    program = payload.program("serving/status", completion=False)
    looks: dict[str, Callable[[], Any]] = {
        "status": lambda: nodes.ask(
            dict.fromkeys(declared.gpu_nodes, NodeQuestion(program, LOOK_SECONDS, "the look"))
        ),
        "probes": lambda: observe.survey(nodes, declared),
        "gateways": lambda: _gateways(nodes, declared),
        "alerts": lambda: (
            observe.observe_replicas(
                nodes, [], wave_silences.alertmanagers(declared.nodes), time.time()
            ).alerts
        ),
    }
    jobs = {name: gevent.spawn(look) for name, look in looks.items()}
    gevent.joinall(list(jobs.values()))
    return _Answers(**{name: job.get() for name, job in jobs.items()})


def _gateways(nodes: Nodes, declared: Fleet) -> dict[str, haproxy.GatewayState]:
    program = payload.program("network/gateway_drains", do="show", servers=[])
    asked = {
        name: NodeQuestion(program, LOOK_SECONDS, "the gateway's state")
        for name, each in declared.nodes.items()
        if each.settings.gateway
    }
    return {name: haproxy.parse_gateway_state(said) for name, said in nodes.ask(asked).items()}


def _evidence(
    nodes: Nodes, declared: Fleet, status: FleetStatus, now: float
) -> dict[str, NodeEvidence]:
    """Return what nodes logged, of replicas that are not well; silent nodes are not asked again."""
    wanted = fleet_problems.wanted_journals(status, now)
    asked = {
        name: NodeQuestion(
            payload.program(
                "doctor/failure_evidence",
                stages=list(wanted.get(name, ())),
                lines=JOURNAL_LINES,
                seconds=fleet_problems.RECENT_SECONDS,
            ),
            LOOK_SECONDS,
            "the look at journals",
        )
        for name in declared.gpu_nodes
        if name not in status.silent
    }
    found = {}
    for name, said in nodes.ask(asked).items():
        try:
            found[name] = node_evidence(name, said)
        except FleetError as error:
            found[name] = NodeEvidence(name, unread=error.problems)
    return found
