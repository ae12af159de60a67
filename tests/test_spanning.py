"""Replicas that the operator asks for by numbers larger than a node: where their parts lie."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpufleet import assessment
from gpufleet.settings import NodeSettings
from tests.test_cluster_network import nic

TESTS = Path(__file__).parent


# The whole way, from probes to what the processes are started with


def assessed(**asked):
    """Two recorded nodes with a config and one free GPU each, as the lab has them."""
    config = json.loads((TESTS / "data/models/Qwen--Qwen3-0.6B.json").read_text())["config"]
    absent = {"missing": "absent"}
    documents, declared = {}, {}
    for number, name in enumerate(("gpu-01", "gpu-02"), 1):
        document = json.loads((TESTS / "nodes/h100x8.json").read_text())
        document["models"] = {
            "/srv/q": {"config": config, "hf_quant_config": absent, "bytes": absent}
        }
        document["nics"]["net"] = [nic("eth1", f"10.1.0.{number}/24", pci="0000:02:00.0")]
        documents[name] = document
        settings = {
            "vllm": {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"},
            "gpus": {"reserved": list(range(1, 8))},
            "serving": {
                "q": {"model": "/srv/q", "context": 8192, "span_nodes": True, **asked},
            },
        }
        declared[name] = SimpleNamespace(
            groups=(), settings=NodeSettings.model_validate(settings), origins={}
        )
    return assessment.planned(documents, declared)


@pytest.mark.parametrize(
    ("asked", "crosses"),
    [
        pytest.param({"tensor_parallel": 2}, True, id="tensor"),
        pytest.param({"tensor_parallel": 1, "pipeline_parallel": 2}, False, id="pipeline"),
        pytest.param({"tensor_parallel": 1, "data_parallel": 2}, False, id="data"),
        pytest.param({"data_parallel": 2}, False, id="data-of-planned-engines"),
    ],
)
def test_two_nodes_with_a_free_gpu_each_hold_a_replica_of_two(asked, crosses):
    """Ranks, sizes and the network that joins them; slow layers are said to be so."""
    found = assessed(**asked).plan

    assert [(each.node, each.node_rank, each.gpus) for each in found.stages] == [
        ("gpu-01", 0, (0,)),
        ("gpu-02", 1, (0,)),
    ]
    for stage in found.stages:
        assert stage.nodes == ("gpu-01", "gpu-02")
        sizes = stage.tensor_parallel * stage.pipeline_parallel * stage.data_parallel
        assert sizes == 2
        assert [network.address for _, network in stage.group.networks] == ["10.1.0.1", "10.1.0.2"]
    assert any("every layer waits for the network" in each for each in found.reasons) == crosses
