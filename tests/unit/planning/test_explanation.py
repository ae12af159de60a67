"""The text of a plan's explanation: what an operator reads of tables and nodes."""

from __future__ import annotations

from dataclasses import replace

from gpufleet.planning.explanation import candidate_rows, draw_block, explain
from gpufleet.planning.gpu_totals import equal_nodes
from gpufleet.planning.planner import FleetPlan, plan
from gpufleet.planning.stage import Stage
from gpufleet.settings.node_settings import NodeSettings
from tests.support.models import described
from tests.unit.planning.test_planner import VLLM, machine


def stage(replica, *gpus, node="gpu-01", **others):
    uuids = tuple(f"GPU-{node}-{gpu}" for gpu in gpus)
    wide = {"tensor_parallel": len(gpus)}
    return Stage("m", replica, node, gpus, uuids, 8000 + replica, **{**wide, **others})


def test_a_picture_has_a_line_for_each_gpu():
    """What it serves, as which rank, over which link to the farthest of its group; or why not."""
    whole = machine("gpu-01", 4, 1, 1, pcie="NODE")
    node = replace(whole, gpus=tuple(gpu for gpu in whole.gpus if gpu.index != 3), unfit={3: "xid"})

    plan = FleetPlan((stage(0, 0, 1), stage(11, 4, 5)), ())
    found = draw_block(*equal_nodes(plan, [node]))

    assert found == [
        "gpu-01",
        "  GPU 0  m-0   rank 0  port 8000  NV18",
        "  GPU 1  m-0   rank 1  port 8000  NV18",
        "  GPU 2  free",
        "  GPU 3  not used: xid",
        "  GPU 4  m-11  rank 0  port 8011  NODE",
        "  GPU 5  m-11  rank 1  port 8011  NODE",
    ]


def test_ranks_go_on_over_the_nodes_of_a_replica():
    """And a link is that of the tensor-parallel group, not of the whole node."""
    both = ("gpu-01", "gpu-02")
    wide = {"tensor_parallel": 2, "pipeline_parallel": 4, "nodes": both}
    stages = (
        stage(0, 0, 1, 2, 3, **wide),
        stage(0, 0, 1, 2, 3, node="gpu-02", node_rank=1, **wide),
    )

    found = draw_block(*equal_nodes(FleetPlan(stages, ()), [machine("gpu-02", 2, 2)]))

    assert [line.split("  ")[3:] for line in found[1:]] == [
        [f"rank {rank}", "NV18"]
        for rank in (4, 5, 6, 7)  # only the first node has the endpoint
    ]


def test_candidates_are_a_table_for_each_kind_of_node():
    """The chosen one is marked, and what is not known is a question mark."""
    fleet = [machine("gpu-01", 2), machine("gpu-02", 2), machine("gpu-03", 1)]
    served = {"model": "/srv/model", "context": 8192}
    declared = NodeSettings.model_validate({"vllm": VLLM, "serving": {"m": served}})
    unknown = NodeSettings.model_validate(
        {"vllm": VLLM, "serving": {"m": {**served, "tensor_parallel": 1}}}
    )

    found = plan(fleet, {node.name: declared for node in fleet}, {"m": described("Qwen--Qwen3-8B")})
    blind = plan(fleet[:1], {"gpu-01": unknown})

    lines = explain(found).splitlines()
    assert lines[0] == "m on gpu-[01-02]: 2 x NVIDIA H100 80GB HBM3, all on NVLink"
    assert " ".join(lines[1].split()) == (
        "TP PP DP EP replicas fits weights/GPU KV tokens requests why"
    )
    assert [line.split()[:6] for line in lines[2:4]] == [
        [">", "1", "1", "1", "no", "4"],
        ["2", "1", "1", "no", "2", "fits"],
    ]
    assert lines[5] == "m on gpu-03: 1 x NVIDIA H100 80GB HBM3"
    assert "?" in explain(blind)
    (row,) = candidate_rows(blind)
    assert (row.verdict, row.kv_cache_tokens, row.weights_gib_per_gpu) == (
        "not checked",
        None,
        None,
    )
