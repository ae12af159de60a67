"""Measure what monitoring costs a node.

    python -m benchmarks.scrape_cost.run [ROUNDS]

Boots a lab node with eight simulated GPUs and asks two node exporters in turn, ROUNDS times
(default 7) twenty scrapes each: Debian's with the collectors that it has by itself, and the same
program with our flags (monitoring/node_exporter.py) and our own facts in its textfile directory.
Then the program that writes those facts runs ROUNDS times, with DCGM on the node and without: then
it asks NVML. All in one run, in turn, so that a busy machine is busy for all of them. Processor
time is what the kernel accounts to the processes.

Sizes beside that: what eight GPUs are through our counters file, as the lab's stand-in of DCGM's
exporter serves them (what the real one costs was not measured: it cannot run without a GPU), and
what three releases of vLLM served (`tests/unit/monitoring/recorded/`). Needs root.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpufleet.monitoring.exporters import Access
from gpufleet.monitoring.node_exporter import TEXTFILES, arguments
from gpufleet.remote import payload
from gpufleet.settings.monitoring_settings import NodeExporter
from lab import nvml
from lab.nodes import Lab
from tests.support.checkout import own_lab
from tests.unit.monitoring import dcgm
from tests.unit.monitoring.programs import program

LAB_ID = own_lab("gfs")
NODE = "gpu-01"
SCRAPES = 20  # a round: one takes less than the kernel's tick of 10 ms
A_DAY = 24 * 3600
SCRAPE_SECONDS = 15  # monitoring.scrape_seconds
FACTS_SECONDS = 60  # gpufleet-facts.timer
RECORDED = Path(__file__).parents[2] / "tests/unit/monitoring/recorded"
HOME = Path("opt/scrape-cost")


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    lab = Lab.open(LAB_ID)
    try:
        lab.up({NODE: "h100x8"})
        found = measured(lab, rounds)
    finally:
        lab.purge()
    print(f"one node with 8 simulated GPUs, median of {rounds} rounds (lowest to highest):")
    stock = statistics.median(found["exporters"]["Debian's defaults"]["cpu"])
    for name, each in found["exporters"].items():
        print(f"  {name}: {size(each['page'])}")
        show("a scrape", each, stock, A_DAY / SCRAPE_SECONDS)
    for name, each in found["programs"].items():
        print(f"  {name}:")
        show("a run", each, stock, A_DAY / FACTS_SECONDS)
    print("sizes alone:")
    print(f"  DCGM, 8 H100, our counters file: {size(of_eight_gpus())}")
    for path in sorted(RECORDED.glob("vllm-*.txt")):
        print(f"  {path.stem}, one server: {size(path.read_text())}")


def show(what: str, each: dict[str, list[float]], unit: float, a_day: float) -> None:
    """Print one line: processor time with its spread, as a ratio, and by day."""
    cpu, wall = statistics.median(each["cpu"]), statistics.median(each["wall"])
    print(
        f"    {what}: {1000 * cpu:.1f} ms of processor time ({1000 * min(each['cpu']):.1f} to "
        f"{1000 * max(each['cpu']):.1f}), {cpu / unit:.2f} x the first; {1000 * wall:.0f} ms until "
        f"the end; {cpu * a_day:.0f} s of one core a day ({100 * cpu * a_day / A_DAY:.2f} %)"
    )


def size(page: str) -> str:
    """Say how large a page is."""
    samples = sum(bool(line) and not line.startswith("#") for line in page.splitlines())
    return f"{samples} samples, {len(page.encode()) / 1024:.0f} KiB"


def measured(lab: Lab, rounds: int) -> Any:
    """Return what `measure.py` finds on the node."""
    root = lab.root(NODE)
    (root / HOME).mkdir(parents=True, exist_ok=True)
    exporter = program("prometheus-node-exporter", "usr/bin/prometheus-node-exporter")
    shutil.copy(exporter, root / HOME / "node_exporter")
    (root / HOME / "node-facts").write_bytes(payload.archive("monitoring/node_facts", nvml=True))
    stock, ours = f"/{HOME}/node_exporter", f"/{HOME}/node-facts"
    told = {"schema": 1, "gpu_node": True, "gpus": 8, "lock": "", "release": ""}
    for name, measures in (("dcgm", True), ("nvml", False)):
        (root / HOME / f"{name}.json").write_text(json.dumps({**told, "dcgm": measures}))
    for directory in (TEXTFILES, "/etc/gpufleet", "/run/gpufleet-facts"):
        inside(lab, f"mkdir -p {directory}", "")
    flags = arguments(NodeExporter(), Access(listen="127.0.0.1"))
    declare = f"cp /{HOME}/%s.json /etc/gpufleet/facts.json && exec python3 -I {ours}"
    given: dict[str, Any] = {
        "rounds": rounds,
        "scrapes": SCRAPES,
        "exporters": {
            "Debian's defaults": [stock, "--web.listen-address=127.0.0.1:9200"],
            "ours": [stock, *flags],
        },
        "programs": {
            "our facts, DCGM measures the GPUs": ["sh", "-c", declare % "dcgm"],
            "our facts, NVML is asked": ["sh", "-c", declare % "nvml"],
        },
    }
    inside(lab, declare % "nvml", "")  # for the exporter to read
    source = Path(__file__).with_name("measure.py").read_text()
    script = source.replace('GIVEN = "{}"', f"GIVEN = {json.dumps(given)!r}")
    return json.loads(inside(lab, "python3 -", script))


def inside(lab: Lab, command: str, text: str) -> str:
    """Return what a command on the node prints."""
    done = subprocess.run(
        ["ssh", "-F", str(lab.facts.ssh_config), NODE, command],
        input=text, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{command}: {done.stderr or done.stdout}")
    return done.stdout


def of_eight_gpus() -> str:
    """Return the page of the stand-in."""
    with tempfile.TemporaryDirectory() as empty:
        library = nvml.build(Path(empty) / "nvml")
        with dcgm.node(Path(empty), library, "h100x8") as node:
            return node.get()


if __name__ == "__main__":
    main()
