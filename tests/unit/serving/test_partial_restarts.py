"""What a run would change on some nodes of a replica only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from gpufleet.planning.stage import Running
from gpufleet.serving.restarts import partial_restarts
from tests.unit.serving.test_restarts import RANKS, STAGE, both, settings, units_of

BOTH = ("gpu-01", "gpu-02")
NEW, OLD = settings(seed=2), settings(seed=1)


def said(
    running: Sequence[Running], reached: Collection[str] = BOTH, *, serial: bool = False
) -> list[str]:
    releases = {(node, "vllm"): "0.32.0-1a2b" for node in BOTH}
    return list(partial_restarts(RANKS, running, both(NEW), releases, reached, serial=serial))


@pytest.mark.parametrize("reached", [("gpu-01",), ("gpu-02",)], ids=["head", "worker"])
@pytest.mark.parametrize("running", [units_of(OLD), []], ids=["changes", "is new"])
def test_a_change_of_some_ranks_is_refused(reached, running):
    """They would wait for the others, and what serves now would have ended."""
    (problem,) = said(running, reached)

    left_out = "gpu-02" if reached == ("gpu-01",) else "gpu-01"
    assert "llama-0 is planned on gpu-01, gpu-02" in problem
    assert f"leaves out {left_out}" in problem


def test_a_change_of_all_ranks_in_one_run_is_none_and_so_is_one_of_other_nodes():
    assert said(units_of(OLD)) == []
    assert said(units_of(OLD), ("gpu-03",)) == []


def test_one_node_may_be_repaired_while_the_others_are_as_planned():
    _, worker = units_of(NEW)

    assert said([worker], ("gpu-01",)) == []
    assert said([units_of(OLD)[0], worker], ("gpu-01",)) == []


def test_another_release_is_another_start():
    """Their arguments are the same, but for the path of the release."""
    running = units_of(NEW, release="0.32.0-ffff")

    assert len(said(running, ("gpu-01",))) == 1


def test_ranks_do_not_start_one_after_the_other():
    """The first node's deploy waits for an endpoint that needs the second's."""
    (problem,) = said(units_of(OLD), serial=True)

    assert problem.startswith("--serial: llama-0 must start on gpu-01, gpu-02 at the same time")
    assert said(units_of(NEW), serial=True) == []


def test_a_replica_on_one_node_may_be_taken_alone():
    alone = replace(STAGE, node="gpu-01")

    assert list(partial_restarts([alone], [], both(NEW), {}, ("gpu-02",), serial=True)) == []
