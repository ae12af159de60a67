"""What does a converge cost that has nothing to do, against pyinfra's own operations and plain ssh?

    python -m benchmarks.converge_noop.run [NODES] [ROUNDS]

Boots NODES lab nodes (default 8), converges them once with each way, then measures no-op runs side
by side, in turn, ROUNDS times (default 3), and prints the best of each and the ratios. The floor is
`ssh NODE true` on all nodes at once: the price of any remote command. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lab.nodes import Lab

ROOT = Path(__file__).parents[2]
LAB_ID = "gfb"


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    lab = Lab.open(LAB_ID)
    try:
        lab.up({f"gpu-{number:02}": "t4x1" for number in range(1, count + 1)})
        ways: dict[str, Callable[[], None]] = {
            "gpufleet": lambda: deploy("ours"),
            "pyinfra's operations": lambda: deploy("stock"),
            "ssh true (floor)": lambda: floor(lab),
        }
        for way in ways.values():
            way()
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds):
            for name, way in ways.items():
                best[name] = min(best[name], seconds(way))
        print(f"{count} nodes, nothing to change, best of {rounds}:")
        for name, spent in best.items():
            print(f"  {name:22} {spent:6.2f} s   {spent / best['gpufleet']:6.2f} x gpufleet")
    finally:
        lab.purge()


def seconds(way: Callable[[], None]) -> float:
    """Return how long one run takes."""
    began = time.monotonic()
    way()
    return time.monotonic() - began


def deploy(name: str) -> None:
    """Run one of the two deploys with the pyinfra command."""
    inventory = "benchmarks/converge_noop/inventory/lab.py"
    subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", inventory, f"benchmarks/converge_noop/{name}.py"],
        cwd=ROOT,
        env={**os.environ, "GPUFLEET_LAB": LAB_ID},
        check=True,
        capture_output=True,
        timeout=600,
    )


def floor(lab: Lab) -> None:
    """Run `true` on every node at once."""
    runs = [
        subprocess.Popen(["ssh", "-F", str(lab.facts.ssh_config), node.name, "true"])
        for node in lab.facts.nodes
    ]
    if any(run.wait(timeout=60) for run in runs):
        raise RuntimeError("a node did not answer")


if __name__ == "__main__":
    main()
