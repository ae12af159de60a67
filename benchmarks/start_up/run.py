"""How long until a command answers that asks no node?

    python -m benchmarks.start_up.run [ROUNDS]

Starts each of them cold, in turn, ROUNDS times (default 11), and prints the median, the best and
the worst time on the clock and of the processor, and the median against Python that does nothing.
Nodes are the recorded one with eight H100, under as many names.
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

DATA = Path(__file__).parents[2] / "tests/data"
MODEL = "/srv/Qwen3-32B"
NODES = (1, 64)


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
            f"  {way:16} {spread(clock)} on the clock, {spread(processor)} of the processor, "
            f"{middle[way] / floor:5.1f} x the floor"
        )
    worst = max(middle.values())
    print(f"goal: {GOAL} s, {'kept' if worst <= GOAL else 'missed'}")
    return int(worst > GOAL)


def plan(folder: Path, count: int) -> list[str]:
    """Return the command that plans for so many saved probes."""
    node = json.loads((DATA.parents[1] / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())
    about = json.loads((DATA / "models/Qwen--Qwen3-32B.json").read_text())
    node["models"] = {
        MODEL: {
            "config": about["config"],
            "hf_quant_config": {"missing": "absent"},
            "bytes": None,
        }
    }
    probes, variables = folder / f"{count}.json", folder / "vars.yml"
    names = [f"gpu-{number:02}" for number in range(count)]
    probes.write_text(json.dumps({name: with_identity(node, name) for name in names}))
    settings = {
        "vllm": {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"},
        "serving": {"qwen": {"model": MODEL, "replicas": 2 * count}},
    }
    variables.write_text(yaml.safe_dump(settings))
    return [GPUFLEET, "plan", "--vars", str(variables), "--nodes", str(probes)]


def spread(seconds: list[float]) -> str:
    """Return the median and the span of some times."""
    return f"{statistics.median(seconds):6.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


if __name__ == "__main__":
    sys.exit(main())
