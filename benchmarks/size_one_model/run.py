"""Measure how long it takes to size one model.

    python -m benchmarks.size_one_model.run [ROUNDS]

For every config in tests/data/models: read it (`describe`) and size it for an H100, with nothing
kept from the model before, ROUNDS times (default 3); the best time of each counts, since a busy
machine only ever adds to it. Then the same model with another `--max-num-seqs`, as a planner asks,
and `gpufleet size` from a cold start, files and all.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpufleet.catalog.gpu_models import card
from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.fit import size
from gpufleet.sizing.options import Options

MODELS = Path(__file__).parents[2] / "tests/data/models"
GPUFLEET = str(Path(sys.executable).with_name("gpufleet"))
GOAL = 0.05  # seconds, for one model


def main() -> int:
    """Measure and print; status 1 if the goal is missed."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    gpu = card("H100")
    asked = Options(
        gpu_memory_gib=gpu.memory_gib, compute_capability=gpu.compute_capability, vllm=(0, 33, 0)
    )
    first, again = {}, {}
    for file in sorted(MODELS.glob("*.json")):
        config = json.loads(file.read_text(encoding="utf-8"))["config"]
        try:
            spent = [measured(config, asked) for _ in range(rounds)]
        except FleetError:
            continue  # refused by name: not sized
        first[file.stem] = min(one for one, _ in spent)
        again[file.stem] = min(other for _, other in spent)
    print(f"best of {rounds} for each of {len(first)} models, load {os.getloadavg()[0]:.1f}:")
    for what, found in (("first time", first), ("other options", again)):
        slowest = max(found, key=lambda name: found[name])
        print(
            f"  {what:14} median {1e3 * statistics.median(found.values()):6.2f} ms, "
            f"slowest {1e3 * found[slowest]:6.2f} ms ({slowest})"
        )
    print(f"  cold start     {min(cold() for _ in range(rounds)):6.2f} s of `gpufleet size`")
    worst = max(first.values())
    print(f"goal: {1e3 * GOAL:g} ms, {'kept' if worst <= GOAL else 'missed'}")
    return int(worst > GOAL)


def measured(config: Mapping[str, Any], asked: Options) -> tuple[float, float]:
    """Return the processor's seconds for a model, and for the same one with other options."""
    start = time.process_time()
    description = describe(ModelFiles(config))
    size(description, asked)
    middle = time.process_time()
    size(description, replace(asked, max_num_seqs=77))
    return middle - start, time.process_time() - middle


def cold() -> float:
    """Return the seconds on the clock of one command."""
    with tempfile.TemporaryDirectory() as folder:
        source = MODELS / "meta-llama--Meta-Llama-3.1-8B.json"
        config = json.loads(source.read_text(encoding="utf-8"))["config"]
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        start = time.perf_counter()
        subprocess.run(
            [GPUFLEET, "size", folder, "--gpu", "H100"], check=False, capture_output=True
        )
        return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
