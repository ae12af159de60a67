"""One run of `gpufleet measure`: choose the target, put load on it, write the results.

Border: it asks nodes over SSH and starts load clients on this machine.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import gevent

from gpufleet.console import add_row, display, new_table
from gpufleet.errors import FleetError
from gpufleet.flags.normalize import human_readable
from gpufleet.fleet import fleet_plan
from gpufleet.fleet.model_configs import describe_models
from gpufleet.fleet.upgrade_lock import lock_problems
from gpufleet.formatting import join_names
from gpufleet.inventory.loader import read
from gpufleet.load_test import guest, load_target, report_format, result, result_page, workloads
from gpufleet.load_test.arrivals import Trace, read_trace
from gpufleet.load_test.client_ceiling import Ceiling
from gpufleet.load_test.client_process import Beat
from gpufleet.load_test.level import Level, LevelSummary
from gpufleet.load_test.level_runs import (
    MOST_CLIENT_SHARE,
    LevelRuns,
    Work,
    describe_work,
    measure_client,
    read_key,
)
from gpufleet.load_test.load_target import Declared, Target
from gpufleet.load_test.rate_search import RateSearch
from gpufleet.load_test.result import Found, Measurement
from gpufleet.load_test.subjects import measurements_folder, subject_of
from gpufleet.load_test.verdicts import fewest_seconds
from gpufleet.load_test.written_prompts import WrittenPrompts, from_jsonl
from gpufleet.node.marks import deploy_problems
from gpufleet.node.topology import Node, node_from_probe
from gpufleet.paths import write_whole
from gpufleet.sanitize import printable
from gpufleet.sizing.architectures.description import Description
from gpufleet.upgrade.run import observe
from gpufleet.upgrade.run.connections import Nodes, open_nodes

START_RATE = 0.5
"""Arrivals per second of the first level."""
MOST_LEVELS = 15
"""Of a search: doubling from 0.5 to 2,048 and bisecting to a tenth takes 16."""
GUEST_LOOK_SECONDS = 3.0
SMALLEST_VOCABULARY = 32000
"""Of models that are served today (Llama 2, Mistral 7B); for those whose config is not known."""


@dataclass(frozen=True)
class Wanted:
    """What was typed."""

    model: str | None
    replica: str | None
    gateway: str | None
    key_file: str | None
    ca_file: str | None
    preset: str
    lengths: str | None
    prompts: str | None
    trace: str | None
    rate: float | None
    concurrency: int | None
    most: float | None
    share: float
    seconds: int
    guest: float | None
    processes: int | None
    seed: int
    output: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        exclusive = (
            ("--replica", self.replica, "--gateway", self.gateway),
            ("--lengths", self.lengths, "--prompts", self.prompts),
            ("--rate", self.rate, "--concurrency", self.concurrency),
            ("--guest", self.guest, "--concurrency", self.concurrency),
            ("--trace", self.trace, "--prompts", self.prompts),
            ("--trace", self.trace, "--concurrency", self.concurrency),
        )
        if problems := [
            f"{one} and {other} exclude each other: remove one"
            for one, given, other, too in exclusive
            if given is not None and too is not None
        ]:
            raise FleetError(*problems)

    def work(self) -> Work:
        """Return the requests that are wanted."""
        if self.prompts:
            return from_jsonl(Path(self.prompts))
        if not self.lengths:
            return workloads.PRESETS[self.preset]
        before, comma, after = self.lengths.partition(",")
        if not comma:
            raise FleetError(
                f"--lengths {self.lengths}: write tokens of prompts and answers, as 1000,200"
            )
        return workloads.Workload(
            "lengths",
            workloads.parse_lengths(before),
            workloads.parse_lengths(after),
            "as it was typed",
        )


@dataclass(frozen=True)
class _Fleet:
    """What the nodes said before any load."""

    declared: Declared
    nodes: Mapping[str, Node]
    documents: Mapping[str, Mapping[str, Any]]
    looks: Mapping[str, Any]


class Session:
    """The nodes of an inventory while one of its models is measured."""

    def __init__(self, inventory_file: str, wanted: Wanted) -> None:
        self.inventory = inventory_file
        self.wanted = wanted
        self.project = read(inventory_file)
        self._request_seconds = 0.0
        """Of the largest request, on an idle server."""
        self._opened: AbstractContextManager[Nodes] = open_nodes(inventory_file)

    def __enter__(self) -> Session:
        self.nodes = self._opened.__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        self._opened.__exit__(*about)

    def measure(self) -> Measurement:
        """Find what the target carries. Raises `FleetError` for all that has to be put right."""
        wanted = self.wanted
        trace = read_trace(Path(wanted.trace)) if wanted.trace else None
        work = trace_work(wanted.trace or "", trace) if trace else wanted.work()
        fleet = self._look()
        model = load_target.choose_model(fleet.declared, wanted.model)
        contract = load_target.contract_of(model, fleet.declared, wanted.share)
        target = self._target(model, fleet.declared)
        ids, context = self._describe(model, fleet)
        if context:
            (trace or work).check_context(context)
        most_in_flight = self._admit(self._loads(target, fleet))
        say(f"{target.name}, {describe_work(work)}")
        client = measure_client(work, wanted.processes)
        most = self._most_rate(client, trace)
        key = read_key(target.key_file)
        if problem := load_target.key_problem(target, key, most, fleet.declared):
            raise FleetError(problem)
        runs = LevelRuns(target, contract, work, ids, wanted.seed, client.processes, trace)
        self._request_seconds = runs.try_largest()
        runs.on_beat = _Progress()
        began = dt.datetime.now(dt.UTC)
        watching = gevent.spawn(lambda: None)
        if most_in_flight is not None:
            watched = _Watched(lambda: self._loads(target, fleet), most_in_flight)
            runs.stop_reason = watched.reason
            watching = gevent.spawn(watched.look)
        try:
            what = self._find(runs, most)
        finally:
            watching.kill()
        return self._measurement(began, fleet, runs, client, what)

    def _look(self) -> _Fleet:
        """Ask all nodes what runs, and refuse while it is being changed."""
        answers = observe.survey(self.nodes, self.project)
        documents = {n: each for n, each in answers.items() if not isinstance(each, str)}
        looks = observe.look(self.nodes, documents)
        deploys = {name: each.deploy for name, each in looks.items() if each.deploy}
        if problems := (*lock_problems(documents, None), *deploy_problems(deploys)):
            raise FleetError(*problems)
        running = tuple(fleet_plan.running_stages(documents))
        declared = Declared(
            {name: each.address for name, each in self.project.nodes.items()},
            {name: each.settings for name, each in self.project.gpu_nodes.items()},
            {n: each.settings for n, each in self.project.nodes.items() if each.settings.gateway},
            running,
            observe.without_requests(running, looks),
        )
        nodes = {name: node_from_probe(name, each) for name, each in documents.items()}
        return _Fleet(declared, nodes, documents, looks)

    def _target(self, model: str, declared: Declared) -> Target:
        wanted = self.wanted
        if wanted.replica is None and (wanted.gateway is not None or declared.gateways):
            return load_target.gateway_target(
                model, wanted.gateway, wanted.key_file, wanted.ca_file, declared
            )
        return load_target.replica_target(model, wanted.replica, declared)

    def _describe(self, model: str, fleet: _Fleet) -> tuple[workloads.TokenRange, int | None]:
        """Return which token ids a model has, and how long its requests may be; None: not known."""
        of_model = {
            name: each
            for name, each in self.project.gpu_nodes.items()
            if model in each.settings.serving
        }
        found = describe_models(of_model, fleet.documents).get(model)
        config = found.config or {} if isinstance(found, Description) else {}
        size = config.get("vocab_size")
        ids = workloads.ordinary_ids(size if isinstance(size, int) else SMALLEST_VOCABULARY)
        lines = next((e.arguments for e in fleet.declared.running if e.model == model), ())
        given = (line.strip().partition(" ") for line in lines)
        length = next((value for name, _, value in given if name == "--max-model-len"), "")
        return ids, human_readable(length)

    def _loads(self, target: Target, fleet: _Fleet) -> list[guest.ServerLoad | str]:
        """Return how busy the replicas of a target are now."""
        running = [each for each in fleet.declared.running if each.id in target.replicas]
        found = observe.loads(
            self.nodes,
            running,
            fleet.nodes,
            fleet.declared.settings,
            fleet.looks,
            inventory=self.inventory,
            samples=1,
        )
        return [
            f"{each.replica}: {each.unknown}"
            if each.running is None or each.waiting is None or each.kv_usage is None
            else guest.ServerLoad(
                each.replica, each.running, each.waiting, each.kv_usage, each.most_running
            )
            for each in found
        ]

    def _admit(self, loads: list[guest.ServerLoad | str]) -> int | None:
        """Return how many requests may be under way; None: any. Refuses load on top of users'."""
        if self.wanted.guest is not None:
            return guest.most_in_flight(loads, self.wanted.guest)
        if unknown := [each for each in loads if isinstance(each, str)]:
            raise FleetError(*unknown)
        if busy := guest.busy(loads):
            said = join_names([f"{name} has {count:.0f}" for name, count in busy.items()])
            raise FleetError(
                f"requests of others are under way ({said}), and a measurement would slow them: "
                "measure beside them with --guest 0.3, or when none are"
            )
        return None

    def _most_rate(self, client: Ceiling, trace: Trace | None) -> float:
        """Return the highest arrivals per second that there will be; say what the client can do."""
        wanted, limit = self.wanted, client.rate_at(MOST_CLIENT_SHARE)
        say(
            f"this client sends at most {client.requests_per_second:.0f} requests/s "
            f"({client.cpu_seconds * 1000:.1f} ms of processor time each); levels above "
            f"{limit:.0f} are not begun"
        )
        rate = wanted.rate or (trace.rate if trace else None)
        if rate is None:
            return min(limit, wanted.most or limit)
        if rate > limit:
            raise FleetError(
                f"{rate:g} requests/s is more than this client can send without being the "
                f"bottleneck ({limit:.0f}): use more --processes"
            )
        return rate

    def _find(self, runs: LevelRuns, most: float) -> tuple[tuple[LevelSummary, ...], Found]:
        """Run levels until the answer is known; none has more than `most` arrivals per second."""
        wanted = self.wanted
        closed = wanted.concurrency is not None
        if closed or wanted.rate is not None or runs.trace:
            load = float(wanted.concurrency) if wanted.concurrency is not None else most
            seconds = runs.trace.at_rate(load).seconds if runs.trace else 0.0
            level = runs.run(load, max(seconds, float(wanted.seconds)), closed=closed)
            say_level(level)
            return (level,), _single(level)
        search = RateSearch(min(START_RATE, most), most, budget_levels=MOST_LEVELS)
        levels: list[LevelSummary] = []
        while (rate := search.next()) is not None:
            level = runs.run(rate, self._seconds(runs, rate) * search.budget_factor)
            levels.append(level)
            say_level(level)
            if runs.stopped:
                return tuple(levels), _stopped(levels, runs.stopped)
            search.add(level)
        found = search.result()
        return tuple(levels), Found(
            found.kept.load if found.kept else None,
            found.missed.load if found.missed else None,
            found.status,
            found.why,
            found.kept.mean_concurrency if found.kept else None,
        )

    def _seconds(self, runs: LevelRuns, rate: float) -> float:
        """Return the most time for a level: no less than twice what a verdict takes."""
        least = fewest_seconds(runs.contract, rate, self._request_seconds)
        return max(float(self.wanted.seconds), 2 * least)

    def _measurement(
        self,
        began: dt.datetime,
        fleet: _Fleet,
        runs: LevelRuns,
        client: Ceiling,
        what: tuple[tuple[LevelSummary, ...], Found],
    ) -> Measurement:
        levels, found = what
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
            _work_json(runs.work, self.wanted.seed, self.wanted.trace),
            "closed" if self.wanted.concurrency is not None else "open",
            levels,
            found,
            result.Client(
                client.processes,
                client.requests_per_second,
                max(runs.costs, default=None),
                None if self.wanted.concurrency is not None else max(runs.lags, default=None),
                "controller",
            ),
            subject_of(first, served, fleet.nodes, of_target),
        )

    def write(self, found: Measurement) -> tuple[Path, ...]:
        """Write a result's files, and return them: the result, its reports, its page."""
        folder = self.wanted.output or measurements_folder(self.inventory)
        file = result.write(found, folder)
        page = file.with_suffix(".html")
        write_whole(page, result_page.result_page(found))
        reports = []
        for number, each in enumerate(report_format.reports(found)):
            name = file.with_name(f"{file.stem}-{number}{result.REPORT_ENDING}")
            write_whole(name, report_format.text(each))
            reports.append(name)
        return (file, page, *reports)

    def print_result(self, found: Measurement, files: tuple[Path, ...]) -> None:
        """Print the levels, the answer, and where the files are."""
        table = new_table(
            "requests/s" if found.loop == "open" else "concurrent",
            "requests", "kept", "TTFT p99", "ITL p99", "e2e p99", "verdict",
        )  # fmt: skip
        for each in sorted(found.levels, key=lambda level: level.load):
            add_row(
                table,
                f"{each.load:.3g}",
                str(each.requests),
                f"{each.kept / each.requests:.1%}" if each.requests else "",
                *(
                    f"{times['p99']:.3f} s" if times else ""
                    for times in (each.ttft, each.itl, each.e2e)
                ),
                each.verdict,
            )
        display(table)
        click.echo()
        click.echo(printable(answer(found)))
        click.echo(printable(f"written: {files[0]} and {files[1].name}"))


class _Watched:
    """The replicas of a target, looked at while a guest is there."""

    def __init__(self, loads: Callable[[], list[guest.ServerLoad | str]], most: int) -> None:
        self._loads, self._most = loads, most
        self._reason = ""

    def look(self) -> None:
        """Look again and again; ends when it is killed."""
        while not self._reason:
            gevent.sleep(GUEST_LOOK_SECONDS)
            try:
                loads = self._loads()
            except FleetError as error:
                self._reason = error.problems[0]
            else:
                self._reason = guest.stop_reason(loads)

    def reason(self, in_flight: int) -> str:
        """Return why the load has to end; "": it may go on."""
        if self._reason:
            return f"stopped as a guest: {self._reason}"
        if in_flight > self._most:
            return f"stopped as a guest: {in_flight} requests under way, {self._most} are its share"
        return ""


class _Progress:
    """A line on stderr every ten seconds of a level."""

    def __init__(self) -> None:
        self._next = 10.0

    def __call__(self, load: float, beat: Beat, _level: Level) -> None:
        if beat.now < 10:
            self._next = 10.0
        if beat.now >= self._next:
            self._next = beat.now + 10
            say(f"  {load:.3g}: {beat.now:.0f} s, {len(beat.in_flight)} requests under way")


def say(text: str) -> None:
    """Print a line for the operator who waits."""
    click.echo(printable(text), err=True)


def say_level(level: LevelSummary) -> None:
    """Print what a level showed."""
    unit = "requests/s" if level.rate is not None else "concurrent requests"
    say(f"{level.load:.3g} {unit}: {level.verdict}: {level.why}")


def answer(found: Measurement) -> str:
    """Return the answer in one sentence."""
    unit = "requests/s" if found.loop == "open" else "concurrent requests"
    if found.found.kept is None:
        return f"{found.model}, {found.target}: {found.found.why}"
    missed = f", misses them at {found.found.missed:.3g}" if found.found.missed else ""
    return (
        f"{found.model}, {found.target}: meets its objectives at {found.found.kept:.3g} {unit}"
        f"{missed} ({found.found.status}: {found.found.why})"
    )


def _single(level: LevelSummary) -> Found:
    kept = level.load if level.verdict == "kept" else None
    missed = level.load if level.verdict == "missed" else None
    status = {"kept": "ceiling", "missed": "not even one", "not known": "not known"}[level.verdict]
    return Found(kept, missed, status, level.why, level.mean_concurrency)


def _stopped(levels: list[LevelSummary], why: str) -> Found:
    kept = [each.rate for each in levels if each.verdict == "kept" and each.rate is not None]
    return Found(max(kept, default=None), None, "ceiling" if kept else "not known", why)


def trace_work(name: str, trace: Trace) -> workloads.Workload:
    """Return a trace's largest request: for the first one, and for what a client can do."""
    largest = max(trace.entries, key=lambda each: each.prompt_tokens + each.tokens)
    return workloads.Workload(
        Path(name).name,
        workloads.fixed(largest.prompt_tokens),
        workloads.fixed(largest.tokens),
        "the largest request of a trace",
    )


def _work_json(work: Work, seed: int, trace: str | None) -> dict[str, Any]:
    if trace:
        return {"trace": Path(trace).name, "seed": seed}
    if isinstance(work, WrittenPrompts):
        return {"prompts": work.name, "count": len(work), "seed": seed}
    return {
        "preset": work.name,
        "input": str(work.input),
        "output": str(work.output),
        "prefix_tokens": work.prefix_tokens,
        "prefix_groups": work.prefix_groups,
        "turns": work.turns,
        "seed": seed,
    }
