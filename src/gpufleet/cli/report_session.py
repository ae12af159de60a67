"""Read everything that `gpufleet report INVENTORY` shows, as one document.

Border: the module queries nodes over SSH, and reads git and the project's files. If a part cannot
be read, the document states why, and all other parts are still read.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gevent

from gpufleet.artifacts.model_lock import Models, read_lock
from gpufleet.artifacts.operator_files import release_of
from gpufleet.cli.bounded_questions import ask_bounded
from gpufleet.cli.doctor_session import FleetLook, look
from gpufleet.cli.preflight_requests import (
    RefusedWork,
    UnfinishedWork,
    git_state,
    read_texts,
    run_bounded,
)
from gpufleet.errors import FleetError, file_fault
from gpufleet.fleet import assessment, drift, fleet_plan, measured_rates
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.fleet.measured_rates import ModelRate
from gpufleet.formatting import node_ranges
from gpufleet.inventory.loader import Fleet
from gpufleet.node.topology import node_from_probe
from gpufleet.paths import PROJECT
from gpufleet.planning.stage import Running
from gpufleet.preflight import look_questions
from gpufleet.preflight.rehearsal_lines import GitState
from gpufleet.redact import find_secrets
from gpufleet.remote import payload
from gpufleet.remote.query import Answer
from gpufleet.report import fleet_parts
from gpufleet.report.fleet_document import (
    Certificate,
    Checkout,
    Document,
    Drift,
    Node,
    Plan,
    Upgrade,
    clean_document,
)
from gpufleet.report.node_parts import gpu_node
from gpufleet.settings.operator_paths import named_files
from gpufleet.upgrade.report.report import report
from gpufleet.upgrade.run import upgrade_journal
from gpufleet.upgrade.run.connections import open_nodes
from gpufleet.upgrade.run.node_questions import NodeQuestion

PLAN_SECONDS = 8.0
"""Time limit in seconds for the plan. It may query the Hub about models that no node has."""
DRIFT_SECONDS = 300.0
"""Time limit in seconds for the comparison of nodes with deploys, as in `gpufleet drift`."""
MOST_SECRET_BYTES = 1 << 16
"""The maximum size in bytes of a file with a secret. Larger files are not read."""


def read_fleet(inventory_file: str, seconds: float, *, deploys: bool) -> Document:
    """
    Return the document of a fleet.

    With `deploys`, it includes the changes that deploys would make. `seconds` is the deadline of
    each round of questions. A node that does not answer is not queried again. Raises `FleetError`
    for an inventory with mistakes.
    """
    return _Reading(inventory_file, look(inventory_file, seconds), seconds).document(
        deploys=deploys
    )


class _Reading:
    def __init__(self, inventory_file: str, seen: FleetLook, seconds: float) -> None:
        self.inventory, self.seen, self.seconds = inventory_file, seen, seconds
        self.fleet: Fleet = seen.declared
        self.now = dt.datetime.fromtimestamp(int(seen.now), dt.UTC)
        self.settings = {name: each.settings for name, each in self.fleet.gpu_nodes.items()}
        self.answers: dict[str, Answer] = dict(self._probes())
        self.unknown: list[str] = []

    def document(self, *, deploys: bool) -> Document:
        """Return the report's document."""
        git = gevent.spawn(git_state, self.fleet.root)
        files = dict(self._files())
        releases, locks = self._locks()
        looks, certificates = self._certificates()
        nodes = tuple(self._nodes(looks, releases))
        planned = self._plan()
        assessed = planned if isinstance(planned, Assessment) else None
        plan = planned if isinstance(planned, Plan) else fleet_parts.plan(planned)
        models = tuple(fleet_parts.models(self.settings, locks, releases))
        diagnosis = self.seen.diagnosis()
        document = Document(
            inventory=self.fleet.inventory,
            when=self.now,
            version=version("gpufleet"),
            checkout=self._checkout(git.get()),
            nodes=nodes,
            models=models,
            replicas=tuple(fleet_parts.replicas(self.seen.observed.status)),
            missing=self.seen.observed.status.missing,
            plan=plan,
            capacity=tuple(fleet_parts.capacities(models, assessed, self._rates(planned))),
            findings=tuple(fleet_parts.findings(diagnosis)),
            drift=self._drift(deploys=deploys),
            upgrades=self._upgrades(),
            certificates=certificates,
            files=files,
        )
        unknown = [
            *(f"{each.name}: {each.silent}" for each in nodes if each.silent),
            *diagnosis.unseen,
            *(f"the plan: {each}" for each in plan.unknown),
            *(f"{e.server}: {e.proof}" for e in certificates if e.status == "UNKNOWN"),
            *_unread_versions(nodes),
            *_unread_drift(document.drift, {each.name for each in nodes if each.silent}),
            *self.unknown,
        ]
        known = document.model_copy(update={"unknown": tuple(dict.fromkeys(unknown))})
        return clean_document(known, self._secrets())

    # -- nodes

    def _probes(self) -> Iterator[tuple[str, Answer]]:
        """Yield each GPU node with its probe, or the reason why it is missing."""
        found = self.seen.observed.report
        why = {each.node: each.found for each in found.findings if each.check == "probe"}
        for name in self.settings:
            silent = self.seen.observed.status.silent.get(name, "the node did not answer")
            there = found.facts.get(name)
            yield name, dict(there) if there is not None else why.get(name) or silent

    def _nodes(
        self, looks: Mapping[str, Answer], releases: Mapping[tuple[str, str], str]
    ) -> Iterator[Node]:
        for name, each in sorted(self.fleet.nodes.items()):
            if name in self.settings:
                found = self.seen.observed.report
                ids = [one for (node, _), one in sorted(releases.items()) if node == name]
                yield gpu_node(name, each, self.answers[name], found, ids)
            else:
                said = looks.get(name, "the node was not queried")
                silent = said if isinstance(said, str) else ""
                yield Node(name=name, groups=each.groups, gpu_node=False, silent=silent)

    def _certificates(self) -> tuple[dict[str, Answer], tuple[Certificate, ...]]:
        """
        Query servers that use TLS from the nodes. Return the nodes' answers, and the certificates.
        """
        files = look_questions.authority_files(self.fleet.nodes, None)
        servers = look_questions.tls_servers(self.fleet.nodes, None, dict(read_texts(files)))
        looks: dict[str, Answer] = {
            name: each for name, each in self.answers.items() if isinstance(each, str)
        }
        gateways = self.seen.observed.gateways
        looks |= {name: each for name, each in gateways.items() if isinstance(each, str)}
        asked = {}
        for name in self.fleet.nodes:
            mine = {each.id: each.parameters() for each in servers if each.asked_from == name}
            if name not in looks and (mine or name not in self.settings):
                program = payload.program(
                    "preflight/node_look",
                    names=[], pages={}, tls=mine, models={}, folders=[],
                )  # fmt: skip
                asked["look", name] = NodeQuestion(program, self.seconds, "the look")
        if asked:
            with open_nodes(self.inventory) as nodes:
                answers = ask_bounded(nodes, asked, self.seconds)
            looks |= {name: each.answer for (_, name), each in answers.items()}
        return looks, tuple(fleet_parts.certificates(servers, looks, self.now))

    # -- the plan

    def _plan(self) -> Assessment | Plan:
        """Return the plan with its nodes, or the reason why it is missing."""
        if silent := [name for name, each in self.answers.items() if isinstance(each, str)]:
            return Plan(
                unknown=(
                    "this part needs an answer from every node, but these nodes did not "
                    f"answer: {node_ranges(silent)}",
                )
            )
        found = run_bounded(
            PLAN_SECONDS,
            "the plan",
            lambda: assessment.plan_fleet(
                self.answers, self.fleet.gpu_nodes, inventory=self.inventory
            ),
        )
        if isinstance(found, UnfinishedWork):
            return Plan(unknown=(found.why,))
        return Plan(refused=found.problems) if isinstance(found, RefusedWork) else found

    def _rates(self, plan: Assessment | Plan) -> tuple[ModelRate, ...]:
        """
        Return the measured rates of planned replicas. If there is no plan, use the running
        replicas.
        """
        there = measured_rates.stored_results(self.inventory)
        self.unknown += there.problems
        if isinstance(plan, Assessment):
            return measured_rates.plan_rates(there.measurements, plan, self.settings, self.now)
        running: list[Running] = []
        topology = {}
        for name, document in self.answers.items():
            with suppress(FleetError):  # the node's part reports a probe that cannot be read
                if not isinstance(document, str):
                    topology[name] = node_from_probe(name, document)
                    running += fleet_plan.running_stages({name: document})
        rates = measured_rates.replica_rates(
            there.measurements, running, topology, self.settings, self.now
        )
        first = {each.id: each for each in running}
        return tuple(
            ModelRate(first[name].model, (first[name].replica,), "there is no plan", rate)
            for name, rate in sorted(rates.items())
        )

    # -- drift and changes

    def _drift(self, *, deploys: bool) -> Drift:
        told = drift.drift_from_probes(self.answers, self.settings, self.now.date())
        if deploys:
            from gpufleet.cli.drift_command import compare_nodes

            try:
                whole = compare_nodes(self.inventory, (), DRIFT_SECONDS)
            except FleetError as error:
                self.unknown += (f"what deploys would change: {each}" for each in error.problems)
            else:
                return fleet_parts.fleet_drift(
                    whole.nodes, whole.refused, self.inventory, whole=True
                )
        return fleet_parts.fleet_drift(told, (), self.inventory, whole=False)

    def _upgrades(self) -> tuple[Upgrade, ...]:
        found = []
        for path in upgrade_journal.list_journals(self.fleet.root / upgrade_journal.FOLDER):
            try:
                each = report(upgrade_journal.read(path))
            except FleetError as error:
                self.unknown += error.problems
                continue
            if Path(each.inventory).resolve() == Path(self.inventory).resolve():
                found.append(each)
        return tuple(fleet_parts.upgrades(found))

    # -- files of the project

    def _checkout(self, found: GitState) -> Checkout:
        return Checkout(
            commit=found.commit_id,
            date=found.commit.partition(" of ")[2],
            changed=tuple(sorted(found.changed)),
            problem=found.problem,
        )

    def _locks(self) -> tuple[dict[tuple[str, str], str], dict[str, Models]]:
        """Return the declared releases by (node, engine), and the model locks by path."""
        releases: dict[tuple[str, str], str] = {}
        locks: dict[str, Models] = {}
        for name, here in self.settings.items():
            if here.servers is None:
                continue
            try:
                if here.servers.models_lock not in locks:
                    locks[here.servers.models_lock] = {}
                    locks[here.servers.models_lock] = read_lock(Path(here.servers.models_lock))
                for each in here.used_engines:
                    releases[name, each.engine] = release_of(each).id
            except FleetError as error:
                self.unknown += error.problems
        return releases, locks

    def _files(self) -> Iterator[tuple[str, str]]:
        """Yield the inventory, its variables and locks, with their SHA-256."""
        root = self.fleet.root.resolve()
        paths = {Path(self.inventory).resolve()}
        for folder in ("group_vars", "host_vars"):
            below = (each for each in (root / folder).rglob("*") if each.is_file())
            paths |= {each for each in below if not each.name.startswith(".")}
        for name, each in self.fleet.nodes.items():
            named = [e.path for e in named_files(each.settings, name) if _is_lock(e.at)]
            servers = each.settings.servers
            paths |= {
                Path(e).resolve() for e in (*named, *([servers.models_lock] if servers else []))
            }
        for path in sorted(paths):
            shown = _shown(path, root)
            try:
                yield shown, hashlib.sha256(path.read_bytes()).hexdigest()
            except FileNotFoundError:
                continue  # the release's part reports a lock whose file is missing
            except OSError as error:
                self.unknown.append(f"{shown}: cannot be read: {file_fault(error)}")

    def _secrets(self) -> set[str]:
        """Return all secrets in the settings, and in the secret files that the settings name."""
        found: set[str] = set()
        for name, each in self.fleet.nodes.items():
            plain: dict[str, Any] = each.settings.model_dump(mode="json", exclude_unset=True)
            found.update(find_secrets(plain))
            for file in named_files(each.settings, name):
                with suppress(OSError):
                    if file.secret and Path(file.path).stat().st_size <= MOST_SECRET_BYTES:
                        text = Path(file.path).read_text("utf-8", "replace")
                        found.update(line.strip() for line in text.splitlines())
        return found


def _shown(path: Path, root: Path) -> str:
    """
    Return the path to show for a file.

    If the file is in the project or in gpufleet's own folder, the path is relative to that folder.
    """
    if path.is_relative_to(root):
        return str(path.relative_to(root))
    if path.is_relative_to(PROJECT):
        return f"gpufleet's {path.relative_to(PROJECT)}"
    return str(path)


def _unread_versions(nodes: Iterable[Node]) -> Iterator[str]:
    parts: dict[str, list[str]] = {}
    for node in nodes:
        for each in node.versions:
            if each.found is None:
                parts.setdefault(each.part, []).append(node.name)
    for part, names in parts.items():
        yield f"{node_ranges(names)}: the version of {part} could not be read"


def _unread_drift(found: Drift, silent: Collection[str]) -> Iterator[str]:
    for node in found.nodes:
        if node.node not in silent:
            yield from (f"{node.node}: drift: {why}" for why in node.unread)


def _is_lock(at: tuple[Any, ...]) -> bool:
    return any(str(each) in {"lock", "uv_lock"} for each in at)
