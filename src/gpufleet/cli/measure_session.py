"""Run `gpufleet measure` once: choose the target, put load on it, and return the measurement.

Border: the module queries nodes over SSH, and starts load clients on this machine or on a node.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gevent

from gpufleet.cli.load_watch import GuestWatch, LoadWatch, Look, read_servers
from gpufleet.cli.measure_output import LevelLines, Progress, say, served_by
from gpufleet.cli.measure_wanted import MeasureOptions, trace_work, work_json
from gpufleet.cli.served_fleet import NodeAnswers, ServedFleet
from gpufleet.errors import FleetError
from gpufleet.fleet.model_configs import describe_models
from gpufleet.formatting import join_names, suggestion
from gpufleet.inventory.loader import read
from gpufleet.load_test import guest, load_target, other_clients, result, workloads
from gpufleet.load_test.arrivals import Trace, read_trace
from gpufleet.load_test.client_ceiling import Ceiling
from gpufleet.load_test.client_places import ClientPlace, NodeClients, this_machine
from gpufleet.load_test.level_runs import (
    MOST_CLIENT_SHARE,
    LevelRuns,
    describe_work,
    measure_client,
    read_key,
)
from gpufleet.load_test.level_search import LevelSearch
from gpufleet.load_test.load_target import Target, TargetDeclaration
from gpufleet.load_test.media_work import SHORT_ANSWERS, SoundWork
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.result import Measurement, RateBracket, Searched
from gpufleet.load_test.run_recorder import Recorder
from gpufleet.load_test.subjects import longest_request, subject_of
from gpufleet.remote.session import COMMAND
from gpufleet.sizing.architectures.description import Description
from gpufleet.upgrade.run.connections import Nodes, open_nodes

SMALLEST_VOCABULARY = 32000
"""
The number of token ids that is assumed if the model's config is unknown.

It is the smallest vocabulary of today's models (Llama 2, Mistral 7B).
"""


class Session:
    """Measures one model of an inventory."""

    def __init__(self, inventory_file: str, wanted: MeasureOptions) -> None:
        self.inventory = inventory_file
        self.wanted = wanted
        self.project = read(inventory_file)
        self._opened: AbstractContextManager[Nodes] = open_nodes(inventory_file)

    def __enter__(self) -> Session:
        self.nodes = self._opened.__enter__()
        self.fleet = ServedFleet(self.project, self.nodes)
        return self

    def __exit__(self, *about: Any) -> None:
        self._opened.__exit__(*about)

    def measure(self) -> Measurement:
        """Measure how much load the target can serve. Raises `FleetError` with all mistakes."""
        wanted = self.wanted
        self._check_place()
        trace = read_trace(Path(wanted.trace)) if wanted.trace else None
        fleet = self.look()
        model = load_target.choose_model(fleet.declared, wanted.model)
        kind = load_target.kind_of(model, fleet.declared)
        work = trace_work(wanted.trace or "", trace, kind) if trace else wanted.work(kind)
        contract = load_target.contract_of(model, fleet.declared, wanted.share)
        target, notes = self.fleet.target(
            model,
            load_target.with_drained(fleet.declared, wanted.replica),
            replica=wanted.replica,
            gateway=wanted.gateway,
            key_file=wanted.key_file,
            ca_file=wanted.ca_file,
            place=wanted.from_node,
        )
        ids, context = self._describe(model, fleet)
        if context:
            (trace or work).check_context(context)
        # A guest does not send requests to a replica that a person has drained.
        drained = wanted.replica if wanted.guest is None else None

        def look() -> Look:
            return Look(
                *self.fleet.look(
                    target, fleet, drained=drained, families=other_clients.line_beginnings()
                )
            )

        first = look()
        most_in_flight = self._admit(first, contract)
        if wanted.from_node is not None:
            notes += load_target.place_remarks(wanted.from_node, target, fleet.declared)
        if isinstance(work, SoundWork):
            notes += (SHORT_ANSWERS,)
        say(f"{target.name}, {served_by(target)}, {describe_work(work)}")
        for each in notes:
            say(f"note: {each}")
        with self._clients(fleet.declared) as place:
            client = measure_client(work, wanted.processes, place)
            most = self._most_rate(client, trace, place)
            key = read_key(target.key_file)
            if problem := load_target.key_problem(target, key, most, fleet.declared):
                raise FleetError(problem)
            runs = LevelRuns(
                target, contract, work, ids, wanted.seed, client.processes, trace, place
            )
            search = LevelSearch(runs, float(wanted.seconds), self._try(runs), LevelLines())
            began, recorder = dt.datetime.now(dt.UTC), Recorder()
            runs.observers = [Progress(), recorder]
            watch: GuestWatch | LoadWatch = LoadWatch(look, recorder.load)
            if most_in_flight is not None:
                watch = GuestWatch(
                    look, recorder.load, contract, most_in_flight, self.wanted.guest or 0.0
                )
                runs.most_in_flight = most_in_flight
                runs.observers.append(watch)
                notes += watch.remarks
            runs.stop_reason = watch.reason
            watching = gevent.spawn(watch.run)
            try:
                found, closed = self._find(search, most)
            finally:
                watching.kill()
        if problem := self._changed(target, fleet.declared):
            unknown = RateBracket(None, None, "not known", problem)
            found = replace(found, found=unknown)
            closed = closed and replace(closed, found=unknown)
        return self._measurement(
            began, fleet, runs, client, found=found, closed=closed, recorder=recorder, notes=notes
        )

    def _try(self, runs: LevelRuns) -> float:
        """
        Return how many seconds the largest request takes. Raise `FleetError` if a search cannot
        succeed.
        """
        seconds = runs.try_largest()
        if self.wanted.searches:
            runs.check_alone()
        return seconds

    def _check_place(self) -> None:
        """
        Raise `FleetError` if `--from` names an unknown node. No node is queried before this check.
        """
        node, known = self.wanted.from_node, sorted(self.project.nodes)
        if node is not None and node not in known:
            raise FleetError(
                f"--from {node}: {self.inventory} has no such node{suggestion(node, known)}"
            )

    @contextmanager
    def _clients(self, declared: TargetDeclaration) -> Iterator[ClientPlace]:
        """Yield the place where load clients run. Afterwards, end all clients."""
        node = self.wanted.from_node
        if node is None:
            yield this_machine()
            return
        with self.nodes.command(node, COMMAND) as streams:
            clients = NodeClients(node, streams)
            try:
                yield clients.place(serves=any(each.node == node for each in declared.running))
            finally:
                clients.close()

    def look(self) -> NodeAnswers:
        """
        Query the state of the nodes. Raises `FleetError` if a deploy or an upgrade changes the
        fleet.
        """
        found = self.fleet.ask_nodes()
        if problems := found.changes():
            raise FleetError(*problems)
        return found

    def _changed(self, target: Target, declared: TargetDeclaration) -> str:
        """Return which serving replicas changed during the run, or "" if none did."""
        _, gateway, node = target.name.rpartition("gateway ")
        if not gateway:
            return ""
        now = sorted(self.fleet.rotation(target.model, node, declared).serving)
        if now == sorted(target.replicas):
            return ""
        return (
            f"at the beginning, {node} sent requests to "
            f"{join_names(sorted(target.replicas))}, but at the end to "
            f"{join_names(now) or 'no replica'}: measure again"
        )

    def _describe(self, model: str, fleet: NodeAnswers) -> tuple[workloads.TokenRange, int | None]:
        """
        Return a model's range of token ids, and the length of its longest request or None if
        unknown.
        """
        of_model = {
            name: each
            for name, each in self.project.gpu_nodes.items()
            if model in each.settings.serving
        }
        known = describe_models(of_model, fleet.documents).get(model)
        found = known.described if known else None
        config = (found.config or {}) if isinstance(found, Description) else {}
        size = config.get("vocab_size")
        ids = workloads.ordinary_ids(size if isinstance(size, int) else SMALLEST_VOCABULARY)
        stage = next((each for each in fleet.declared.running if each.model == model), None)
        return ids, longest_request(stage, found or "unknown") if stage else None

    def _admit(self, first: Look, contract: Contract) -> int | None:
        """
        Return the maximum number of requests in flight, or None if there is none.

        Raises `FleetError` if a load is unknown. Without --guest, also raises `FleetError` if
        requests of users are running.
        """
        loads = first.loads
        if self.wanted.guest is not None:
            read_servers(first, contract)
            return guest.most_in_flight(loads, self.wanted.guest)
        if unknown := [each for each in loads if isinstance(each, str)]:
            raise FleetError(*unknown)
        if busy := guest.busy_replicas(loads):
            said = join_names([f"{name} has {count:.0f}" for name, count in busy.items()])
            raise FleetError(
                f"requests of other clients are running ({said}), and a measurement would "
                "make them slower: add --guest 0.3 to use only idle capacity, or wait "
                "until these requests end"
            )
        return None

    def _most_rate(self, client: Ceiling, trace: Trace | None, place: ClientPlace) -> float:
        """Return the maximum arrivals per second, and print the client's own limit."""
        wanted, limit = self.wanted, client.rate_at(MOST_CLIENT_SHARE)
        who = f"the client on {place.name}" if place.is_node else "this client"
        say(
            f"{who} sends at most {client.requests_per_second:.0f} requests/s "
            f"({client.cpu_seconds * 1000:.1f} ms of CPU time each); levels above "
            f"{limit:.0f} requests/s are skipped"
        )
        rate = wanted.rate or (trace.rate if trace else None)
        if rate is None:
            return min(limit, wanted.most or limit)
        if rate > limit:
            raise FleetError(
                f"at {rate:g} requests/s the client itself would be the bottleneck, because "
                f"it can send only {limit:.0f} requests/s: increase --processes"
            )
        return rate

    def _find(self, search: LevelSearch, most: float) -> tuple[Searched, Searched | None]:
        """
        Return the requested loop's result (by default an open loop's), and an additional closed
        loop's.

        No level has more than `most` arrivals per second.
        """
        wanted, runs = self.wanted, search.runs
        if wanted.concurrency is not None:
            return search.single(float(wanted.concurrency), closed=True), None
        if runs.trace:
            seconds = max(search.seconds, runs.trace.at_rate(most).seconds)
            return replace(search, seconds=seconds).single(most), None
        if wanted.rate is not None:
            return search.single(most), None
        found = search.rate(most)
        if not wanted.closed_loop or runs.stopped:
            return found, None
        say("the same target in a closed loop:")
        return found, search.concurrency(found.found.concurrency or 1.0, most)

    def _measurement(
        self,
        began: dt.datetime,
        fleet: NodeAnswers,
        runs: LevelRuns,
        client: Ceiling,
        *,
        found: Searched,
        closed: Searched | None,
        recorder: Recorder,
        notes: tuple[str, ...],
    ) -> Measurement:
        target = runs.target
        of_target = [each for each in fleet.declared.running if each.id in target.replicas]
        first = [each for each in of_target if each.id == target.replicas[0]]
        served = load_target.served_as(target.model, fleet.declared)
        return Measurement(
            began.replace(microsecond=0),
            version("gpufleet"),
            target.model,
            target.name,
            len(target.replicas),
            runs.contract,
            work_json(runs.work, self.wanted.seed, self.wanted.trace),
            "closed" if self.wanted.concurrency is not None else "open",
            found.levels,
            found.found,
            result.Client(
                client.processes,
                client.requests_per_second,
                max(runs.costs, default=None),
                None if self.wanted.concurrency is not None else max(runs.lags, default=None),
                runs.place.name,
            ),
            subject_of(first, served, fleet.nodes, of_target),
            (*notes, *result.alert_remarks(found.best, runs.contract)),
            target.replicas_of,
            closed,
            recorder.series(),
        )
