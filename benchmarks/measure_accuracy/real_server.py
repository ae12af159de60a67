"""
Does `gpufleet measure` find the capacity of a real vLLM whose steps take a fixed time?

    python -m benchmarks.measure_accuracy.real_server ENVIRONMENT/bin/vllm [SEARCHES] [--first N]

ENVIRONMENT has the CPU build of a release, as lab/metrics_recording.py takes it. One server and its
load clients are processes of their own, over HTTP and in real time. The true rate is that of a
simulation of the steps alone (`true_rate`), without vLLM, HTTP, clients or verdicts; before the
searches a closed loop shows what the server carries at most. On a busy machine steps are late, less
so at real-time priority (`chrt -r 5`, which the processes inherit): the server states their mean
time during each search, and the true rate is that of steps of that time.
`--simulated` puts such a simulation in the server's place: only search and verdicts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from benchmarks.measure_accuracy import paced_steps
from benchmarks.measure_accuracy.run import NEAR, Searched, run_search
from gpufleet.load_test.arrivals import ClosedLoop
from gpufleet.load_test.client_process import LoadSpec, run_level
from gpufleet.load_test.level import Level, LevelSummary
from gpufleet.load_test.level_runs import LevelRuns, give_up_seconds
from gpufleet.load_test.load_target import Target
from gpufleet.load_test.outcomes import Contract, Outcome
from gpufleet.load_test.rate_search import RateSearch
from gpufleet.load_test.workloads import TokenRange, Workload, fixed_length
from lab.metrics_recording import running_server
from tests.support.simulated_queue import run_level as simulated_level

STEP_SECONDS = 0.1
SLOTS, TOKENS, PROMPT = 32, 2, 8
SATURATION = SLOTS / (TOKENS * STEP_SECONDS)
CONTRACT = Contract(ttft_seconds=0.25, e2e_seconds=0.25 + (TOKENS - 1) * STEP_SECONDS, share=0.7)
"""
A wait so short that the true rate is not too close to the saturation, where queues change slowly.
"""
WORK = Workload("paced", fixed_length(PROMPT), fixed_length(TOKENS), "two steps")
IDS = TokenRange(10, 200)
LEVEL_SECONDS = 30.0
SATURATION_SECONDS = 30.0
SIMULATED_REQUESTS = 400_000
BISECTIONS = 10
ENTRY = "[vllm.general_plugins]\npaced_steps = paced_steps:register\n"
# The worker runs in the engine's process: a process less that waits for the other one.
UNI = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ARGUMENTS = (
    f"--max-num-seqs={SLOTS}", f"--max-num-batched-tokens={4 * SLOTS * PROMPT}",
    # A request takes a whole block: with 3 MB vLLM runs fewer requests at once than it has slots.
    "--kv-cache-memory-bytes=64M", "--disable-log-stats", "--disable-uvicorn-access-log",
    "--no-async-scheduling", "--distributed-executor-backend=uni",
)  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """The steps of a server until now."""

    count: int
    late: int
    seconds: float
    """By which all of them together were late."""

    def since(self, before: Steps) -> Steps:
        """Return those since then."""
        return Steps(
            self.count - before.count, self.late - before.late, self.seconds - before.seconds
        )

    @property
    def mean(self) -> float:
        """Return the seconds of a step."""
        return STEP_SECONDS + self.seconds / max(1, self.count)

    def __str__(self) -> str:
        return f"{self.late} of {self.count} steps late, {1000 * self.mean:.1f} ms in the mean"


@dataclass(frozen=True)
class PacedServer:
    """A server that runs."""

    url: str
    report: Path

    def steps(self) -> Steps:
        """Return its steps so far."""
        count, late, seconds = self.report.read_text().split()
        return Steps(int(count), int(late), float(seconds))


@cache
def true_rate(
    step: float = STEP_SECONDS, seed: int = 20_331_106, requests: int = SIMULATED_REQUESTS
) -> float:
    """Return the highest arrivals per second at which the share keeps the contract."""
    full = SLOTS / (TOKENS * step)
    low, high = 0.5 * full, 1.1 * full
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if share_kept(middle, step, seed, requests) >= CONTRACT.share:
            low = middle
        else:
            high = middle
    return low


def share_kept(rate: float, step: float, seed: int, requests: int) -> float:
    """Return the share that keeps the contract."""
    kept = 0
    for each in itertools.islice(served(rate, random.Random(seed), step), requests):
        ttft, e2e = each.ttft or 0.0, each.e2e or 0.0
        kept += ttft <= (CONTRACT.ttft_seconds or 0.0) and e2e <= (CONTRACT.e2e_seconds or 0.0)
    return kept / requests


def served(rate: float, draw: random.Random, step: float = STEP_SECONDS) -> Iterator[Outcome]:
    """Yield requests by due times where free slots are filled before each step."""
    waiting: list[float] = []
    running: list[int] = []
    now, upcoming = 0.0, draw.expovariate(rate)
    while True:
        if not waiting and not running:
            now = max(now, upcoming)
        while upcoming <= now:
            waiting.append(upcoming)
            upcoming += draw.expovariate(rate)
        free = SLOTS - len(running)
        begun, waiting = waiting[:free], waiting[free:]
        now += step
        for due in begun:
            # The rest of its time is known: no request leaves its slot before its end.
            done = now + (TOKENS - 1) * step
            yield Outcome(due, due, now, done, PROMPT, TOKENS, (step,) * (TOKENS - 1), "")
        running = [steps - 1 for steps in (*running, *[TOKENS] * len(begun)) if steps > 1]


def main() -> int:
    """Search and print; status 1 if one is wrong or not within 10 %."""
    taken = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    taken.add_argument("vllm", type=Path, nargs="?")
    taken.add_argument("searches", type=int, nargs="?", default=20)
    taken.add_argument("--first", type=int, default=1)
    taken.add_argument("--simulated", type=int, metavar="SEARCHES")
    given = taken.parse_args()
    print(f"truly {true_rate():.3f} requests/s of {SATURATION:g} at saturation", flush=True)
    if given.simulated:
        found = [
            (simulated_search(1000 * (1 + each)), true_rate()) for each in range(given.simulated)
        ]
    else:
        with paced_server(given.vllm) as server:
            print_saturation(server)
            found = [
                real_search(server, 1000 * each)
                for each in range(given.first, given.first + given.searches)
            ]
    return int(not report(found))


def report(found: Sequence[tuple[Searched, float]]) -> bool:
    """Print the sums of searches with their true rates; return whether the goal is kept."""
    right = sum(each.is_right(true) for each, true in found)
    within = sum(each.is_within(true) for each, true in found)
    stated = sum(each.status == "found" for each, _ in found)
    off = [abs(rate / true - 1) for each, true in found for rate in each.wrong(true)]
    near = sum(len(each.near(true)) for each, true in found)
    seconds = [each.seconds for each, _ in found]
    print(
        f"  {len(found) - right} wrong of {len(found)}; both ends within 10 %: {within}; found: "
        f"{stated}\n"
        f"  {len(off)} wrong verdicts, by {max(off, default=0):.1%} of the true rate at most, of "
        f"{sum(each.levels for each, _ in found)} levels, {near} of them within {NEAR:.0%} of it\n"
        f"  levels of {fmean(seconds):.0f} s together in a mean search, at most {max(seconds):.0f}"
    )
    return right == within == len(found)


@contextmanager
def paced_server(vllm: Path) -> Iterator[PacedServer]:
    """Run a server whose steps take a fixed time."""
    with tempfile.TemporaryDirectory(prefix="gpufleet-paced-") as folder:
        report = Path(folder) / "report"
        report.write_text("0 0 0")
        info = Path(folder) / "paced_steps-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paced-steps\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY)
        shutil.copy(paced_steps.__file__, folder)
        environment = {
            **UNI,
            "PYTHONPATH": folder,
            paced_steps.SECONDS: f"{STEP_SECONDS}",
            paced_steps.REPORT: str(report),
        }
        with running_server(vllm, *ARGUMENTS, **environment) as (_, port):
            yield PacedServer(f"http://127.0.0.1:{port}", report)


def print_saturation(server: PacedServer) -> None:
    """Print what a closed loop of twice the slots gets: the server's highest rate."""
    found, before = list[Outcome](), server.steps()
    requests = WORK.requests("tiny", IDS, "saturation")
    loop, seconds = ClosedLoop(2 * SLOTS), SATURATION_SECONDS
    spec = LoadSpec(server.url, WORK.path, loop, requests, 1, seconds, give_up_seconds(CONTRACT))
    run_level(spec, 1, found.append, lambda _now, _due: False)
    done = sum(not each.error and (each.done or seconds) < seconds for each in found)
    print(
        f"closed loop of {2 * SLOTS}: {done / seconds:.2f} answers/s of {SATURATION:g}; "
        f"{sum(bool(each.error) for each in found)} failed; {server.steps().since(before)}",
        flush=True,
    )


def real_search(server: PacedServer, seed: int) -> tuple[Searched, float]:
    """Find the rate of a server; print and return it with the true one."""
    before = server.steps()
    found = search(server.url, seed)
    steps = server.steps().since(before)
    true = true_rate(steps.mean)
    print(f"{found.line(true)}; {steps}, truly {true:.3f} requests/s", flush=True)
    return found, true


def search(url: str, seed: int) -> Searched:
    """Find the rate of a server that is idle."""
    runs = _runs(url, seed)

    def level(rate: float, seconds: float) -> LevelSummary:
        found = runs.run(rate, seconds)
        print(
            f"    {rate:.2f}: {found.verdict}: {found.why}; sent late by {runs.lags[-1]:.3f} s "
            f"(p99), load {os.getloadavg()[0]:.0f}",
            flush=True,
        )
        return found

    found = run_search(_rates(seed), CONTRACT, LEVEL_SECONDS, runs.try_largest(), level)
    return replace(found, deviation=max(runs.lags))


def simulated_search(seed: int) -> Searched:
    """Find the rate where a simulation is in the server's place."""
    numbers = itertools.count()

    def level(rate: float, seconds: float) -> LevelSummary:
        of = Level(CONTRACT, rate, seconds, give_up_seconds(CONTRACT))
        return simulated_level(of, served(rate, random.Random(f"{seed}/{next(numbers)}")), 1.0)

    found = run_search(_rates(seed), CONTRACT, LEVEL_SECONDS, TOKENS * STEP_SECONDS, level)
    print(found.line(true_rate()), flush=True)
    return found


def _rates(seed: int) -> RateSearch:
    # The command begins with 0.5: here other levels are tried in each search.
    start = random.Random(seed).uniform(SATURATION / 4, SATURATION / 2)
    return RateSearch(start, 4 * SATURATION)


def _runs(url: str, seed: int) -> LevelRuns:
    target = Target("replica tiny-0", url, "tiny", "tiny", ("tiny-0",), 1)
    return LevelRuns(target, CONTRACT, WORK, IDS, seed, 1)


if __name__ == "__main__":
    sys.exit(main())
