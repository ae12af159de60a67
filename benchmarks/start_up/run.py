"""Measure how long commands take that ask no node.

    python -m benchmarks.start_up.run [ROUNDS]

Starts each of them cold, in turn, ROUNDS times (default 11), and prints the median, the best and
the worst time on the clock and of the processor, and the median against Python that does nothing.
Nodes are the recorded one with eight H100, under as many names; `validate` reads
examples/mixed-14, 14 nodes and seven models, and plans them on their declared hardware.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.flags_check.run import ACCEPTED, CHECK, GOAL, GPUFLEET, run
from gpufleet.fleet.declared_hardware import with_identity
from tests.support.fleet_folder import write_example_models

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
MODEL = "/srv/Qwen3-32B"
NODES = (1, 64)
VALIDATE = "validate, 14 nodes"
GOALS = {VALIDATE: 2.0}
"""Seconds of the processor from a cold start, where it is not the goal of all others."""


def main() -> int:
    """Measure and print; status 1 if one of them misses the goal in processor time."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {
            "python (floor)": [sys.executable, "-c", ""],
            "--help": [GPUFLEET, "--help"],
            "flags check": [*CHECK, *ACCEPTED],
            **{f"plan, {count} nodes": plan(folder, count) for count in NODES},
            VALIDATE: validate(folder),
        }
        spent: dict[str, list[tuple[float, float]]] = {}
        for way, command in ways.items():
            run(command)  # the files are in memory, as they are for anybody's second command
            spent[way] = []
        for _ in range(rounds):
            for way, command in ways.items():
                spent[way].append(run(command))
    print(f"median (best to worst) of {rounds} cold starts, load {os.getloadavg()[0]:.1f}:")
    middle = {way: statistics.median(each[1] for each in times) for way, times in spent.items()}
    floor = middle["python (floor)"]
    for way, times in spent.items():
        clock, processor = ([each[at] for each in times] for at in (0, 1))
        print(
            f"  {way:18} {spread(clock)} on the clock, {spread(processor)} of the processor, "
            f"{middle[way] / floor:5.1f} x the floor"
        )
    missed = [way for way, seconds in middle.items() if seconds > GOALS.get(way, GOAL)]
    goals = f"goal: {GOAL} s, {VALIDATE} {GOALS[VALIDATE]} s"
    print(f"{goals}: {'missed by ' + '; '.join(missed) if missed else 'kept'}")
    return int(bool(missed))


def plan(folder: Path, count: int) -> list[str]:
    """Return the command that plans for so many saved probes."""
    node = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())
    about = json.loads((DATA / "models/Qwen--Qwen3-32B.json").read_text())
    node["models"] = {
        MODEL: {
            "config": about["config"],
            "hf_quant_config": {"missing": "absent"},
            "bytes": None,
        }
    }
    probes, variables = folder / f"{count}.json", folder / f"{count}.yml"
    names = [f"gpu-{number:02}" for number in range(count)]
    probes.write_text(json.dumps({name: with_identity(node, name) for name in names}))
    settings = {
        "vllm": {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"},
        "serving": {"qwen": {"model": MODEL, "replicas": 2 * count}},
    }
    variables.write_text(yaml.safe_dump(settings))
    return [GPUFLEET, "plan", "--vars", str(variables), "--nodes", str(probes)]


def validate(folder: Path) -> list[str]:
    """Return the command that validates the largest example, with its models' configs."""
    models = write_example_models(folder / "models")
    inventory = str(ROOT / "examples/mixed-14/inventories/prod.py")
    return [GPUFLEET, "validate", inventory, "--models", str(models), "--without-secrets"]


def spread(seconds: list[float]) -> str:
    """Return the median and the span of some times."""
    return f"{statistics.median(seconds):6.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


if __name__ == "__main__":
    sys.exit(main())
