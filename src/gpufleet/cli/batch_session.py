"""Run `gpufleet batch` once: check, observe the fleet's load, send the lines, print the summary.

Border: the module queries nodes over SSH, and the fleet over HTTP.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gevent

from gpufleet.batch.asking import CONNECT_SECONDS, Asker
from gpufleet.batch.batch_input import BatchInput, CheckedInput, InputRules
from gpufleet.batch.batch_output import BatchOutput
from gpufleet.batch.batch_run import BatchRun, Moment
from gpufleet.batch.replies import Reply, Totals
from gpufleet.cli.measure_output import say
from gpufleet.cli.served_fleet import NodeAnswers, ServedFleet, declared_fleet
from gpufleet.errors import FleetError
from gpufleet.inventory.loader import read
from gpufleet.load_test import guest, load_target
from gpufleet.load_test.level_runs import read_key
from gpufleet.load_test.load_target import Target, TargetDeclaration
from gpufleet.progress import Count, Pace
from gpufleet.settings.base import LOOPBACK
from gpufleet.settings.gateway_settings import Gateway
from gpufleet.upgrade.run.connections import open_nodes

ASK_AGAIN_SECONDS = 300.0
"""
Seconds between two queries of the nodes' status.

If a replica's load is unknown, the next query follows at once.
"""
REPLICA_BODY_MIB = 32
"""
The maximum size in MiB of a request that is sent to a replica, not to a gateway.

The value is the default limit of a gateway. vLLM has no limit.
"""
REPLICA_SECONDS = 3600.0
"""Time limit in seconds for the answer to a request that is sent to a replica, not to a gateway."""
CHECK_SECONDS = 30.0
"""Time limit in seconds for the answer to each empty test request before the first line."""
MOST_AT_ONCE = 512
"""The maximum number of concurrent requests: half of a process's default limit of open files."""


@dataclass(frozen=True)
class BatchOptions:
    """The parsed command line."""

    model: str
    input: Path
    output: Path
    replica: str | None
    gateway: str | None
    key_file: str | None
    ca_file: str | None
    share: float
    concurrency: int | None
    patience: int
    retry_failed: bool

    def __post_init__(self) -> None:
        if self.replica is not None and self.gateway is not None:
            raise FleetError("--replica and --gateway exclude each other: remove one of the two")


@dataclass(frozen=True)
class Summary:
    """The outcome of a run."""

    output: Path
    lines: int
    totals: Totals
    """Counts over all lines, including the lines of earlier runs."""
    seconds: float
    """The duration of this run in seconds."""
    stopped: str = ""
    """Why some lines have no answer, or "" if all lines are answered."""
    signal: int = 0
    """The signal that ended the run, or 0 if no signal ended it."""

    @property
    def left(self) -> int:
        """Return the number of lines without an answer."""
        return self.lines - self.totals.lines

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "output": str(self.output),
            "lines": self.lines,
            "answered": self.totals.answered,
            "failed": dict(sorted(self.totals.failed.items())),
            "left": self.left,
            "prompt_tokens": self.totals.prompt_tokens,
            "completion_tokens": self.totals.completion_tokens,
            "seconds": round(self.seconds, 1),
            "stopped": self.stopped,
        }


class Session:
    """
    One run of a batch against an inventory.

    Raises `FleetError` for an unknown model, replica or gateway.
    """

    def __init__(self, inventory_file: str, wanted: BatchOptions) -> None:
        self._inventory, self._wanted = inventory_file, wanted
        self._project = read(inventory_file)
        declared = declared_fleet(self._project)
        self._model = load_target.choose_model(declared, wanted.model)
        self._served_name = load_target.served_name(self._model, declared)
        self._gateway = _gateway(wanted, declared)

    def run(self) -> Summary:
        """
        Send the lines that have no answer in the output, and return the summary.

        Before the first request, raises `FleetError` with all mistakes found. Later, raises
        `FleetError` for a refused key or an output that cannot be written.
        """
        began = time.monotonic()
        wanted = self._wanted
        most_mib = self._gateway.max_body_mib if self._gateway else REPLICA_BODY_MIB
        rules = InputRules(self._served_name, most_mib << 20)
        with closing(BatchInput(wanted.input, rules)) as source:
            checked = source.check()
            opened = BatchOutput(
                wanted.output, checked, self._served_name, retry_failed=wanted.retry_failed
            )
            with closing(opened) as output:
                stopped, number = "", 0
                if output.totals.lines < checked.lines:
                    stopped, number = self._ask(source, checked, output)
                seconds = time.monotonic() - began
                return Summary(
                    wanted.output, checked.lines, output.totals, seconds, stopped, number
                )

    def _ask(
        self, source: BatchInput, checked: CheckedInput, output: BatchOutput
    ) -> tuple[str, int]:
        """Send the remaining lines. Return why lines remain, and the signal that ended the run."""
        with open_nodes(self._inventory) as nodes:
            fleet = ServedFleet(self._project, nodes)
            look = GuestLook(fleet, self._model, self._wanted, self._gateway)
            target = look.begin()
            key = read_key(target.key_file)
            if problem := load_target.key_problem(target, key, 0.0, look.answers.declared):
                raise FleetError(problem)
            with closing(self._asker(target, key)) as asker:
                _check_paths(asker, checked, target)
                left = checked.lines - output.totals.lines
                say(f"{target.name}, model {target.served_name}: {left} of {checked.lines} lines")
                run = BatchRun(
                    asker,
                    source.requests(output.done),
                    output,
                    look,
                    most=self._most,
                    seconds=self._request_seconds + CONNECT_SECONDS,
                    patience_seconds=self._wanted.patience,
                    on_beat=Progress(output.totals, checked.lines),
                )
                with _signals(run) as caught:
                    run.run()
                return run.stopped, caught[0] if caught else 0

    def _asker(self, target: Target, key: str) -> Asker:
        return Asker(
            target.url,
            f"/{self._model}" if self._gateway else "",
            key,
            ca_file=target.ca_file,
            seconds=self._request_seconds,
        )

    @property
    def _most(self) -> int:
        """
        Return the maximum number of concurrent requests.

        A gateway has a limit of connections from one address, and closes connections above the
        limit.
        """
        limits = [MOST_AT_ONCE, self._wanted.concurrency or MOST_AT_ONCE]
        # Only half, because other clients on this machine may use the same gateway.
        limits += [self._gateway.source_connections // 2] if self._gateway else []
        return min(limits)

    @property
    def _request_seconds(self) -> float:
        """
        Return the time limit in seconds for one request.

        For a gateway, it is the sum of the gateway's own limits, otherwise `REPLICA_SECONDS`.
        """
        found = self._gateway
        return found.queue_seconds + found.request_seconds if found else REPLICA_SECONDS


def _gateway(wanted: BatchOptions, declared: TargetDeclaration) -> Gateway | None:
    """Return the settings of the gateway that gets the lines, or None if a replica gets them."""
    if wanted.replica is not None or (wanted.gateway is None and not declared.gateways):
        return None
    node = load_target.choose_gateway(wanted.gateway, declared)
    found = declared.gateways[node].gateway
    if found is not None and found.listen in LOOPBACK:
        raise FleetError(
            f"{node}: the gateway listens only on localhost (`gateway.listen`), but the "
            "requests come from this machine: set `gateway.listen` to an address that this "
            "machine can reach"
        )
    return found


def _check_paths(asker: Asker, checked: CheckedInput, target: Target) -> None:
    """
    Raise `FleetError` if the server refuses the key, or has no route for some lines.

    The test requests are empty: servers answer with status 400 and compute nothing. If an answer is
    missing, the check of its route is skipped.
    """
    problems = []
    for path in checked.paths:
        reply = Reply()
        with gevent.Timeout(CHECK_SECONDS, False):
            reply = asker.ask(path, b"{}")
        if reply.status in (401, 403):
            raise FleetError(
                f"{target.url} refuses the key (status {reply.status}): compare "
                f"{target.key_file or '--key-file'} with the keys in `gateway.clients`"
            )
        if reply.status == 404:
            problems.append(
                f"{target.name} has no path {path} for {target.served_name} (status 404): "
                "remove the lines with that `url`, or choose a model that has this path"
            )
    if problems:
        raise FleetError(*problems)


class GuestLook:
    """
    Observes the replicas that get the lines.

    If an object of this class is called, it returns how many requests the batch may have in flight.
    """

    def __init__(
        self, fleet: ServedFleet, model: str, wanted: BatchOptions, gateway: Gateway | None
    ) -> None:
        self._fleet, self._model, self._wanted = fleet, model, wanted
        self._per_server = gateway.per_server if gateway else None
        self._asked_at = -math.inf

    def begin(self) -> Target:
        """Make the first observation. Raises `FleetError` if no replica's load is known."""
        self._ask_nodes()
        if self.answers.changes():
            say(
                "note: a deploy or an upgrade is changing the fleet; this batch still sends "
                "requests"
            )
        target, notes = self._target()
        for each in notes:
            say(f"note: {each}")
        if why := self.answers.declared.out.get(self._drained or ""):
            say(
                f"note: {self._drained} gets no requests from users ({why}); this batch sends to it"
            )
        guest.idle_slots(self._loads(target))
        return target

    def __call__(self, under_way: Callable[[], int]) -> guest.Allowance:
        """Return the maximum number of lines in flight now. It is 0 if the load is unknown."""
        try:
            if time.monotonic() - self._asked_at > ASK_AGAIN_SECONDS:
                self._ask_nodes()
            target, _ = self._target()
            before = under_way()
            loads = self._loads(target)
            if any(isinstance(each, str) for each in loads):
                self._asked_at = -math.inf
            return guest.allowance(loads, min(before, under_way()), self._wanted.share)
        except FleetError as error:
            self._asked_at = -math.inf
            return guest.Allowance(0, error.problems[0])

    def _ask_nodes(self) -> None:
        self.answers: NodeAnswers = self._fleet.ask_nodes()
        self._asked_at = time.monotonic()

    @property
    def _drained(self) -> str | None:
        """Return the named replica, which may be drained, or None while the fleet is changed."""
        return None if self.answers.changes() else self._wanted.replica

    def _target(self) -> tuple[Target, tuple[str, ...]]:
        return self._fleet.target(
            self._model,
            load_target.with_drained(self.answers.declared, self._drained),
            replica=self._wanted.replica,
            gateway=self._wanted.gateway,
            key_file=self._wanted.key_file,
            ca_file=self._wanted.ca_file,
        )

    def _loads(self, target: Target) -> list[guest.ServerLoad | str]:
        """
        Return the servers' loads.

        If the gateway queues requests, a server's slots are limited to the gateway's limit per
        server.
        """
        return [
            each
            if isinstance(each, str) or self._per_server is None or each.slots is None
            else replace(each, slots=min(each.slots, self._per_server))
            for each in self._fleet.loads(target, self.answers, drained=self._drained)
        ]


class Progress:
    """Prints progress lines on stderr: after 2 s, then every 5 s, and every 30 s after a minute."""

    def __init__(self, totals: Totals, lines: int) -> None:
        self._totals = totals
        self._pace = Pace(time.monotonic())
        self._count = Count("line", lines)

    def __call__(self, moment: Moment) -> None:
        now = time.monotonic()
        self._count.record(now, self._totals.lines)
        if not self._pace.is_due(now):
            return
        failed = self._totals.failed.total()
        parts = [self._count.text(), f"{moment.under_way} running"]
        parts += [f"{failed} failed"] if failed else []
        parts += [f"waiting: {moment.why}"] if moment.why else []
        say("  " + ", ".join(parts))


@contextmanager
def _signals(run: BatchRun) -> Iterator[list[int]]:
    """Stop the run on SIGINT or SIGTERM. The yielded list has the received signals."""
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        run.stop("interrupted")

    handlers = [gevent.signal_handler(each, stop, each) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield caught
    finally:
        for each in handlers:
            each.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
