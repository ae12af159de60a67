"""
Measure the highest rate of the load clients themselves, against a server that computes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpufleet.errors import FleetError
from gpufleet.load_test.arrivals import ClosedLoop
from gpufleet.load_test.client_lines import Client, ClientError
from gpufleet.load_test.client_process import LevelLoop, LoadSpec, wait_for
from gpufleet.load_test.client_transport import Link, Transport, local_client
from gpufleet.load_test.media_work import PictureWork, SoundWork
from gpufleet.load_test.outcomes import Outcome
from gpufleet.load_test.pooled_work import PooledWork
from gpufleet.load_test.workloads import TokenRange, Workload
from gpufleet.on_node.load.failure_reasons import CLIENT_LIMIT
from gpufleet.remote import payload

_PACED_PLACES = 32
"""
Requests in flight per client while the client reads each token separately, as under real load.
"""
_FULL_PLACES = 128
"""
Requests in flight per client at which the client is always busy.

Tokens arrive faster than the client reads them.
"""
_SPREAD_SECONDS, _RAMP_SECONDS = 0.1, 0.3
_MOST_SECONDS = 60.0
"""Time limit in seconds of one run of the clients. It is long enough for a busy machine."""


@dataclass(frozen=True)
class Ceiling:
    """The clients' highest rate on this machine, against servers that compute nothing."""

    processes: int
    requests_per_second: float
    """
    The rate of all clients together if servers answer immediately and run on the clients' cores.

    At this rate, the clients read tokens late, because tokens queue in the clients.
    """
    cpu_seconds: float
    """
    A client's CPU seconds per request while the client reads each token as soon as it arrives.
    """
    prompt_tokens: int
    tokens: int
    """Tokens per answer. Each token is one event. 0: the answer is a single document."""
    cores: int

    def rate_at(self, share: float) -> float:
        """
        Return the requests per second at which the clients use `share` of their cores.

        >>> Ceiling(1, 400.0, 0.0025, 512, 128, cores=2).rate_at(0.5)
        200.0
        """
        return min(self.processes, self.cores) * share / self.cpu_seconds


def measure_ceiling(
    processes: int,
    work: Workload | PooledWork | PictureWork | SoundWork,
    *,
    seconds: float = 3.0,
    cores: int | None = None,
    transport: Transport = local_client,
) -> Ceiling:
    """
    Measure the clients' highest rate for requests of this workload.

    The measurement takes `seconds` and the time to start all clients twice. Each client has its own
    server on the same machine. `cores` is the number of cores of that machine, by default the
    number of this machine. The measurement does not use TLS, with which each request costs a client
    more. Raises `FleetError` if a client or server ends early.
    """
    tokens = round(work.mean_tokens)
    answer = None if isinstance(work, Workload) else work.example_answer()
    servers: list[Link] = []
    try:
        program = payload.program("load/ceiling_server", tokens=tokens, answer=answer)
        servers.extend(transport(program) for _ in range(processes))
        ports = _ports([Client(server) for server in servers])
        _, cost = _run(_PACED_PLACES, ports, work, seconds / 2, transport)
        rate, _ = _run(_FULL_PLACES, ports, work, seconds / 2, transport)
    except ClientError as problem:
        raise FleetError(
            f"gpufleet cannot measure the load client's own limit, because the client {problem}. "
            "Measure again, on a machine with less other work"
        ) from None
    finally:
        for server in servers:
            server.close()
    there = cores or len(os.sched_getaffinity(0))
    return Ceiling(processes, rate, cost, round(work.mean_prompt_tokens), tokens, there)


def _run(
    places: int,
    ports: Sequence[int],
    work: Workload | PooledWork | PictureWork | SoundWork,
    seconds: float,
    transport: Transport,
) -> tuple[float, float]:
    """Return all clients' requests per second, and the CPU seconds per request."""
    arrivals = ClosedLoop(places, _SPREAD_SECONDS)
    requests = work.requests("none", TokenRange(1000, 100_000), "ceiling")
    links: list[Link] = []
    came: list[float] = []
    """
    The arrival times of tokens or documents. Whole answers may take longer than the measurement.
    """
    parts = max(1.0, work.mean_tokens)

    def note(outcome: Outcome) -> None:
        if outcome.error == CLIENT_LIMIT:
            raise ClientError("has too few connections or descriptors (`ulimit -n`)")
        if outcome.first is not None:
            came.extend(accumulate(outcome.gaps, initial=outcome.first))
        elif outcome.done is not None:
            came.append(outcome.done)

    try:
        for port in ports:
            url = f"http://127.0.0.1:{port}"
            spec = LoadSpec(url, work.path, arrivals, requests, 1, seconds, _MOST_SECONDS)
            links.append(transport(payload.program("load/client", **spec.parameters(0, 1))))
        clients = [Client(link) for link in links]
        wait_for(clients, lambda client: client.ready)
        run = LevelLoop(clients, note, lambda _now, _due: False).run(0.0, _MOST_SECONDS)
    finally:
        for link in links:
            link.close()
    counted = sum(_RAMP_SECONDS <= at <= seconds for at in came)
    if not counted:
        raise ClientError("received no answer in time")
    return counted / parts / (seconds - _RAMP_SECONDS), run.cpu_seconds


def _ports(servers: Sequence[Client]) -> list[int]:
    wait_for(servers, lambda server: server.port is not None)
    return [server.port or 0 for server in servers]
