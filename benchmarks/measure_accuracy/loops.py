"""
Show what a closed loop hides that an open one shows: a table of docs/measured/measure-client.md.

    python -m benchmarks.measure_accuracy.loops [SECONDS]

A server of 4 slots and 0.2 s for a request, 0.05 s of them to the first token, so of exactly 20
requests a second; SECONDS (default 1000) of virtual time for each load.
"""

from __future__ import annotations

import sys

from benchmarks.measure_accuracy.virtual_time import virtual_clients
from gpufleet.load_test.arrivals import Arrivals, ClosedLoop, Poisson
from gpufleet.load_test.client_process import LoadSpec, run_level
from gpufleet.load_test.intervals import percentiles
from gpufleet.load_test.outcomes import Outcome
from gpufleet.load_test.workloads import TokenRange, Workload, fixed_length
from tests.support.queue_server import QueueServer

LOADS: dict[str, Arrivals] = {
    "closed loop of 4": ClosedLoop(4),
    "open loop, 18 a second": Poisson(18.0),
    "open loop, 19 a second": Poisson(19.0),
}
WORK = Workload("loops", fixed_length(32), fixed_length(4), "four tokens")
GIVE_UP_SECONDS = 60.0
SEED = 1


def main() -> None:
    """Measure and print."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1000.0
    print("| load | requests/s | TTFT p50 | p95 | p99 |\n| --- | --- | --- | --- | --- |")
    for name, arrivals in LOADS.items():
        outcomes = outcomes_of(arrivals, seconds)
        late = percentiles([each.ttft for each in outcomes if each.ttft is not None])
        done = sum(each.done is not None and each.done <= seconds for each in outcomes)
        print(
            f"| {name} | {done / seconds:.1f} | "
            + " | ".join(f"{late[each]:.3f} s" for each in ("p50", "p95", "p99"))
            + " |"
        )


def outcomes_of(arrivals: Arrivals, seconds: float) -> list[Outcome]:
    """Return all requests that a new server got in so many seconds."""
    server = QueueServer(slots=4, first_seconds=0.05, token_seconds=0.05)
    found: list[Outcome] = []
    with virtual_clients(server) as clients:
        requests = WORK.requests("queue", TokenRange(100, 1000), "loops")
        spec = LoadSpec(server.url, WORK.path, arrivals, requests, SEED, seconds, GIVE_UP_SECONDS)
        run_level(
            spec, 1, found.append, lambda _now, _due: False,
            transport=clients.start, sleep=clients.sleep,
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
