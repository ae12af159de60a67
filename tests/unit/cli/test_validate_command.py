"""`gpufleet validate`: exit status, what is printed where, and what it costs."""

from __future__ import annotations

import json
import resource

import pytest

from tests.support.fleet_folder import REVISION, FleetFolder
from tests.unit.fleet.test_inventory_check import LOCKS

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-14B", "Qwen/Qwen3-4B")
# Of the processor. On a machine with ten times more to do than cores it was 2.4 s, else below 2 s.
GOAL_SECONDS = 2
BUSY = 2


@pytest.fixture
def fleet(tmp_path):
    """Fourteen nodes of two kinds, and seven models."""
    nodes = {
        "gpu_h100": [f"h-{number:02}" for number in range(1, 13)],
        "gpu_a100": ["a-01", "a-02"],
    }
    serving = {
        f"model-{number}": {"model": MODELS[number % 4], "revision": REVISION, "context": 8192}
        for number in range(7)
    }
    vllm = {"version": "0.32.0", **LOCKS, "listen": "127.0.0.1"}
    return FleetFolder(tmp_path, nodes, {"all": {"vllm": vllm, "serving": serving}}, *MODELS)


def test_0_is_fine_1_is_notes_if_asked_and_2_is_mistakes(fleet):
    run = fleet.run("validate")
    assert (run.returncode, "14 nodes, 7 models: no mistakes" in run.stdout) == (0, True)
    assert "note: " in run.stderr  # no lock names the models' files
    assert fleet.run("validate", "--strict").returncode == 1

    fleet.write("gpu_a100", {"serving": {"model-0": {"modell": "Qwen/Qwen3-8B"}}})
    run = fleet.run("validate", "--json")
    assert run.returncode == 2
    assert "did you mean 'model'?" in " ".join(json.loads(run.stdout)["problems"])


def test_fourteen_nodes_with_seven_models_take_two_seconds_or_twice_that_if_it_is_busy(fleet):
    hardware = ("--as", "gpu_h100=h100x8,gpu_a100=a100x8", "--models", str(fleet.models))
    fleet.run("validate", *hardware)  # Python keeps what it has compiled
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    run = fleet.run("validate", *hardware)

    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert "112 GPUs: 7 planned, 105 free, 0 unfit" in run.stdout, run.stderr
    assert spent < GOAL_SECONDS * BUSY
