"""What the plan foretells of memory is what the real server logs when it starts, on a CPU node.

The nodes' GPUs are simulated and vLLM's CPU build serves, so the cache has the size that the flags
ask for; its tokens and the requests that fit are vLLM's own arithmetic on the real model.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import package_mirror, provisioning_sources
from tests.lab.conftest import ROOT, Fleet
from tests.lab.faults import declared

GPUFLEET = str(Path(sys.executable).with_name("gpufleet"))
UNIT = "vllm-tiny-0.service"


def asked(fleet: Fleet, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [GPUFLEET, *arguments],
        cwd=ROOT,
        env=fleet.env(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def logged(fleet: Fleet, node: str) -> tuple[int, float]:
    """Return the tokens and the concurrency that the newest start logged."""
    log = fleet.ssh(node, f"journalctl -u {UNIT} -o cat --no-pager _SYSTEMD_INVOCATION_ID="
                          f"$(systemctl show -P InvocationID {UNIT})")  # fmt: skip
    tokens = re.findall(r"KV cache size: ([\d,]+) tokens", log)
    at_once = re.findall(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", log)
    assert tokens, log[-2000:]
    assert at_once, log[-2000:]
    return int(tokens[-1].replace(",", "")), float(at_once[-1])


@pytest.mark.parametrize(
    ("flags", "tensor_parallel"),
    [({}, 2), ({"kv-cache-memory-bytes": "24M", "max-model-len": 300}, 1)],
)
def test_the_server_logs_the_tokens_that_the_plan_foretold(
    fleet: Fleet, flags: dict[str, Any], tensor_parallel: int
) -> None:
    own = {**declared("tiny")["flags"], **flags}
    if flags:
        fleet.set({"tiny": {"flags": own, "tensor_parallel": tensor_parallel}})
        run = fleet.pyinfra("-y", seconds=1200)
        assert run.status == 0, run.output
    plan = asked(fleet, "plan", fleet.inventory, "--json")
    (row,) = [each for each in plan["candidates"] if each["chosen"]][:1]
    node = next(each["node"] for each in plan["stages"] if each["id"] == "tiny-0")

    tokens, at_once = logged(fleet, node)
    assert row["kv_cache_tokens"] == tokens
    assert row["max_concurrency"] == pytest.approx(at_once, abs=0.01)

    files = fleet.state.dir / package_mirror.MODELS / provisioning_sources.MODEL
    sizing = asked(fleet, "size", str(files), "--json", *options(own, tensor_parallel))
    assert sizing["kv_cache_tokens"] == tokens
    assert sizing["max_concurrency"] == pytest.approx(at_once, abs=0.01)
    assert sizing["confidence"] == "certain"


def options(flags: dict[str, Any], tensor_parallel: int) -> list[str]:
    return [
        *("--vllm", "0.32.0", "--device", "cpu", "--gpu-memory-gib", "24"),
        *("--tensor-parallel-size", str(tensor_parallel)),
        *(f"--{name}={flags[name]}" for name in ("kv-cache-memory-bytes", "max-model-len")),
        *(f"--{name}={flags[name]}" for name in ("max-num-seqs", "max-num-batched-tokens")),
    ]


def test_a_model_that_cannot_fit_is_refused_before_anything_changes(fleet: Fleet) -> None:
    """One request of the length asked for needs more than the cache has."""
    before = fleet.pids()
    own = {**declared("tiny")["flags"], "kv-cache-memory-bytes": "64K"}
    fleet.set({"tiny": {"flags": own}})
    run = fleet.pyinfra("-y")
    assert run.status != 0
    assert "serving.tiny" in run.output
    assert "Traceback" not in run.output
    assert fleet.pids() == before
