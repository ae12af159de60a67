"""A plan in short: what becomes of every GPU, and which nodes hold the same."""

from __future__ import annotations

from dataclasses import replace

from gpufleet.planning.gpu_totals import count_gpus, equal_nodes, replica_names
from gpufleet.planning.planner import FleetPlan
from tests.unit.planning.test_explanation import stage
from tests.unit.planning.test_planner import machine


def test_every_gpu_is_planned_free_reserved_or_unfit():
    first = machine("gpu-01", 4, 4)
    second = replace(
        machine("gpu-02", 8), gpus=machine("gpu-02", 8).gpus[1:], unfit={0: "ecc-uncorrected"}
    )
    plan = FleetPlan((stage(0, 0, 1), stage(1, 1, 2, node="gpu-02")), ())

    found = count_gpus(plan, [first, second], {"gpu-01": {7}, "gpu-02": {0}})

    assert (found.gpus, found.planned, found.reserved, found.unfit) == (16, 4, 1, 1)
    assert found.planned + found.free + found.reserved + found.unfit == found.gpus
    # Of gpu-02 five are left that NVLink joins; of gpu-01 two and three.
    assert (found.largest_free_island, found.largest_on) == (5, ("gpu-02",))
    assert str(found) == (
        "16 GPUs: 4 planned, 10 free, 1 reserved for others, 1 unfit; the largest free island has "
        "5 GPUs (gpu-02)"
    )


def test_a_full_fleet_has_no_free_island():
    plan = FleetPlan((stage(0, 0, 1, 2, 3),), ())

    assert str(count_gpus(plan, [machine("gpu-01", 4)], {})) == (
        "4 GPUs: 4 planned, 0 free, 0 unfit"
    )


def test_nodes_that_differ_in_a_replicas_number_alone_are_one_block():
    nodes = [machine(name, 4) for name in ("gpu-01", "gpu-02", "gpu-03")]
    stages = [replace(stage(at, 0, 1, node=node.name), port=8000) for at, node in enumerate(nodes)]

    (block,) = equal_nodes(FleetPlan(tuple(stages), ()), nodes)

    assert block.names == "gpu-[01-03]"
    assert block.replicas == ((0, 1, 2),)


def test_another_gpu_port_model_or_unfit_gpu_makes_another_block():
    same = replace(stage(0, 0, 1), port=8000)
    nodes = [machine(f"gpu-0{number}", 4) for number in range(1, 6)]
    nodes[4] = replace(nodes[4], unfit={9: "xid"})
    stages = (
        same,
        replace(stage(1, 0, 1, node="gpu-02"), port=8001),
        replace(stage(2, 2, 3, node="gpu-03"), port=8000),
        replace(stage(3, 0, 1, node="gpu-04"), port=8000, model="other"),
        replace(stage(4, 0, 1, node="gpu-05"), port=8000),
    )

    found = equal_nodes(FleetPlan(stages, ()), nodes)

    assert [block.names for block in found] == [node.name for node in nodes]


def test_replicas_are_named_short():
    assert replica_names("m", (3, 0, 1)) == "m-[0-1,3]"
