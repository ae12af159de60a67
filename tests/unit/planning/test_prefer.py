"""`prefer`: groups of nodes that a model's new replicas go to first."""

from __future__ import annotations

from collections import Counter

import pytest

from gpufleet.planning.planner import plan
from gpufleet.planning.stage import Running
from gpufleet.settings.node_settings import NodeSettings
from tests.unit.planning.test_planner import VLLM, machine

GROUPS = {"a-01": ("gpu", "gpu_a"), "b-01": ("gpu", "gpu_b"), "b-02": ("gpu", "gpu_b")}


def planned(prefer, replicas, running=()):
    served = {"model": "/srv/m", "tensor_parallel": 2, "replicas": replicas, "prefer": prefer}
    settings = NodeSettings.model_validate({"vllm": VLLM, "serving": {"m": served}})
    nodes = [machine(name, 4) for name in GROUPS]
    found = plan(nodes, dict.fromkeys(GROUPS, settings), running=running, groups=GROUPS)
    return Counter(stage.node for stage in found.stages)


@pytest.mark.parametrize(
    ("prefer", "replicas", "on"),
    [
        ([], 3, {"a-01": 1, "b-01": 1, "b-02": 1}),
        (["gpu_a"], 2, {"a-01": 2}),
        (["gpu_b"], 2, {"b-01": 1, "b-02": 1}),
        (["gpu_b"], 3, {"b-01": 2, "b-02": 1}),
        # What they have no room for goes to the others.
        (["gpu_a"], 3, {"a-01": 2, "b-01": 1}),
        (["gpu_b", "gpu_a"], 5, {"b-01": 2, "b-02": 2, "a-01": 1}),
        (["gpu_a"], "fit", {"a-01": 2, "b-01": 2, "b-02": 2}),
    ],
)
def test_new_replicas_fill_the_preferred_nodes_first(prefer, replicas, on):
    assert planned(prefer, replicas) == on


def test_a_replica_that_runs_elsewhere_stays():
    uuids = tuple(gpu.uuid for gpu in machine("b-02", 4).gpus[:2])
    runs = Running(model="m", replica=0, node="b-02", gpu_uuids=uuids, port=8000)

    assert planned(["gpu_a"], 2, [runs]) == {"b-02": 1, "a-01": 1}
