"""
Does `gpufleet measure` find the capacity of a real vLLM whose steps take a fixed time?

    python -m benchmarks.measure_accuracy.real_server ENVIRONMENT/bin/vllm [SEARCHES]

ENVIRONMENT has the CPU build of a release, as lab/metrics_recording.py takes it. Server and load
clients are processes of their own, over HTTP and in real time: a search takes 10 to 20 minutes.
The true rate is that of a simulation of the steps alone (`true_rate`), without vLLM, HTTP, clients
or verdicts. It holds as long as steps are on time: those that were not are counted by the server.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.measure_accuracy import paced_steps
from benchmarks.measure_accuracy.run import Searched, run_search
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.level_runs import LevelRuns
from gpufleet.load_test.load_target import Target
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.rate_search import RateSearch
from gpufleet.load_test.workloads import TokenRange, Workload, fixed_length
from lab.metrics_recording import running_server

STEP_SECONDS = 0.25
SLOTS, TOKENS, PROMPT = 16, 4, 32
SATURATION = SLOTS / (TOKENS * STEP_SECONDS)
CONTRACT = Contract(ttft_seconds=3.0, e2e_seconds=4.0)
"""A queue of some 2.5 s breaks it: the true rate lies close to saturation, so that levels 10 % from
it are decided within minutes."""
LEVEL_SECONDS = 300.0
SIMULATED_REQUESTS = 400_000
BISECTIONS = 10
ENTRY = "[vllm.general_plugins]\npaced_steps = paced_steps:register\n"


def true_rate(seed: int = 20_331_106, requests: int = SIMULATED_REQUESTS) -> float:
    """Return the highest arrivals per second at which the share keeps the contract."""
    low, high = 0.5 * SATURATION, 1.1 * SATURATION
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if share_kept(middle, seed, requests) >= CONTRACT.share:
            low = middle
        else:
            high = middle
    return low


def share_kept(rate: float, seed: int, requests: int) -> float:
    """Return the share that keeps the contract where free slots are filled before each step."""
    draw = random.Random(seed)
    arrivals = iter(_arrivals(draw, rate, requests))
    waiting: list[float] = []
    running: list[tuple[float, int]] = []
    upcoming, now, kept = next(arrivals), 0.0, 0
    while upcoming is not None or waiting or running:
        if not waiting and not running and upcoming is not None:
            now = max(now, upcoming)
        while upcoming is not None and upcoming <= now:
            waiting.append(upcoming)
            upcoming = next(arrivals, None)
        free = SLOTS - len(running)
        running += [(due, 0) for due in waiting[:free]]
        del waiting[:free]
        now += STEP_SECONDS
        stay = []
        for due, steps in running:
            if steps == 0 and now - due <= (CONTRACT.ttft_seconds or 0.0):
                # The rest of its time is known: no request leaves its slot before its end.
                kept += now + (TOKENS - 1) * STEP_SECONDS - due <= (CONTRACT.e2e_seconds or 0.0)
            if steps + 1 < TOKENS:
                stay.append((due, steps + 1))
        running = stay
    return kept / requests


def _arrivals(draw: random.Random, rate: float, requests: int) -> list[float | None]:
    due, found = 0.0, []
    for _ in range(requests):
        due += draw.expovariate(rate)
        found.append(due)
    return [*found, None]


def main() -> int:
    """Search and print; status 1 if one is wrong or not within 10 %."""
    taken = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    taken.add_argument("vllm", type=Path)
    taken.add_argument("searches", type=int, nargs="?", default=20)
    given = taken.parse_args()
    true = true_rate()
    print(f"truly {true:.3f} requests/s of {SATURATION:g} at saturation", flush=True)
    found = []
    for number in range(given.searches):
        each, steps, late = search(given.vllm, 1000 * (1 + number))
        found.append(each)
        print(f"{each.line(true)}; {late} of {steps} steps late", flush=True)
    right = sum(each.is_right(true) for each in found)
    within = sum(each.is_within(true) for each in found)
    print(f"  {len(found) - right} wrong of {len(found)}; both ends within 10 %: {within}")
    return int(within < len(found) or right < len(found))


def search(vllm: Path, seed: int) -> tuple[Searched, int, int]:
    """Find the rate of a new server; return also its steps, and those that were late."""
    with tempfile.TemporaryDirectory(prefix="gpufleet-paced-") as folder:
        report = Path(folder) / "report"
        report.write_text("0 0")
        info = Path(folder) / "paced_steps-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paced-steps\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY)
        shutil.copy(paced_steps.__file__, folder)
        environment = {
            "PYTHONPATH": folder,
            paced_steps.SECONDS: f"{STEP_SECONDS}",
            paced_steps.REPORT: str(report),
        }
        arguments = (
            f"--max-num-seqs={SLOTS}", f"--max-num-batched-tokens={4 * SLOTS * PROMPT}",
            "--no-async-scheduling",
        )  # fmt: skip
        with running_server(vllm, *arguments, **environment) as (_, port):
            found = _search(f"http://127.0.0.1:{port}", seed)
        steps, late = map(int, report.read_text().split())
    return found, steps, late


def _search(url: str, seed: int) -> Searched:
    target = Target("replica tiny-0", url, "tiny", "tiny", ("tiny-0",), 1)
    work = Workload("paced", fixed_length(PROMPT), fixed_length(TOKENS), "four steps")
    runs = LevelRuns(target, CONTRACT, work, TokenRange(10, 200), seed, 1)
    rates = RateSearch(random.Random(seed).uniform(4.0, 8.0), 4 * SATURATION)

    def level(rate: float, seconds: float) -> LevelSummary:
        found = runs.run(rate, seconds)
        print(
            f"    {rate:.2f}: {found.verdict}: {found.why}; sent late by {runs.lags[-1]:.3f} s "
            f"(p99), load {os.getloadavg()[0]:.0f}",
            flush=True,
        )
        return found

    found = run_search(rates, CONTRACT, LEVEL_SECONDS, runs.try_largest(), level)
    return replace(found, deviation=max(runs.lags))


if __name__ == "__main__":
    sys.exit(main())
