"""Nodes that leave the inventory, or lose GPUs, under a replica that needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.errors import FleetError
from gpufleet.planning.explanation import Action, plan_changes
from gpufleet.planning.planner import FleetPlan, plan
from gpufleet.planning.stage import Running
from tests.unit.planning.test_planner import declare, machine, model

SPANNING = model(pipeline_parallel=2, span_nodes=True)
FLEET = ("gpu-01", "gpu-02", "gpu-03", "gpu-04")


def over(*nodes: str, number: int = 0, pipeline: int = 2) -> list[Running]:
    """A replica as its units on one GPU of each node say it."""
    arguments = (
        *(f"--node {node}=10.1.0.{rank}" for rank, node in enumerate(nodes, 1)),
        "--tensor-parallel-size 1",
        f"--pipeline-parallel-size {pipeline}",
    )
    return [
        Running("m", number, node, (f"GPU-{node}-0",), 8000, rank, arguments=arguments)
        for rank, node in enumerate(nodes)
    ]


def planned(names, running, wanted=SPANNING) -> FleetPlan:
    """The plan for nodes of one GPU; what runs on nodes that are not there is not known."""
    fleet = [machine(name, 1) for name in names]
    here = [each for each in running if each.node in names]
    return plan(fleet, dict.fromkeys(names, declare({"m": wanted})), running=here)


def refusal(*args) -> str:
    with pytest.raises(FleetError) as refused:
        planned(*args)
    (problem,) = refused.value.problems
    return problem


@pytest.mark.parametrize("gone", ["gpu-01", "gpu-02"], ids=["head", "worker"])
def test_a_node_that_a_replica_over_nodes_needs_may_not_leave(gone):
    """Whichever rank is left says where the others were; two free nodes would have room."""
    left = tuple(name for name in FLEET if name != gone)

    said = refusal(left, over("gpu-01", "gpu-02"))

    assert f"m-0 runs on gpu-01, gpu-02 together, but {gone} is no longer in the inventory" in said
    assert "`when_a_node_leaves: replan`" in said


def test_that_it_may_leave_is_asked_for():
    """The replica is placed anew, and the plan says why it moves."""
    found = planned(
        FLEET[1:], over("gpu-01", "gpu-02"), {**SPANNING, "when_a_node_leaves": "replan"}
    )

    assert [stage.node for stage in found.stages] == ["gpu-02", "gpu-03"]
    (move,) = found.moves
    assert str(move).endswith("gpu-01 is no longer in the inventory")


def test_what_is_refused_does_not_depend_on_whether_there_is_room():
    """One sentence says it: neither that nothing fits, nor where it would."""
    assert "gpu-02 is no longer in the inventory" in refusal(("gpu-01",), over("gpu-01", "gpu-02"))


def test_a_node_that_does_not_declare_the_model_any_more_has_left():
    fleet = [machine(name, 1) for name in FLEET]
    settings = {name: declare({"m": SPANNING}) for name in FLEET}
    settings["gpu-02"] = declare({})

    with pytest.raises(FleetError, match="gpu-02 no longer declares the model"):
        plan(fleet, settings, running=over("gpu-01", "gpu-02"))


@pytest.mark.parametrize(
    ("second", "reserved", "why"),
    [
        (machine("gpu-02", 2), {"gpu-02": [0]}, "reserved for others"),
        (
            replace(
                machine("gpu-02", 2),
                gpus=machine("gpu-02", 2).gpus[1:],
                unfit={0: "ecc-on-retired"},
            ),
            {},
            "ecc-on-retired",
        ),
    ],
    ids=["reserved", "unfit"],
)
def test_a_gpu_that_may_not_be_used_is_as_gone_as_its_node(second, reserved, why):
    """The node has another GPU, and even so the replica would have to start anew."""
    settings = dict.fromkeys(("gpu-01", "gpu-02"), declare({"m": SPANNING}))

    with pytest.raises(FleetError) as refused:
        plan(
            [machine("gpu-01", 1), second],
            settings,
            running=over("gpu-01", "gpu-02"),
            reserved=reserved,
        )

    (problem,) = refused.value.problems
    gone = f"gpu-02 ran the model on GPUs that can no longer be used (GPU 0 is not used ({why}))"
    assert gone in problem


def test_a_replica_that_is_not_asked_for_any_more_lets_its_node_go():
    """Of two replicas one is wanted, and the other loses nothing."""
    running = [*over("gpu-01", "gpu-02", number=0), *over("gpu-03", "gpu-04", number=1)]

    said = refusal(FLEET[:3], running, {**SPANNING, "replicas": 2})
    assert "m-1 runs on gpu-03, gpu-04 together" in said
    assert "lower `replicas` to 1" in said

    found = planned(FLEET[:3], running, SPANNING)
    assert [stage.id for stage in found.stages] == ["m-0", "m-0"]
    assert [stage.node for stage in found.stages] == ["gpu-01", "gpu-02"]


@pytest.mark.parametrize(
    "wanted", [model(), model(span_nodes=True, pipeline_parallel=1)], ids=["span", "shape"]
)
def test_who_asks_for_another_shape_asks_for_a_new_plan(wanted):
    """The replica stops as it is, with the node or without it."""
    found = planned(("gpu-01",), over("gpu-01", "gpu-02"), wanted)

    assert [stage.node for stage in found.stages] == ["gpu-01"]


def test_a_replica_on_one_node_goes_with_its_node():
    found = planned(("gpu-02",), [Running("m", 0, "gpu-01", ("GPU-gpu-01-0",), 8000)], model())

    assert [stage.node for stage in found.stages] == ["gpu-02"]


def test_a_replica_that_was_placed_anew_needs_its_old_node_no_more():
    """Back in the inventory, that one has a rank of the old group: it stops, the new stays."""
    running = [*over("gpu-02", "gpu-03"), over("gpu-01", "gpu-02")[0]]

    found = planned(FLEET[:3], running)

    assert [stage.node for stage in found.stages] == ["gpu-02", "gpu-03"]
    (move,) = found.moves
    assert [each.node for each in move.before] == ["gpu-01"]
    assert move.why == "gpu-02, gpu-03 also run this replica"


def test_what_a_new_plan_does_to_the_replica_is_shown_as_one_change():
    """Not as a replica that ran twice, where it has fewer nodes than before."""
    replanned = {**SPANNING, "when_a_node_leaves": "replan"}
    running = over("gpu-01", "gpu-02")
    (change,) = plan_changes(planned(FLEET[1:], running, replanned), running[1:])
    assert (change.action, change.why) == (Action.MOVE, "gpu-01 is no longer in the inventory")

    (change,) = plan_changes(planned(FLEET[:2], running, model(span_nodes=True)), running)
    assert change.action == Action.MOVE
    assert change.before.startswith("gpu-01 ")
    assert "gpu-02" in change.before
