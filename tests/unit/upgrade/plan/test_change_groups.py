"""What is changed at once: as little as possible, and never half of what hangs together."""

from __future__ import annotations

import pytest

from gpufleet.planning.explanation import plan_changes
from gpufleet.planning.stage import Handover
from gpufleet.serving.restarts import NO_ARGUMENT
from gpufleet.upgrade.plan.change_groups import (
    STOPPED,
    changed_replicas,
    groups,
    without_cordoned,
)
from gpufleet.upgrade.plan.wave import Group
from tests.unit.upgrade.fleets import group, plan, runs, stage


def grouped(planned, running, restarts=None, node_changes=None):
    changes = plan_changes(planned, running, restarts)
    return groups(planned, running, restarts or {}, changes, node_changes)


FOUR = [(f"tiny-{n}", f"gpu-0{n // 2}", f"GPU-{n}", 8000 + n % 2) for n in range(4)]
STAGES = plan(*(stage(name, node, gpu, port=port) for name, node, gpu, port in FOUR))
RUNNING = [runs(name, node, gpu, port=port) for name, node, gpu, port in FOUR]


def test_a_fleet_as_it_is_planned_has_no_group():
    assert grouped(STAGES, RUNNING) == ()


def test_each_replica_that_differs_is_a_group_of_its_own_although_its_node_has_others():
    found = grouped(STAGES, RUNNING, {"tiny-2": "+ --seed 1", "tiny-0": "vLLM 0.31.0 -> 0.32.0"})

    assert found == (
        Group("tiny-0", "stages", ("gpu-00",), ("tiny-0",), ("vLLM 0.31.0 -> 0.32.0",)),
        Group("tiny-2", "stages", ("gpu-01",), ("tiny-2",), ("+ --seed 1",)),
    )


def test_groups_are_in_the_order_of_their_numbers_whatever_the_order_in_which_they_are_found():
    names = [f"tiny-{number}" for number in (10, 9, 2)]
    planned = plan(*(stage(name, f"n-{name}", f"GPU-{name}") for name in names))
    running = [runs(name, f"n-{name}", f"GPU-{name}") for name in names]

    found = grouped(planned, running, dict.fromkeys(names, "+ --seed 1"))

    assert [each.id for each in found] == ["tiny-2", "tiny-9", "tiny-10"]


def test_a_replica_over_nodes_is_one_group_of_all_its_nodes():
    nodes = ("gpu-01", "gpu-02")
    ranks = [stage("big-0", node, f"GPU-{node}", nodes=nodes) for node in nodes]
    running = [runs("big-0", node, f"GPU-{node}", rank=at) for at, node in enumerate(nodes)]

    (found,) = grouped(plan(*ranks), running, {"big-0": "- --seed 1"})

    assert (found.nodes, found.replicas) == (nodes, ("big-0",))


def test_who_gets_a_gpu_is_grouped_with_who_gives_it_up_and_with_nobody_else():
    """big takes GPU-1 of tiny-1, which moves; tiny-0 restarts beside them, on its own."""
    running = [runs("tiny-0", "a", "GPU-0"), runs("tiny-1", "a", "GPU-1", port=8001)]
    planned = plan(
        stage("big-0", "a", "GPU-1", port=9000),
        stage("tiny-0", "a", "GPU-0"),
        stage("tiny-1", "b", "GPU-7"),
    )

    found = grouped(planned, running, {"tiny-0": "+ --seed 1"})

    assert [(each.id, each.nodes) for each in found] == [
        ("big-0+tiny-1", ("a", "b")),
        ("tiny-0", ("a",)),
    ]
    assert (found[0].comes, found[0].goes) == (("big-0",), ())


def test_servers_that_share_a_gpu_are_grouped_if_both_change_and_left_alone_if_they_do_not():
    """One that stops while another starts there would free memory that the other measures."""
    names = ("chat-0", "embed-0", "rerank-0")
    running = [runs(name, "a", "GPU-0", port=8000 + at) for at, name in enumerate(names)]
    planned = plan(*(stage(name, "a", "GPU-0", port=8000 + at) for at, name in enumerate(names)))

    both = grouped(planned, running, {"chat-0": "+ --seed 1", "embed-0": "+ --seed 1"})
    one = grouped(planned, running, {"chat-0": "+ --seed 1"})

    assert [each.id for each in both] == ["chat-0+embed-0"]
    assert [each.id for each in one] == ["chat-0"]


def test_who_gets_a_port_is_grouped_with_who_gives_it_up():
    running = [runs("old-0", "a", "GPU-0", port=8000)]
    planned = plan(stage("new-0", "a", "GPU-1", port=8000))

    (found,) = grouped(planned, running)

    assert (found.id, found.comes, found.goes) == ("new-0+old-0", ("new-0",), ("old-0",))


@pytest.mark.parametrize(("port", "joined"), [(8001, True), (8002, True), (8003, False)])
def test_servers_give_up_the_port_of_their_supervisor_too(port: int, joined: bool):
    each_engine = (
        "/opt/vllm/releases/0.31.0-ab/bin/vllm serve",
        "--data-parallel-multi-port-external-lb",
        "--data-parallel-size-local 2",
    )
    running = [runs("old-0", "a", "GPU-0", "GPU-1", port=8000, arguments=each_engine)]
    assert running[0].servers == (8000, 8001)
    planned = plan(stage("new-0", "a", "GPU-2", port=port))

    found = [each.id for each in grouped(planned, running)]

    assert found == (["new-0+old-0"] if joined else ["new-0", "old-0"])


@pytest.mark.parametrize(("first", "joined"), [(5600, True), (5601, True), (5602, False)])
def test_who_hands_over_its_cache_by_a_port_is_grouped_with_who_gives_it_up(
    first: int, joined: bool
):
    """Two engines hand over from 5600 and 5601."""
    engines = ("/opt/vllm/releases/0.31.0-ab/bin/vllm serve", "--data-parallel-size 2")
    running = [runs("old-0", "a", "GPU-0", side_channel=5600, arguments=engines)]
    planned = plan(stage("new-0", "a", "GPU-1", port=9000, handover=Handover((), first)))

    found = [each.id for each in grouped(planned, running)]

    assert found == (["new-0+old-0"] if joined else ["new-0", "old-0"])


def test_the_same_port_on_another_node_joins_nobody():
    running = [runs("old-0", "a", "GPU-0"), runs("other-0", "b", "GPU-1")]
    planned = plan(stage("new-0", "b", "GPU-2", port=8001), stage("other-0", "b", "GPU-1"))

    assert [each.id for each in grouped(planned, running)] == ["new-0", "old-0"]


def test_a_node_that_changes_takes_all_its_replicas_with_it():
    found = grouped(STAGES, RUNNING, {}, {"gpu-01": "driver 570.1 -> 580.2"})

    assert found == (
        Group(
            "gpu-01",
            "node",
            ("gpu-01",),
            ("tiny-2", "tiny-3"),
            ("gpu-01: driver 570.1 -> 580.2",),
        ),
    )


def test_a_node_without_replicas_changes_as_well():
    (found,) = grouped(STAGES, RUNNING, {}, {"gpu-09": "driver none -> 580.2"})

    assert (found.kind, found.nodes, found.replicas) == ("node", ("gpu-09",), ())


def test_a_replica_over_nodes_joins_its_nodes_and_what_else_is_on_them():
    """The driver of b changes; big is on b and c, so c stops too, and tiny on c with it."""
    nodes = ("b", "c")
    stages = [stage("big-0", node, f"GPU-{node}", nodes=nodes) for node in nodes]
    stages += [stage("tiny-0", "c", "GPU-9", port=8005), stage("tiny-1", "d", "GPU-8")]
    running = [runs("big-0", node, f"GPU-{node}", rank=at) for at, node in enumerate(nodes)]
    running += [runs("tiny-0", "c", "GPU-9", port=8005), runs("tiny-1", "d", "GPU-8")]

    found = grouped(plan(*stages), running, {"tiny-1": "+ --seed 1"}, {"b": "driver"})

    assert [(each.id, each.kind, each.replicas) for each in found] == [
        ("b+c", "node", ("big-0", "tiny-0")),
        ("tiny-1", "stages", ("tiny-1",)),
    ]


def test_another_fingerprint_is_a_change_although_no_argument_differs():
    wanted = {("gpu-00", "tiny-0"): "aa", ("gpu-00", "tiny-1"): "bb", ("gpu-01", "tiny-2"): "cc"}
    wanted["gpu-01", "tiny-3"] = "dd"
    started = {("gpu-00", "tiny-0"): "aa", ("gpu-00", "tiny-1"): "old", ("gpu-01", "tiny-2"): None}
    started["gpu-01", "tiny-3"] = "old"

    found = changed_replicas({"tiny-1": "+ --seed 1"}, wanted, started)

    assert found == {"tiny-1": "+ --seed 1", "tiny-2": STOPPED, "tiny-3": NO_ARGUMENT}
    assert [each.id for each in grouped(STAGES, RUNNING, found)] == ["tiny-1", "tiny-2", "tiny-3"]


def test_a_replica_that_is_new_has_that_as_its_only_reason():
    planned = plan(*STAGES.stages, stage("tiny-4", "gpu-02", "GPU-4"))
    differs = changed_replicas({}, {("gpu-02", "tiny-4"): "ee"}, {})

    (found,) = grouped(planned, RUNNING, differs)

    assert (found.comes, len(found.why)) == (("tiny-4",), 1)
    assert found.why[0].startswith("start: nothing -> gpu-02 GPU 0")


def test_a_replica_that_moves_is_not_also_said_to_differ_in_its_environment():
    planned = plan(*STAGES.stages, stage("tiny-4", "gpu-02", "GPU-4"))

    (found,) = grouped(planned, RUNNING, {"tiny-4": NO_ARGUMENT})

    assert found.why == (found.why[0],)
    assert NO_ARGUMENT not in found.why


@pytest.mark.parametrize("nodes", [("gpu-01",), ("gpu-00", "gpu-01")])
def test_what_a_person_has_cordoned_stays_as_it_is_and_is_said(nodes):
    mine, others = group("tiny-0", *nodes), group("tiny-1", "gpu-02")

    on, off, said = without_cordoned([mine, others], {"gpu-01": "fan 3 is loud"})

    assert (on, off) == ((others,), (mine,))
    assert "tiny-0" in said[0]
    assert "fan 3 is loud" in said[0]
