"""Measure what a probe of one node costs, compared with a program that shows less.

    python -m benchmarks.probe_one_node.run [ROUNDS]

Boots a lab node with eight simulated GPUs and asks it over one SSH connection a command, in turn,
ROUNDS times (default 5): the whole probe (every GPU, every pair, the kernel log, the machine), then
nvitop, which shows a dozen values a GPU. Prints the median of each and the ratio. The
floor is `ssh NODE true`. The simulated NVML answers at once, so this is the programs' own cost; a
real driver's answers come on top for all of them. Needs root.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from gpufleet.remote import payload
from lab import nvml_monitors
from lab.nodes import Lab
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfb")


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    lab = Lab.open(LAB_ID)
    try:
        lab.up({"gpu-01": "h100x8"})
        nvml_monitors.install(lab.root("gpu-01"))
        program = payload.program("probe/probe", nvml=True)[:]
        ways = {
            "gpufleet's probe": ("python3 -I -", program),
            "nvitop -1": (f"{nvml_monitors.RUN} nvitop -1", ""),
            "ssh true (floor)": ("true", ""),
        }
        for command, given in ways.values():
            seconds(lab, command, given)
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (command, given) in ways.items():
                spent[name].append(seconds(lab, command, given))
        median = {name: statistics.median(each) for name, each in spent.items()}
        print(f"one node, 8 GPUs, one ssh command each, median of {rounds}:")
        for name, each in median.items():
            ratio = each / median["gpufleet's probe"]
            print(f"  {name:18} {each:6.2f} s   {ratio:5.2f} x gpufleet")
    finally:
        lab.purge()


def seconds(lab: Lab, command: str, given: str) -> float:
    """Return how long one command over a new SSH connection takes."""
    began = time.monotonic()
    done = subprocess.run(
        ["ssh", "-F", str(lab.facts.ssh_config), "gpu-01", command],
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    if command != "true" and "H100" not in done.stdout:
        raise RuntimeError(f"{command}: shows no GPU: {done.stdout[:200]}")
    return time.monotonic() - began


if __name__ == "__main__":
    main()
