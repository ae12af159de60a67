"""Which settings can be tried on a replica is what the plan of the whole fleet says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.fleet.fleet_plan import running_stages
from gpufleet.fleet.trial_plans import TrialPlans
from gpufleet.inventory.loader import read
from tests.unit.fleet.test_measured_rates import MeasuredFleet


@pytest.fixture
def fleet(tmp_path: Path) -> MeasuredFleet:
    found = MeasuredFleet(tmp_path)
    found.start()
    return found


def plans(fleet: MeasuredFleet, replica: str = "qwen-1") -> TrialPlans:
    running = next(each for each in running_stages(fleet.nodes) if each.id == replica)
    return TrialPlans(fleet.nodes, read(fleet.inventory).gpu_nodes, running, fleet.inventory)


def test_divisions_that_fit_are_those_of_the_plan(fleet: MeasuredFleet) -> None:
    found = plans(fleet).divisions()

    assert {2, 4} <= {*found}
    assert 3 not in found


def test_a_value_is_refused_for_what_the_plan_says(fleet: MeasuredFleet) -> None:
    found = plans(fleet)

    assert found.refusal({"max-num-seqs": 128}) == ""
    assert found.refusal({"max-num-seqs": 128, "max-num-batched-tokens": 4096}) == ""
    assert "max-num-seqs" in found.refusal({"max-num-batched-tokens": 8, "max-num-seqs": 64})
    assert "tensor_parallel" in found.refusal({"tensor_parallel": 3})


def test_a_division_that_takes_the_node_from_others_is_refused(fleet: MeasuredFleet) -> None:
    """`chat` runs on one of the two nodes: eight GPUs for a replica leave it none."""
    here = next(each.node for each in running_stages(fleet.nodes) if each.model == "chat")
    beside = next(
        each.id
        for each in running_stages(fleet.nodes)
        if each.model == "qwen" and each.node == here
    )

    assert plans(fleet, beside).refusal({"tensor_parallel": 4}) == ""
    assert plans(fleet, beside).refusal({"tensor_parallel": 8}) != ""


def test_a_cordon_that_a_killed_run_has_left_is_not_in_the_way(fleet: MeasuredFleet) -> None:
    node = plans(fleet).running.node
    mark = {"by": "ann", "why": "x", "since": 1.0, "upgrade": None, "passing": False}
    fleet.nodes[node]["cordon"] = mark

    assert plans(fleet).refusal({"tensor_parallel": 4}) == ""


def test_a_node_without_an_answer_refuses_every_value(fleet: MeasuredFleet) -> None:
    found = plans(fleet)
    other = next(name for name in fleet.nodes if name != found.running.node)
    del fleet.nodes[other]

    assert found.refusal({"max-num-seqs": 128}) == f"{other}: the node does not answer"


def test_settings_that_were_not_deployed_yet_are_named(fleet: MeasuredFleet) -> None:
    """Units of a probe say with which fingerprint their process was started."""
    found = plans(fleet)
    assert found.served.flags == {"max-num-seqs": 64}

    fleet.settings["serving"]["qwen"]["replicas"] = 1
    fleet.folder.write("gpu", fleet.settings)
    assert plans(fleet).problem() != ""
