"""
Measure what a request costs the load client, and when the client is late; with guidellm.

    python -m benchmarks.measure_client.run [ENVIRONMENT/bin/guidellm]

ENVIRONMENT is one of its own, in which `pip install guidellm==0.8.1` has run; without it only
gpufleet's client is measured. The same server (tests/support/queue_server.py, in a process of its
own) gets Poisson arrivals of the same rate and lengths from each, in turn:

* latencies that each reports, beside those of the server's own record of that run;
* processor time of a request: the difference of a long and a short run, so that the start does not
  count;
* the rates at which each sends on time: p99 of the time from intended arrival to sending at most
  `LATE_SECONDS`, as `gpufleet measure` has it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure_client.clients import Guidellm, Said, by_gpufleet
from benchmarks.measure_client.server import Times, queue_server
from gpufleet.load_test.intervals import percentile
from gpufleet.load_test.level_runs import LATE_SECONDS

PROMPT, TOKENS = 256, 32
SLOTS, FIRST, TOKEN = 8, 0.1, 0.02
"""0.72 s a request, so 11.1 a second at saturation."""
RATE = 8.0
LONG, SHORT = 60.0, 15.0
FAST = (1000, 0.05, 0.005)
"""Slots that are never all taken."""
RATES = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
RATE_SECONDS = 10.0

LevelOf = Callable[[str, float, float, int, int], Said]


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        clients: dict[str, LevelOf] = {"gpufleet": by_gpufleet}
        if len(sys.argv) > 1:
            guidellm = Guidellm(Path(sys.argv[1]).absolute(), Path(folder))
            print(guidellm.version)
            clients["guidellm"] = guidellm.level
        print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n")
        compare_latencies(clients)
        find_late(clients)
    print(f"\nload {os.getloadavg()[0]:.1f}")


def compare_latencies(clients: dict[str, LevelOf]) -> None:
    """Print latencies beside the server's, and what a request cost."""
    print(f"{RATE:g} requests/s, {PROMPT} tokens in, {TOKENS} out, {LONG:g} s:")
    for name, level in clients.items():
        with queue_server(SLOTS, FIRST, TOKEN) as served:
            said = level(served.url, RATE, LONG, PROMPT, TOKENS)
        short = 0.0
        with queue_server(SLOTS, FIRST, TOKEN) as again:
            few = level(again.url, RATE, SHORT, PROMPT, TOKENS)
        short, more = few.cpu_seconds, said.requests - few.requests
        print(f"  {name}: {said.requests} requests, {said.errors} failed")
        print(f"    TTFT, client   {shown(said.ttft)}")
        print(f"    TTFT, server   {shown(server_ttft(served.times))}")
        print(f"    e2e, client    {shown(said.e2e)}")
        print(f"    e2e, server    {shown(server_e2e(served.times))}")
        print(f"    sent late by   {shown(said.lag)}")
        print(f"    processor time {1000 * (said.cpu_seconds - short) / more:.2f} ms a request")


def find_late(clients: dict[str, LevelOf]) -> None:
    """Print how late each client sends at rising rates, until it is too late."""
    print(f"\n{PROMPT} tokens in, {TOKENS} out, a server that never queues, {RATE_SECONDS:g} s:")
    for name, level in clients.items():
        for rate in RATES:
            with queue_server(*FAST) as served:
                said = level(served.url, rate, RATE_SECONDS, PROMPT, TOKENS)
            lag = said.percentile(said.lag, 99)
            print(
                f"  {name} at {rate:3g}/s: sent late by {shown(said.lag)}, "
                f"{said.requests} requests, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            if not lag <= LATE_SECONDS:
                break


def shown(values: list[float]) -> str:
    """Return percentiles in milliseconds."""
    if not values:
        return "nothing"
    return ", ".join(f"p{each} {1000 * percentile(values, each):.1f} ms" for each in (50, 95, 99))


def server_ttft(times: list[Times]) -> list[float]:
    """Return the times to the first token by the server's record."""
    return [each.began + FIRST - each.arrived for each in times if each.began is not None]


def server_e2e(times: list[Times]) -> list[float]:
    """Return the times to the last token by the server's record."""
    return [each.ended - each.arrived for each in times if each.ended is not None]


if __name__ == "__main__":
    main()
