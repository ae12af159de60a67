"""Run a batch: send lines within the throttle's limit, and write the answers.

Border. There is one greenlet for each request, one that reads the fleet's load, and one that syncs
answers to disk.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import gevent
from gevent.event import Event

from gpufleet.batch.batch_input import Line
from gpufleet.batch.batch_output import BatchOutput
from gpufleet.batch.replies import MOST_TRIES, Reply, back_off_seconds, judge, output_line
from gpufleet.batch.throttle import Throttle
from gpufleet.errors import FleetError
from gpufleet.load_test.guest import Allowance

LOOK_SECONDS = 3.0
SYNC_SECONDS = 1.0
_TICK_SECONDS = 0.5


class RequestSender(Protocol):
    """A sender of requests, such as `asking.Asker`."""

    def ask(self, path: str, body: bytes) -> Reply:
        """Send a request, and return its result."""


@dataclass(order=True)
class _Again:
    """A line that is sent again, and the time of its next try."""

    due: float
    number: int
    line: Line = field(compare=False)
    tries: dict[str, int] = field(compare=False)


@dataclass(frozen=True)
class Moment:
    """The progress of a batch at one time."""

    under_way: int
    why: str
    """The reason why no line is sent now, or "" while lines are sent."""


class BatchRun:
    """One run that sends all lines that have no answer."""

    def __init__(
        self,
        asks: RequestSender,
        lines: Iterator[Line],
        output: BatchOutput,
        look: Callable[[Callable[[], int]], Allowance],
        *,
        most: int | None,
        seconds: float,
        patience_seconds: float,
        look_seconds: float = LOOK_SECONDS,
        on_beat: Callable[[Moment], None] = lambda _moment: None,
    ) -> None:
        """
        Set the limits of the run.

        `look` reads the fleet's load and may block. Its argument is a function that counts the
        requests in flight. `seconds` is the time limit of one request. The run ends if there was no
        answer for `patience_seconds` and no request is in flight.
        """
        self._asks, self._lines, self._output = asks, lines, output
        self._look, self._seconds, self._patience = look, seconds, patience_seconds
        self._look_seconds, self._on_beat = look_seconds, on_beat
        self._throttle = Throttle(most, time.monotonic())
        self._jobs: set[gevent.Greenlet] = set()
        self._again: list[_Again] = []
        self._numbers = itertools.count()
        self._next: Line | None = None
        self._error: BaseException | None = None
        self._wake = Event()
        self._answered_at = time.monotonic()
        self.stopped = ""
        """Why the run ended before all lines were answered, or "" if all were answered."""

    def stop(self, why: str) -> None:
        """End the run. Requests in flight are abandoned, and the next run sends them again."""
        self.stopped = self.stopped or why
        self._wake.set()

    def run(self) -> None:
        """
        Send all lines, or stop with the reason in `stopped`.

        Raises `FleetError` if the key is refused, the certificate is not trusted, the input was
        changed, or the output cannot be written.
        """
        beside = [gevent.spawn(self._guard, each) for each in (self._watch, self._keep_synced)]
        try:
            while not self._is_over():
                self._begin_lines()
                self._on_beat(Moment(len(self._jobs), self._throttle.why(time.monotonic())))
                self._wake.wait(_TICK_SECONDS)
                self._wake.clear()
        finally:
            gevent.killall([*self._jobs, *beside], timeout=5)
            self._output.sync()

    # -- which line is next --------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self._error:
            raise self._error
        if self.stopped:
            return True
        if self._jobs:
            return False
        now = time.monotonic()
        if not self._again and self._peek() is None:
            return True
        if now - self._answered_at > self._patience:
            why = self._throttle.why(now) or "the fleet answered no request"
            self.stopped = f"no line got an answer for {self._patience:.0f} s: {why}"
        return bool(self.stopped)

    def _begin_lines(self) -> None:
        while len(self._jobs) < self._throttle.limit(now := time.monotonic()):
            if (each := self._take(now)) is None:
                return
            job = gevent.Greenlet(self._guard, lambda each=each: self._ask(each))
            self._jobs.add(job)
            job.link(self._ended)
            job.start()

    def _take(self, now: float) -> _Again | None:
        """Return the next line to send: a line whose next try is due, or a new line."""
        if self._again and self._again[0].due <= now:
            return heapq.heappop(self._again)
        # Lines that wait for their next try are in memory, so their number is limited.
        if len(self._again) > 16 + len(self._jobs) or (line := self._peek()) is None:
            return None
        self._next = None
        return _Again(0.0, next(self._numbers), line, {})

    def _peek(self) -> Line | None:
        if self._next is None:
            self._next = next(self._lines, None)
        return self._next

    # -- greenlets -----------------------------------------------------------------------------

    def _guard(self, work: Callable[[], Any]) -> None:
        """Run a task. If the task raises an exception, the run ends."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  # raised again where the run is waited for
            self._error = self._error or error
            self._wake.set()

    def _ended(self, job: gevent.Greenlet) -> None:
        self._jobs.discard(job)
        self._wake.set()

    def _ask(self, each: _Again) -> None:
        asked_at = time.monotonic()
        reply = Reply(problem="timeout")
        with gevent.Timeout(self._seconds, False):
            reply = self._asks.ask(each.line.path, each.line.body)
        verdict = judge(reply)
        if verdict.kind == "refused":
            raise FleetError(
                f"the fleet refuses the key (status {verdict.status}): check --key-file and "
                "`gateway.clients`. gpufleet wrote no answer for this line"
            )
        now = time.monotonic()
        if verdict.holds:
            self._throttle.record_failure(asked_at, now, reply.retry_after)
        else:
            self._throttle.record_success()
        if verdict.kind != "answer":
            tries = each.tries[verdict.kind] = each.tries.get(verdict.kind, 0) + 1
            if tries < MOST_TRIES[verdict.kind]:
                each.due = now + back_off_seconds(sum(each.tries.values()))
                heapq.heappush(self._again, each)
                return
        self._output.add(output_line(each.line, verdict))
        self._answered_at = now

    def _watch(self) -> None:
        while True:
            found = self._look(lambda: len(self._jobs))
            self._throttle.allow(found, time.monotonic())
            self._wake.set()
            gevent.sleep(self._look_seconds)

    def _keep_synced(self) -> None:
        pool = gevent.get_hub().threadpool
        while True:
            gevent.sleep(SYNC_SECONDS)
            self._output.sync(lambda call, file: pool.apply(call, (file,)))
