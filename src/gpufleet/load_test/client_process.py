"""Run the load clients of one level: start the clients, merge their results, and stop them.

Each client is a separate process of `on_node/load/client.py` with its own event loop, because one
Python process uses one core. Clients end when their input closes, so they never outlive this
process.
"""

from __future__ import annotations

import bisect
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from gpufleet.errors import FleetError
from gpufleet.load_test.arrivals import Arrivals, client_seed
from gpufleet.load_test.client_lines import Client, ClientError, Totals
from gpufleet.load_test.client_transport import Link, Transport, local_client
from gpufleet.load_test.outcomes import Outcome
from gpufleet.remote import payload

CONNECTIONS = 8192
"""
The maximum number of connections per client. A request that needs one more fails as "client limit".
"""
START_SECONDS = 0.2
"""
Seconds between the start command and the first possible arrival.

In this time, every client receives the command.
"""
READY_SECONDS = 30.0
SILENT_SECONDS = 20.0
"""
After this time in seconds without output, a client counts as failed.

Clients print a line each second.
"""
_POLL_SECONDS = 0.02
_DECIDE_SECONDS = 0.5
"""
The minimum number of seconds between two calls of `decide`.

Each client sends a heartbeat once a second, at a different moment.
"""
_END_SECONDS = 10.0
"""
How long the controller waits for the clients' last lines, in seconds.

The wait begins at the time limit of the last request.
"""


@dataclass(frozen=True)
class LoadSpec:
    """One level of load. The repr contains no key and no prompt."""

    url: str
    """Scheme, host and port of the server."""
    path: str
    """The workload's `path`."""
    arrivals: Arrivals
    requests: Callable[[int, int], Mapping[str, Any]] = field(repr=False)
    """The function that the workload's `requests(...)` returned."""
    seed: int
    seconds: float
    """Seconds after the begin of the level from which clients send no more requests."""
    give_up_seconds: float
    """An unfinished request fails when this time in seconds has passed since its due time."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of every request, such as `{"Authorization": "Bearer ..."}`."""
    certificate: str | None = field(default=None, repr=False)
    """
    The certificate of the authority for https, in PEM format.

    None: clients use the system's authorities.
    """
    drain_seconds: float | None = None
    """
    When `decide` ends the level, requests in flight get this time in seconds to finish.

    None: they get `give_up_seconds`.
    """
    connections: int = CONNECTIONS

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise FleetError(
                "the URL to measure has no scheme and host, or has a user: write http://HOST:PORT"
            )
        for name, value in self.headers.items():
            if not (name + value).isprintable() or not (name + value).isascii():
                raise FleetError(
                    f"the value of the header {name!r} contains a line end or another character "
                    "that HTTP does not allow: write the key as one line of ASCII"
                )

        try:
            ssl.create_default_context(cadata=self.certificate)
        except (ssl.SSLError, ValueError):
            raise FleetError(
                "the certificate of the authority that signed the server's certificate is not in "
                "PEM format: use a file that begins with -----BEGIN CERTIFICATE-----"
            ) from None

    def parameters(self, process: int, processes: int) -> dict[str, Any]:
        """Return one client's parameters."""
        return {
            "url": self.url,
            "path": self.path,
            "headers": dict(self.headers),
            "certificate": self.certificate,
            "arrivals": self.arrivals.part(process, processes),
            "seed": client_seed(self.seed, process),
            "requests": self.requests(process, processes),
            "process": process,
            "processes": processes,
            "seconds": self.seconds,
            "give_up_seconds": self.give_up_seconds,
            "connections": self.connections,
        }


@dataclass(frozen=True)
class Beat:
    """The progress of a level, computed from the clients' heartbeats about once a second."""

    now: float
    """
    Seconds since the level began.

    Every request that was due until this time has either finished or is in `in_flight`.
    """
    in_flight: tuple[float, ...]
    """The sorted due times of unfinished requests."""
    lag_p99: float
    """
    The lag of the slowest client during the last second.

    A lag is the time in seconds between the due time of a request and its sending. In a closed
    loop, it is the delay of the client's event loop.
    """
    cpu_share: float
    """The part of one core that the busiest client used in the last second."""


@dataclass(frozen=True)
class LevelRun:
    """
    The result of running a level.

    It contains why the level ended, which requests were dropped, and the clients' CPU time and lag.
    """

    ended: Literal["decided", "seconds", "schedule"]
    seconds: float
    """
    Seconds from the begin of the level until it was decided, or until clients stopped sending.
    """
    unfinished: tuple[float, ...]
    """
    The due times of the requests that were dropped at the end of the level.

    They count neither as served nor as failed.
    """
    clients: tuple[Totals, ...]
    peak_cpu_share: float
    """The part of one core that the busiest client used in its busiest second."""

    @property
    def sent(self) -> int:
        """Return the number of sent requests."""
        return sum(each.sent for each in self.clients)

    @property
    def lag_p99(self) -> float:
        """Return the highest `lag_p99` of all clients."""
        return max(each.lag_p99 for each in self.clients)

    @property
    def cpu_seconds(self) -> float:
        """Return the clients' CPU seconds per request."""
        return sum(each.cpu_seconds for each in self.clients) / max(1, self.sent)

    @property
    def short(self) -> int:
        """
        Return the number of answers shorter than requested, because the server ignored the length.
        """
        return sum(each.short for each in self.clients)


def run_level(
    spec: LoadSpec,
    processes: int,
    on_outcome: Callable[[Outcome], None],
    decide: Callable[[float, Sequence[float]], bool],
    *,
    on_beat: Callable[[Beat], None] | None = None,
    transport: Transport = local_client,
    sleep: Callable[[float], None] = time.sleep,
) -> LevelRun:
    """
    Run one level of load against a server until it has ended.

    About once a second the function calls `decide(now, in_flight)`. If `decide` returns True, the
    level ends. `in_flight` has the sorted due times of unfinished requests. Before each call,
    `on_outcome` receives every finished request that was due until `now`. `on_outcome` receives no
    request that was due after `now`, so that fast requests do not precede slow ones. It receives
    the remaining requests when the clients end. `sleep` waits between two reads of the clients'
    output.

    Raises `FleetError` if a client ends early. Any exception ends all clients, also an exception of
    `decide`, `on_outcome` or `on_beat`.
    """
    processes = min(processes, spec.arrivals.most_processes() or processes)
    given = [spec.parameters(process, processes) for process in range(processes)]
    drain = spec.give_up_seconds if spec.drain_seconds is None else spec.drain_seconds
    links: list[Link] = []
    clients: list[Client] = []
    try:
        for each in given:
            links.append(transport(payload.program("load/client", **each)))
            clients.append(Client(links[-1]))
        wait_for(clients, lambda client: client.ready)
        most = spec.seconds + spec.give_up_seconds + _END_SECONDS
        return LevelLoop(clients, on_outcome, decide, on_beat, sleep).run(drain, most)
    except ClientError as problem:
        why = [link.close() for link in links]
        raise FleetError(
            f"a load client {problem}{_in_brackets(why)}, so this level has no result: measure "
            "again"
        ) from None
    finally:
        for link in links:
            link.close()


class LevelLoop:
    """The loop that runs one level with clients that are ready."""

    def __init__(
        self,
        clients: Sequence[Client],
        on_outcome: Callable[[Outcome], None],
        decide: Callable[[float, Sequence[float]], bool],
        on_beat: Callable[[Beat], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clients, self._sleep = clients, sleep
        self._on_outcome, self._decide, self._on_beat = on_outcome, decide, on_beat
        self._held: list[Outcome] = []
        """
        Finished requests, sorted by due time, that `on_outcome` has not received yet.

        At least one client has not reported up to their due time.
        """
        self._decided_at: float | None = None

    def run(self, drain: float, seconds: float) -> LevelRun:
        """
        Start the clients, and run until all have ended.

        When `decide` ends the level, requests in flight get `drain` seconds to finish. Raises
        `ClientError` if a client ends early, or if a client has not ended after `seconds`.
        """
        for client in self._clients:
            client.say(f"start {START_SECONDS}")
        last, until = 0.0, time.monotonic() + START_SECONDS + seconds
        while not all(client.totals for client in self._clients):
            self._sleep(_POLL_SECONDS)
            self._read()
            now = min(client.now for client in self._clients)
            if self._decided_at is None and last + _DECIDE_SECONDS <= now < float("inf"):
                last = now
                if self._judge(now):
                    self._decided_at = now
                    until = time.monotonic() + drain + _END_SECONDS
                    for client in self._clients:
                        client.say(f"stop {drain}")
            if time.monotonic() > until:
                raise ClientError("did not end in time")
        self._deliver(float("inf"))
        return self._result()

    def _read(self) -> None:
        for client in self._clients:
            for outcome in client.read():
                bisect.insort(self._held, outcome, key=lambda each: each.due)
            if not client.totals and client.silent_seconds > SILENT_SECONDS:
                raise ClientError(f"has printed nothing for {SILENT_SECONDS:g} s")

    def _judge(self, now: float) -> bool:
        self._deliver(now)
        due = sorted(due for client in self._clients for due in client.in_flight(now))
        if self._on_beat is not None:
            lag = max(client.lag_p99 for client in self._clients)
            share = max(client.cpu_share for client in self._clients)
            self._on_beat(Beat(now, tuple(due), lag, share))
        return self._decide(now, due)

    def _deliver(self, now: float) -> None:
        count = bisect.bisect_right(self._held, now, key=lambda outcome: outcome.due)
        for outcome in self._held[:count]:
            self._on_outcome(outcome)
        del self._held[:count]

    def _result(self) -> LevelRun:
        totals = tuple(client.totals for client in self._clients if client.totals)
        ended: Literal["decided", "seconds", "schedule"] = "decided"
        if self._decided_at is None:
            whole = all(each.end == "schedule" for each in totals)
            ended = "schedule" if whole else "seconds"
        return LevelRun(
            ended=ended,
            seconds=self._decided_at or max(each.stopped_at for each in totals),
            unfinished=tuple(sorted(due for each in totals for due in each.unfinished)),
            clients=totals,
            peak_cpu_share=max(client.peak_cpu_share for client in self._clients),
        )


def wait_for(
    clients: Sequence[Client],
    ready: Callable[[Client], bool],
    seconds: float = READY_SECONDS,
) -> None:
    """
    Read the clients' output until `ready` is true for each client.

    Raises `ClientError` after `seconds`.
    """
    until = time.monotonic() + seconds
    while not all(map(ready, clients)):
        if time.monotonic() > until:
            raise ClientError(f"was not ready within {seconds:g} s")
        time.sleep(_POLL_SECONDS)
        for client in clients:
            client.read()


def _in_brackets(reasons: Sequence[str]) -> str:
    found = next((each for each in reasons if each), "")
    return f" ({found})" if found else ""
