"""Measure the guard's cost per request, in microseconds and as a share of the shortest completion.

    python -m benchmarks.guard_cost.run ENVIRONMENT/bin/vllm [ROUNDS]

ENVIRONMENT has a release's CPU build, as `lab.metrics_recording` says. In each of ROUNDS (default
40) the release's own Python calls an application that does nothing, with the guard before it and
without, in turn, with the headers of a real request; their difference in processor time is the
guard's cost. Then its server with the guard completes prompts by one token, one after another over
one connection. The goal is a share of the fastest of them, of a model of two layers: no request
takes less, also where this machine does other things meanwhile.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpufleet.engines.vllm import launch_arguments
from gpufleet.on_node.serving import guard
from gpufleet.serving import unit
from lab.metrics_recording import running_server

GOAL = 0.01
"""The largest cost per request."""
KEY = "a-key-of-this-benchmark"
REQUESTS = 300

CALLS = """
import asyncio, json, statistics, sys, time
from gpufleet_guard import Guard

async def app(scope, receive, send):
    pass

HEADERS = [(b"host", b"10.0.0.1:8000"), (b"user-agent", b"OpenAI/Python 1.0"),
           (b"accept", b"application/json"), (b"content-type", b"application/json"),
           (b"content-length", b"85"), (b"authorization", b"Bearer " + sys.argv[2].encode())]
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions",
         "raw_path": b"/v1/completions", "root_path": "", "headers": HEADERS}

async def seconds(asked, calls=20000):
    began = time.process_time()
    for _ in range(calls):
        await asked(SCOPE, None, None)
    return (time.process_time() - began) / calls

async def main():
    guarded = Guard(app, sys.argv[2].encode())
    rounds = range(int(sys.argv[1]))
    print(json.dumps([[await seconds(app), await seconds(guarded)] for _ in rounds]))

asyncio.run(main())
"""


def main() -> int:
    """Measure and print; status 1 if the goal is missed."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    vllm = Path(sys.argv[1]).absolute()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(guard.__file__, Path(folder) / Path(unit.GUARD).name)
        costs = guard_seconds(vllm, folder, rounds)
        flag = f"--middleware={launch_arguments.MIDDLEWARE}"
        with running_server(vllm, flag, PYTHONPATH=folder, VLLM_API_KEY=KEY) as (_, port):
            requests = completions(port)
    cost, request = statistics.median(costs), min(requests)
    share = cost / request
    print(f"load {os.getloadavg()[0]:.1f}")
    print(
        f"guard: {cost * 1e6:.2f} us a request, median of {rounds} rounds "
        f"({min(costs) * 1e6:.2f} to {max(costs) * 1e6:.2f})"
    )
    print(
        f"completion of one token: {request * 1e3:.2f} ms, fastest of {len(requests)} "
        f"(median {statistics.median(requests) * 1e3:.2f})"
    )
    print(f"share: {share:.3%}, goal below {GOAL:.0%}: {'kept' if share < GOAL else 'missed'}")
    return int(share >= GOAL)


def guard_seconds(vllm: Path, folder: str, rounds: int) -> list[float]:
    """Return what the guard adds to a call, of each round, in the release's own Python."""
    done = subprocess.run(
        [vllm.with_name("python"), "-c", CALLS, str(rounds), KEY],
        env={**os.environ, "PYTHONPATH": folder},
        stdout=subprocess.PIPE,
        check=True,
        timeout=600,
    )
    return [guarded - bare for bare, guarded in json.loads(done.stdout)]


def completions(port: int) -> list[float]:
    """Return the seconds of each completion of one token, once the server is warm."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 1, "temperature": 0})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    found = []
    for _ in range(REQUESTS + 20):
        began = time.perf_counter()
        line.request("POST", "/v1/completions", body, headers)
        answer = line.getresponse()
        answer.read()
        if answer.status != http.client.OK:
            sys.exit(f"a completion was answered {answer.status}")
        found.append(time.perf_counter() - began)
    line.close()
    return found[20:]


if __name__ == "__main__":
    sys.exit(main())
