"""RUNS ON THE NODE: send requests to an OpenAI server when they are due, and time the answers.

Takes (`PARAMETERS`):
  url           "http://ADDRESS:PORT" or "https://ADDRESS:PORT"
  path          "/v1/completions", "/v1/chat/completions", or the path for another kind of model
  headers       {name: value}: headers of every request, including the API key
  certificate   PEM of the authority that verifies the server's certificate; null: the system's
                authorities
  arrivals      one of these forms:
                - {"rate": requests per second}: a Poisson process
                - {"schedule": [[due, prompt tokens, tokens, [blocks]], ...]}: a trace
                - {"concurrency": n, "spread": seconds}: a closed loop of n places, which begin
                  within that time
                - one of the first two forms with "concurrency": n. A request that is due waits
                  until one of n places is free
  seed          seed of the random arrivals and lengths
  requests      {"kind": "written", or one of `DRAWN`, ...}: the form of the requests, as in
                request_draws or media_requests
  process, processes  the number of this client, and the number of all clients
  seconds       time in which requests are sent
  give_up_seconds  a request fails if it is not done this long after it was due
  connections   the most connections to open

The input has two commands. `start SECONDS` begins the load after that time. After `stop SECONDS`,
no more requests are sent, and the requests in flight are ended after that time. The end of the
input ends the program at once.

Prints JSON lines:
- first {"ready": 1, "connections": N}
- after `start`, a list for each request when it ends: [due, sent, first, done, prompt tokens,
  tokens, [microseconds between events], error]
- once a second {"now", "in_flight": [due, ...], "lag_p99", "cpu_share", "connections"}. Each
  request that was due until `now` has been printed, or it is in `in_flight`
- last {"end": "stopped", "seconds" or "schedule", ...} (`Load.totals`)
Times are seconds from the start of the load. Of an answer, only numbers are printed. If a request
fails, a word of failure_reasons is printed too.

A request is sent up to 1 ms after it is due, because epoll's timeouts are whole milliseconds.
Latencies still count from `due`. The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import math
import sys
import time
from array import array
from typing import Any, Deque, Dict, Iterator, List, Optional, Tuple

from gpufleet.on_node.load.connection_pool import Address, Pool
from gpufleet.on_node.load.controller_pipe import CommandReader, LineWriter
from gpufleet.on_node.load.failure_reasons import STOPPED, TIMEOUT
from gpufleet.on_node.load.http_stream import Exchange
from gpufleet.on_node.load.media_requests import PictureRequests, SoundRequests
from gpufleet.on_node.load.request_draws import (
    RESTING_SECONDS,
    PooledRequests,
    TokenRequests,
    WrittenRequests,
    arrival_times,
)

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}

DRAWN: "dict[str, Any]" = {
    "tokens": TokenRequests,
    "pooled": PooledRequests,
    "pictures": PictureRequests,
    "sounds": SoundRequests,
}
TICK_SECONDS = 0.05
BEAT_SECONDS = 1.0
AFTER_FAILURE_SECONDS = 1.0
"""
Seconds that a place of a closed loop waits after a failure. Without this pause, a server that
refuses requests at once would get thousands of requests per second.
"""
DRAIN_SECONDS = 60.0
"""Time in seconds that the controller has to read the last lines."""

# (prompt tokens, answer tokens, blocks that other prompts have too). If it is None, the next draw
# determines the request.
_Entry = Optional[Tuple[int, int, List[int]]]


class Load:
    """The requests in flight, and the schedule of new requests."""

    def __init__(self, given: Dict[str, Any], writer: LineWriter) -> None:
        self.loop = asyncio.get_running_loop()
        self.writer = writer
        self.given = given
        self.zero = math.inf
        """Time when the load starts, by the loop's clock."""
        self.ended = ""
        """Reason why no more requests are sent, or "" while requests are sent."""
        self.over: "asyncio.Future[None]" = self.loop.create_future()
        self.pool = Pool(Address(given), given["connections"], self.now, self._finished)
        form = given["requests"]
        self._requests: Any = (
            WrittenRequests(form)
            if form["kind"] == "written"
            else DRAWN[form["kind"]](form, given["seed"], given["process"], given["processes"])
        )
        self._arrivals = arrivals_of(given)
        self._places: Optional[int] = given["arrivals"].get("concurrency")
        self._next: Tuple[float, _Entry] = (math.inf, None)
        self._waiting: Deque[Tuple[float, _Entry]] = collections.deque()
        self._active: Dict[Exchange, None] = {}
        self._unfinished: List[float] = []
        self._sent = self._short = 0
        self._beat_lags: List[float] = []
        self._lags = array("f")
        self._began = self._last_beat = (0.0, 0.0)

    def now(self) -> float:
        """Return the seconds since the load began."""
        return self.loop.time() - self.zero

    def command(self, line: str) -> None:
        """Execute a command line of the controller."""
        word, _, value = line.partition(" ")
        if word == "start" and self.zero == math.inf:
            self._start(float(value))
        elif word == "stop":
            self.stop("stopped", float(value))

    def stop(self, why: str, seconds: float = math.inf) -> None:
        """
        Send no new requests. Wait up to `seconds` for the requests in flight.
        """
        if not self.ended:
            self.ended = why
            self._next = (math.inf, None)
            self._unfinished += [due for due, _ in self._waiting]
            self._waiting.clear()
        if seconds < math.inf:
            self.loop.call_later(max(0.0, seconds), self._drop)
        self._look_for_end()

    def totals(self) -> Dict[str, Any]:
        """
        Return the data of the last line.

        They are the reason for the end, the open requests, and the CPU time of this process.
        """
        wall = max(1e-9, self.loop.time() - self._began[0])
        processor = time.process_time() - self._began[1]
        return {
            "end": self.ended,
            "now": round(max(0.0, self.now()), 6),
            "sent": self._sent,
            "unfinished": [round(due, 6) for due in sorted(self._unfinished)],
            "lag_p99": percentile_99(self._lags),
            "cpu_seconds": round(processor, 6),
            "cpu_share": round(processor / wall, 4),
            "wall_seconds": round(wall, 6),
            "connects": self.pool.connects,
            "short": self._short,
        }

    def _start(self, seconds: float) -> None:
        self.zero = self.loop.time() + seconds
        self._began = self._last_beat = (self.loop.time(), time.process_time())
        if self._arrivals is not None:
            rate = self.given["arrivals"].get("rate", 1.0)
            self._requests.stagger(round(rate * RESTING_SECONDS))
            self._next = next(self._arrivals, self._next)
            self._dispatch()
        else:
            places = self._places or 1
            self._requests.stagger(places)
            spread = self.given["arrivals"]["spread"]
            for place in range(places):
                begin = self.zero + spread * place / places
                self.loop.call_at(begin, self._take_place)
        self.loop.call_at(self.zero + self.given["seconds"], self.stop, "seconds")
        self.loop.call_at(self.zero + BEAT_SECONDS, self._beat)
        self._tick(self.loop.time())
        gc.freeze()

    def _drop(self) -> None:
        for exchange in list(self._active):
            self.pool.give_up(exchange, STOPPED)
        self._look_for_end()

    def _look_for_end(self) -> None:
        if not self.ended and self._arrivals is not None and self._next[0] == math.inf:
            if self._waiting:
                return
            self.ended = "schedule"
        if self.ended and not self._active and not self.over.done():
            self.over.set_result(None)

    def _dispatch(self) -> None:
        """Send the requests that are due, and schedule the next call."""
        assert self._arrivals is not None
        while self._next[0] <= self.now():
            due, entry = self._next
            self._next = next(self._arrivals, (math.inf, None))
            if self._places is not None and len(self._active) >= self._places:
                self._waiting.append((due, entry))
            else:
                self._send(due, entry)
        if self._next[0] < math.inf:
            self.loop.call_at(self.zero + self._next[0], self._dispatch)
        else:
            self._look_for_end()

    def _take_place(self) -> None:
        """Send the next request of one place of the closed loop."""
        if not self.ended:
            self._send(self.now(), None)

    def _send(self, due: float, entry: _Entry) -> None:
        now = self.now()
        if self._places is None:
            self._note_lag(now - due)
        requests = self._requests
        prepared = requests.next() if entry is None else requests.replayed(*entry)
        chat = self.pool.address.chat
        exchange = Exchange(due, now, chat=chat, judge=prepared.judge)
        exchange.prompt_tokens, exchange.asked = prepared.prompt_tokens, prepared.tokens
        exchange.resume = prepared.resume
        self._active[exchange] = None
        self._sent += 1
        self.pool.send(exchange, prepared)

    def _finished(self, exchange: Exchange) -> None:
        """Print a finished request, and schedule the next request of its place."""
        if exchange not in self._active:
            return  # the request was given up before
        del self._active[exchange]
        exchange.holder = None
        if exchange.error == STOPPED:
            self._unfinished.append(exchange.due)
        else:
            if exchange.resume is not None and not exchange.error:
                exchange.resume()
            self._short += not exchange.error and exchange.tokens < exchange.asked
            self.writer.write(outcome_line(exchange))
        if self._waiting:
            self.loop.call_soon(self._send_waiting)
        elif self._arrivals is None and not self.ended:
            pause = AFTER_FAILURE_SECONDS if exchange.error else 0.0
            self.loop.call_later(pause, self._take_place)
        self._look_for_end()

    def _send_waiting(self) -> None:
        if self._waiting and len(self._active) < (self._places or 0):
            self._send(*self._waiting.popleft())

    def _tick(self, due: float) -> None:
        """Fail the requests that are too old. In a closed loop, record the event loop's delay."""
        if self._places is not None:
            self._note_lag(self.loop.time() - due)
        too_old = self.now() - self.given["give_up_seconds"]
        while self._waiting and self._waiting[0][0] <= too_old:
            late = Exchange(self._waiting.popleft()[0], self.now())
            late.error = TIMEOUT
            self.writer.write(outcome_line(late))
        for exchange in list(self._active):
            if exchange.due > too_old:
                break
            self.pool.give_up(exchange, TIMEOUT)
        again = self.loop.time() + TICK_SECONDS
        self.loop.call_at(again, self._tick, again)

    def _note_lag(self, seconds: float) -> None:
        self._beat_lags.append(seconds)
        self._lags.append(seconds)

    def _beat(self) -> None:
        clock, processor = self.loop.time(), time.process_time()
        share = (processor - self._last_beat[1]) / max(1e-9, clock - self._last_beat[0])
        self._last_beat = (clock, processor)
        in_flight = [*(each.due for each in self._active), *(due for due, _ in self._waiting)]
        line = {
            # If the next arrival is itself late, nothing is known yet about the time after it.
            "now": round(min(self.now(), self._next[0] - 1e-6), 6),
            "in_flight": [round(due, 6) for due in in_flight],
            "lag_p99": percentile_99(self._beat_lags),
            "cpu_share": round(share, 4),
            "connections": self.pool.open,
        }
        self._beat_lags = []
        self.writer.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.loop.call_later(BEAT_SECONDS, self._beat)


def arrivals_of(given: Dict[str, Any]) -> Optional[Iterator[Tuple[float, _Entry]]]:
    """
    Return the times of requests, or None for a closed loop, where answers determine the times.
    """
    arrivals = given["arrivals"]
    if "rate" in arrivals:
        times = arrival_times(arrivals["rate"], "%s/arrivals" % (given["seed"],))
        return ((due, None) for due in times)
    if "schedule" in arrivals:
        return (
            (due, (count, tokens, blocks)) for due, count, tokens, blocks in arrivals["schedule"]
        )
    return None


def outcome_line(exchange: Exchange) -> bytes:
    """Return the line for the controller with a request's outcome."""
    first = "null" if exchange.first is None else "%.6f" % exchange.first
    done = "null" if exchange.done is None else "%.6f" % exchange.done
    return (
        "[%.6f,%.6f,%s,%s,%d,%d,[%s],%s]\n"
        % (
            exchange.due,
            exchange.sent,
            first,
            done,
            exchange.prompt_tokens,
            exchange.tokens or exchange.events,
            ",".join(map(str, exchange.gaps)),
            json.dumps(exchange.error),
        )
    ).encode()


def percentile_99(lags: Any) -> float:
    """
    Return the smallest delay in seconds that 99 % of the delays do not exceed.

    Without any delays, the result is 0.0.
    """
    return round(sorted(lags)[math.ceil(0.99 * len(lags)) - 1], 6) if lags else 0.0


async def measure(given: Dict[str, Any]) -> None:
    """Generate load from the controller's `start` to its `stop`."""
    loop = asyncio.get_running_loop()
    defect: "asyncio.Future[None]" = loop.create_future()

    def note(_: Any, context: Dict[str, Any]) -> None:
        """
        Print no traceback to standard error, because errors of connections are requests' outcomes.
        """
        problem = context.get("exception")
        if problem is not None and not isinstance(problem, OSError) and not defect.done():
            defect.set_exception(problem)

    loop.set_exception_handler(note)
    writer = LineWriter(loop)
    load = Load(given, writer)
    await load.pool.address.resolve()
    CommandReader(loop, load.command)
    writer.write(b'{"ready":1,"connections":%d}\n' % load.pool.limit)
    await asyncio.wait([load.over, defect], return_when=asyncio.FIRST_COMPLETED)
    if defect.done():
        defect.result()
    writer.write(json.dumps(load.totals(), separators=(",", ":")).encode() + b"\n")
    await asyncio.wait_for(writer.drained.wait(), DRAIN_SECONDS)


def main() -> None:
    """
    Run the measurement.

    If this program itself fails, report the place in its source, but never the data.
    """
    try:
        asyncio.run(measure(PARAMETERS))
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        name = trace.tb_frame.f_code.co_filename if trace else "?"
        where = "%s in %s, line %d" % (type(error).__name__, name, trace.tb_lineno if trace else 0)
        print(json.dumps({"fault": where}))
        sys.exit(1)


if __name__ == "__main__":
    main()
