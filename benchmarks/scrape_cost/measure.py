"""RUNS ON THE NODE: what programs cost that are asked again and again, side by side.

Given is JSON, in the place of GIVEN below: {"rounds", "scrapes", "exporters": {name: [argument]},
"programs": {name: [argument]}}. Starts the exporters, each listening on its "127.0.0.1:PORT", asks
them in turn, and runs the programs in turn. Writes JSON: of each exporter what its last page had,
of both, by round, seconds of processor time and of waiting for each scrape or run.
Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
START = 30.0  # seconds until an exporter answers


def processor_time(pid: int) -> float:
    """Return seconds that a process and the children that it has waited for have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def started(arguments: list[str]) -> Any:
    """Start an exporter; return its process and address once it answers."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = re.search(r"127\.0\.0\.1:\d+", " ".join(arguments))
    url = f"http://{address.group() if address else ''}/metrics"
    end = time.monotonic() + START
    while True:
        try:
            scrape(url)
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("it does not answer: " + " ".join(arguments))
            time.sleep(0.1)
        else:
            return process, url


def exporters(given: dict[str, list[str]], rounds: int, scrapes: int) -> dict[str, Any]:
    """Ask every exporter in turn, a number of rounds."""
    running = {name: started(arguments) for name, arguments in given.items()}
    found: dict[str, Any] = {name: {"cpu": [], "wall": []} for name in given}
    try:
        for _ in range(rounds):
            for name, (process, url) in running.items():
                cpu, began = processor_time(process.pid), time.monotonic()
                for _ in range(scrapes):
                    page = scrape(url)
                found[name]["wall"].append((time.monotonic() - began) / scrapes)
                found[name]["cpu"].append((processor_time(process.pid) - cpu) / scrapes)
                found[name]["page"] = page
    finally:
        for process, _ in running.values():
            process.kill()
    return found


def programs(given: dict[str, list[str]], rounds: int) -> dict[str, Any]:
    """Run every program in turn, a number of rounds after one that does not count."""
    found: dict[str, Any] = {name: {"cpu": [], "wall": []} for name in given}
    for number in range(rounds + 1):
        for name, arguments in given.items():
            cpu, began = children(), time.monotonic()
            done = subprocess.run(arguments, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr}")
            if number:
                found[name]["wall"].append(time.monotonic() - began)
                found[name]["cpu"].append(children() - cpu)
    return found


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    given = json.loads(GIVEN)
    answer = {
        "exporters": exporters(given["exporters"], given["rounds"], given["scrapes"]),
        "programs": programs(given["programs"], given["rounds"]),
    }
    print(json.dumps(answer))


GIVEN = "{}"

if __name__ == "__main__":
    main()
