"""Measure how long it takes to learn that a flag was removed.

    python -m benchmarks.flags_check.run [ROUNDS [PYTHON]]

Starts `gpufleet flags check` cold ROUNDS times (default 11) for a command line that is accepted and
for one that is refused and rewritten, and prints the median and the best time on the clock and of
the processor: on a busy machine the clock measures the others. The floor is Python that does
nothing. PYTHON is one with vLLM beside it: then it is also measured how long vLLM's own parser
takes to refuse the same line, which is its import, torch and all.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GPUFLEET = str(Path(sys.executable).with_name("gpufleet"))
CHECK = [GPUFLEET, "flags", "check", "--vllm", "0.32.0", "--"]
MODEL = "meta-llama/Llama-3.3-70B-Instruct"
ACCEPTED = [MODEL, "-tp", "4", "--max-model-len", "32k", "--no-enable-prefix-caching"]
REFUSED = [MODEL, "-tp", "4", "--swap-space", "4", "--gpu-memory-util", "0.9"]
GOAL = 0.3  # seconds, from a cold start


def main() -> int:
    """Measure and print; status 1 if the goal is missed in processor time."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    ways = {
        "accepted": [*CHECK, *ACCEPTED],
        "refused": [*CHECK, *REFUSED],
        "python (floor)": [sys.executable, "-c", ""],
    }
    print(f"median (best) of {rounds} cold starts, load {os.getloadavg()[0]:.1f}:")
    worst = 0.0
    for name, command in ways.items():
        status = int(name == "refused")
        run(command, status)  # the files are in memory, as they are for anybody's second command
        spent = [run(command, status) for _ in range(rounds)]
        clock, processor = ([each[at] for each in spent] for at in (0, 1))
        worst = max(worst, statistics.median(processor))
        print(
            f"  {name:16} {statistics.median(clock):6.3f} s ({min(clock):.3f}) on the clock, "
            f"{statistics.median(processor):6.3f} s ({min(processor):.3f}) of the processor"
        )
    if len(sys.argv) > 2:
        program = Path(__file__).parents[2] / "tests/unit/flags/real_parser.py"
        own_clock, own = run([sys.argv[2], str(program)])
        print(f"  {'vLLM itself':16} {own_clock:6.1f} s on the clock, {own:.1f} s of the processor")
    print(f"goal: {GOAL} s, {'kept' if worst <= GOAL else 'missed'}")
    return int(worst > GOAL)


def run(command: Sequence[str], status: int = 0) -> tuple[float, float]:
    """
    Return the seconds on the clock and of the processor that a command takes.

    The benchmark ends if the command has a different exit status: it would measure something else.
    """
    before, began = os.times(), time.monotonic()
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
    )
    seconds, after = time.monotonic() - began, os.times()
    if done.returncode != status:
        sys.exit(f"{' '.join(command)}: status {done.returncode}, not {status}: {done.stderr}")
    return seconds, sum(after[2:4]) - sum(before[2:4])


if __name__ == "__main__":
    sys.exit(main())
