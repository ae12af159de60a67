"""Observe a fleet and its plan as groups, loads and servers: before and between waves.

Border: it queries the nodes; `change_groups`, `replica_load` and `assessment` evaluate the answers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import gevent

from gpufleet.artifacts.operator_files import read, release_of
from gpufleet.engines.engine import line_beginnings
from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.fleet.measured_rates import stored_rates
from gpufleet.fleet.model_configs import probe_paths
from gpufleet.inventory.loader import Fleet
from gpufleet.network import haproxy
from gpufleet.node.topology import Node
from gpufleet.on_node.common.stage_units import unit_of
from gpufleet.planning.stage import Running, Stage
from gpufleet.remote import payload
from gpufleet.remote.probe_paths import probe_program
from gpufleet.remote.query import SECONDS, Answer
from gpufleet.serving import credentials, servers
from gpufleet.serving.servers import Server
from gpufleet.serving.unit import render_unit
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.gates import baseline
from gpufleet.upgrade.gates.baseline import Findings, Question
from gpufleet.upgrade.plan import replica_load
from gpufleet.upgrade.plan.change_groups import changed_replicas, groups
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from gpufleet.upgrade.plan.wave import Group
from gpufleet.upgrade.run import node_questions
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.node_answers import NodeLook
from gpufleet.upgrade.run.node_questions import NodeQuestion

# Loads are taken so often, and so many seconds apart: the busiest of these moments counts.
SAMPLES = 3
BETWEEN_SECONDS = 2.0
_METRICS_SECONDS = 30


@dataclass(frozen=True)
class FleetView:
    """A fleet's present state, and its plan."""

    found: Assessment
    looks: Mapping[str, NodeLook]
    findings: Findings
    node_why: Mapping[str, str] = field(default_factory=dict)
    """Differences below vLLM, by node."""
    remarks: tuple[str, ...] = ()
    documents: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The nodes' probe documents."""

    @property
    def cordoned(self) -> dict[str, str]:
        """Return the nodes that people have cordoned, with the reasons."""
        return {
            name: str(look.cordon)
            for name, look in self.looks.items()
            if look.cordon and look.cordon.upgrade is None
        }

    def groups(self, settings: Mapping[str, NodeSettings]) -> tuple[Group, ...]:
        """Return the groups that differ from the plan."""
        wanted = fingerprints(self.found.plan.stages, settings)
        started = {
            (node, unit.replica): unit.started if unit.is_running else None
            for node, look in self.looks.items()
            for unit in look.units.values()
        }
        differs = changed_replicas(self.found.restarts, wanted, started)
        return groups(
            self.found.plan, self.found.running, differs, self.found.changes, self.node_why
        )

    def servers(self) -> dict[str, list[dict[str, Any]]]:
        """Return each replica's servers before and after the change, in the journal's form."""
        every: dict[str, dict[str, dict[str, Any]]] = {}
        both = {
            *servers.running_servers(self.found.running),
            *servers.planned_servers(self.found.plan.stages),
        }
        for each in sorted(both):
            every.setdefault(each.stage, {})[haproxy.server_name(each)] = _server_json(each)
        return {replica: list(servers.values()) for replica, servers in every.items()}

    def nodes_of(self) -> dict[str, tuple[str, ...]]:
        """Return the nodes of each running replica."""
        found: dict[str, set[str]] = {}
        for each in self.found.running:
            found.setdefault(each.id, set()).add(each.node)
        return {replica: tuple(sorted(nodes)) for replica, nodes in found.items()}


def _server_json(server: Server) -> dict[str, Any]:
    return {
        "name": haproxy.server_name(server),
        "node": server.node,
        "port": server.port,
        "model": server.model,
        "replica": server.stage,
    }


def view_fleet(
    nodes: Nodes,
    declared: Fleet,
    *,
    unfit_stops: bool = True,
    below: Mapping[str, str] | None = None,
) -> FleetView:
    """
    Probe all nodes, and plan the fleet.

    `below` has the differences below vLLM, by node. Raises `FleetError` for nodes that give no
    answer, and with the refusals of `assessment.plan_fleet`.
    """
    documents = survey(nodes, declared)
    looks = look(nodes, declared.gpu_nodes)
    found = assessment.plan_fleet(
        documents, declared.gpu_nodes, unfit_stops=unfit_stops, inventory=declared.inventory
    )
    report = assessment.check_nodes(documents, declared.gpu_nodes)
    return FleetView(
        found, looks, Findings.unaccepted(report), below or {}, found.remarks, documents
    )


def survey(nodes: Nodes, declared: Fleet) -> dict[str, Answer]:
    """Return each GPU node's answer to the probe."""
    return nodes.ask(survey_questions(declared))


def survey_questions(declared: Fleet, seconds: float = SECONDS) -> dict[str, NodeQuestion]:
    """Return the probe request of each GPU node, with the paths declared there."""
    return {
        name: NodeQuestion(probe_program(paths), seconds, "the probe")
        for name, paths in probe_paths(declared.gpu_nodes).items()
    }


def look(nodes: Nodes, names: Collection[str], seconds: float = 0) -> dict[str, NodeLook]:
    """Return each node's state for a change. Raises `FleetError` for nodes without an answer."""
    asked = node_questions.look()
    found = nodes.ask_until(dict.fromkeys(names, asked), NodeLook.read, seconds)
    if problems := [f"{name}: {each.problem}" for name, each in found.items() if each.problem]:
        raise FleetError(*problems)
    return found


def fingerprints(
    stages: Iterable[Stage], settings: Mapping[str, NodeSettings]
) -> dict[tuple[str, str], str]:
    """Return the fingerprint of each stage's unit as a deploy would write it, by node and id."""
    found = {}
    for stage in stages:
        here = settings[stage.node]
        engine, model = here.engine_of(stage.model), here.serving[stage.model]
        contents = {
            name: read(path)
            for name, path in credentials.secret_files(engine, here.serving).items()
            if name not in credentials.NOT_FOR_UNITS
        }
        secrets = credentials.node_credentials(contents, [stage], here.serving)
        unit = render_unit(
            stage,
            model,
            engine,
            release=release_of(engine).id,
            toolkit=here.cuda.toolkit if here.cuda else None,
            credentials=credentials.unit_hashes(stage, model, secrets),
        )
        found[stage.node, stage.id] = unit.fingerprint
    return found


# -- how busy it is --------------------------------------------------------------------------------


def loads(
    nodes: Nodes,
    running: Iterable[Running],
    known: Mapping[str, Node],
    settings: Mapping[str, NodeSettings],
    looks: Mapping[str, NodeLook],
    *,
    inventory: str,
    samples: int = SAMPLES,
) -> tuple[ReplicaLoad, ...]:
    """
    Return each replica's load, observed over some seconds.

    The measured rates of replicas are read from the project of the inventory file.
    """
    running = tuple(running)
    pages, seconds = read_metrics(nodes, running, samples=samples)
    return replica_load.loads(
        running,
        pages,
        known,
        settings,
        out=without_requests(running, looks),
        carries=stored_rates(inventory, running, known, settings),
        seconds=seconds,
    )


Pages: TypeAlias = dict[tuple[str, int], tuple[str, ...] | str]
"""
The /metrics of servers by (node, port), one page per moment; or a sentence why there are none.
"""


def read_metrics(
    nodes: Nodes, running: Iterable[Running], *, samples: int, families: Sequence[str] = ()
) -> tuple[Pages, float]:
    """
    Return the /metrics of all servers, `samples` times, and the seconds from the first to the last.

    `families` are beginnings of further lines to read, besides those of the load.
    """
    running = tuple(running)
    replicas: dict[str, list[str]] = {}
    for each in running:
        replicas.setdefault(each.node, []).append(each.id)
    questions = {
        node: [
            {"replica": each, "prompts": [], "max_tokens": 0, "times": 0, "seconds": 15}
            for each in names
        ]
        for node, names in replicas.items()
    }
    asked = {
        node: NodeQuestion(
            payload.program(
                "serving/replica_answers",
                replicas=wanted,
                families=[*line_beginnings(*replica_load.MEASURES), *families],
                alertmanager=None,
                seconds=10,
            ),
            _METRICS_SECONDS,
            "the query of loads",
        )
        for node, wanted in questions.items()
    }
    pages: dict[tuple[str, int], list[str] | str] = {}
    moments = []
    for moment in range(samples):
        if moment:
            gevent.sleep(BETWEEN_SECONDS)
        moments.append(time.monotonic())
        for node, said in nodes.ask(asked).items():
            _collect_pages(node, said, running, pages)
    texts = {key: each if isinstance(each, str) else tuple(each) for key, each in pages.items()}
    return texts, moments[-1] - moments[0]


def _collect_pages(
    node: str,
    said: Answer,
    running: Iterable[Running],
    pages: dict[tuple[str, int], list[str] | str],
) -> None:
    """Add the pages of a node's servers to `pages`; a missing page replaces them by a sentence."""
    here = [each for each in running if each.node == node]
    for each in here:
        for port in each.servers:
            key = (node, port)
            metrics = _metrics(said, each.id, port)
            before = pages.setdefault(key, [])
            if "text" in metrics and isinstance(before, list):
                before.append(metrics["text"])
            elif "text" not in metrics:
                pages[key] = str(metrics.get("error", "the server returned no metrics"))


def _metrics(said: Answer, replica: str, port: int) -> Mapping[str, Any]:
    if isinstance(said, str):
        return {"error": said}
    found = (said.get("replicas") or {}).get(replica) or {}
    for url, server in (found.get("servers") or {}).items():
        if url.rstrip("/").rpartition(":")[2] == str(port):
            metrics: Mapping[str, Any] = server.get("metrics") or {}
            return metrics
    return {"error": str(found.get("missing", f"nothing answers on port {port}"))}


def without_requests(running: Iterable[Running], looks: Mapping[str, NodeLook]) -> dict[str, str]:
    """Return the replicas without requests, and the reasons."""
    found = {}
    for each in running:
        seen = looks.get(each.node)
        if seen is None:
            continue
        unit = seen.units.get(unit_of(each.id))
        if unit is None or not unit.is_running:
            found[each.id] = f"the unit is {unit.active if unit else 'not found'} on {each.node}"
        elif mark := seen.drained.get(each.id):
            found[each.id] = f"drained by {mark}"
    return found


def without_drain(look: NodeLook, replica: str | None) -> NodeLook:
    """Return a node's state without the drain mark of one replica."""
    return replace(look, drained={n: mark for n, mark in look.drained.items() if n != replica})


def questions(
    replicas: Mapping[str, Iterable[str]], settings: Mapping[str, NodeSettings], times: int
) -> list[Question]:
    """
    Return a question for each replica: golden prompts, each sent `times` times; 0: counters only.
    """
    found = []
    for replica, names in sorted(replicas.items()):
        nodes = tuple(sorted(names))
        model = replica.rpartition("-")[0]
        golden = next(
            (settings[n].serving[model].golden for n in nodes if model in settings[n].serving), None
        )
        found.append(Question(replica, nodes, golden if times else None, times=max(times, 1)))
    return found


def observe_replicas(
    nodes: Nodes,
    asked: list[Question],
    homes: Mapping[str, str],
    now: float,
    ours: Collection[str] = (),
) -> baseline.Observation:
    """Query replicas for answers and counters, and Alertmanagers for alerts."""
    seconds = baseline.seconds(asked)
    programs = {
        name: text
        for name in nodes.names
        if (text := baseline.program(name, asked, homes.get(name))) is not None
    }
    look = {
        name: NodeQuestion(text, seconds, "the query of replicas")
        for name, text in programs.items()
    }
    said = nodes.ask(look)
    # A connection that was lost says nothing of a replica: a new one is tried, once.
    if silent := {name: each for name, each in look.items() if isinstance(said.get(name), str)}:
        said = {**said, **nodes.ask(silent)}
    return baseline.read_answers(said, asked, now, homes, ours)
