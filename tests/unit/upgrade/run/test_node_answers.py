"""What a node answered is read as what it means for a change, and what it left out as not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpufleet.node.marks import Mark
from gpufleet.planning.stage import Running
from gpufleet.upgrade.run.group_units import cordoned_by_people
from gpufleet.upgrade.run.node_answers import NodeLook, RequestsLeft, UnitLook
from gpufleet.upgrade.run.observe import without_drain, without_requests

UP = UnitLook(
    "vllm-tiny-0.service", "active", "running", 1.0, "abc", "abc", "0.32.0-e28e5608c2", restarts=0
)


@pytest.mark.parametrize("state", ["active", "reloading", "activating", "deactivating"])
def test_a_unit_has_its_process_until_it_is_down(state: str) -> None:
    assert replace(UP, active=state).is_running


@pytest.mark.parametrize("state", ["inactive", "failed", "maintenance", ""])
def test_a_unit_that_is_down_or_not_known_has_none(state: str) -> None:
    assert not replace(UP, active=state).is_running


def test_a_unit_runs_with_what_its_process_was_started_with() -> None:
    assert UP.is_running_with("abc")
    assert not UP.is_running_with("def")  # which its file may have by now
    assert not replace(UP, started=None).is_running_with("abc")


def test_a_unit_whose_fingerprint_nobody_knows_runs_with_nothing() -> None:
    assert not replace(UP, started=None).is_running_with(None)


@pytest.mark.parametrize("state", ["activating", "deactivating", "failed"])
def test_a_unit_that_comes_or_goes_runs_with_nothing_yet(state: str) -> None:
    assert not replace(UP, active=state).is_running_with("abc")


def test_servers_are_quiet_when_all_say_that_nothing_is_left() -> None:
    assert RequestsLeft({"a": 0, "b": 0}, 1.0).quiet
    assert RequestsLeft({}, 0.0).quiet


@pytest.mark.parametrize(
    "left",
    [
        RequestsLeft({"a": 0, "b": 1}, 1.0),
        RequestsLeft({"a": 0, "b": None}, 1.0),
        RequestsLeft({"a": 0}, 1.0, "b: no such unit"),
    ],
)
def test_what_is_left_or_not_known_is_not_quiet(left: RequestsLeft) -> None:
    assert not left.quiet


def look(node: str, cordon: Mark | None = None, **more: Any) -> NodeLook:
    nothing: dict[str, Any] = {"drained": {}, "next": None, "kept": {}, "units": {}, "releases": {}}
    return NodeLook(node, "boot", 1.0, None, cordon, **{**nothing, **more})


def test_only_what_people_have_cordoned_stops_an_upgrade() -> None:
    person = Mark("ann@laptop", "a fan", 0.0, None)
    upgrade = Mark("ann@laptop", "", 0.0, "20261122T134708Z-ab12")
    nodes = {"gpu-01": None, "gpu-02": person, "gpu-03": upgrade}

    (said,) = cordoned_by_people({name: look(name, mark) for name, mark in nodes.items()})

    assert said.startswith("gpu-02 was cordoned by ann@laptop: a fan")


def test_a_replica_that_is_down_or_drained_carries_no_load_and_it_is_said_why() -> None:
    person = Mark("ann@laptop", "a fan", 0.0, None)
    failed = replace(UP, unit="vllm-tiny-1.service", active="failed")
    looks = {
        "gpu-01": look("gpu-01", units={UP.unit: UP, failed.unit: failed}),
        "gpu-02": look(
            "gpu-02",
            units={"vllm-tiny-2.service": replace(UP, unit="vllm-tiny-2.service")},
            drained={"tiny-2": person},
        ),
    }
    running = [
        Running("tiny", number, node, ("u",))
        for number, node in ((0, "gpu-01"), (1, "gpu-01"), (2, "gpu-02"), (3, "gpu-02"))
    ]

    assert without_requests(running, looks) == {
        "tiny-1": "the unit is failed on gpu-01",
        "tiny-2": "drained by ann@laptop: a fan",
        "tiny-3": "the unit is not found on gpu-02",
    }


def test_a_drained_replica_carries_load_for_the_test_that_has_it_for_itself() -> None:
    person = Mark("ann@laptop", "try a setting", 0.0, None)
    units = {f"vllm-tiny-{n}.service": replace(UP, unit=f"vllm-tiny-{n}.service") for n in (0, 1)}
    seen = look("gpu-01", units=units, drained={"tiny-0": person, "tiny-1": person})
    running = [Running("tiny", number, "gpu-01", ("u",)) for number in (0, 1)]

    out = without_requests(running, {"gpu-01": without_drain(seen, "tiny-0")})
    assert out == {"tiny-1": "drained by ann@laptop: try a setting"}
    assert without_drain(seen, None) == seen
