"""Replicas that passed their gates are asked once more: which do not serve, as nodes answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from gpufleet.upgrade.run.actions import FleetActions
from gpufleet.upgrade.run.node_answers import Answer
from gpufleet.upgrade.run.node_questions import NodeQuestion
from gpufleet.upgrade.run.upgrade_journal import Journal
from tests.unit.upgrade.fleets import group

ME = "20261122T134708Z-ab12"
UNITS = {"gpu-01": "vllm-tiny-0.service", "gpu-02": "vllm-tiny-1.service"}
PERSON = {"by": "ann@laptop", "why": "a fan", "since": 0.0, "upgrade": None}


def look(node: str, **more: Any) -> dict[str, Any]:
    """What a node prints of itself while its unit is the new one."""
    following = {"plan": "p", "units": {UNITS[node]: "new"}, "remove": []}
    return {"schema": 1, "boot_id": "b", "clock": 1.0, "next": following, "units": [], **more}


def ready(node: str, *, serves: bool) -> dict[str, Any]:
    """What it prints of the wait; a unit that does not serve is in its restart loop."""
    unit = {"ActiveState": "activating", "SubState": "auto-restart", "NRestarts": "3"}
    seen = {"unit": unit, "journal": ["EngineCore died"]}
    said = {"unit": UNITS[node], "ready": serves, "seconds": 1.0, "served_name": "tiny"}
    return {"schema": 1, "units": [said if serves else {**said, "seen": seen, "restarts": 3}]}


class Nodes:
    """Nodes that answer each question with what they are given; an absent one is away."""

    def __init__(self, looks: Mapping[str, Any], waits: Mapping[str, Any]) -> None:
        self.answers = {"the query of changes": looks, "the wait for answers": waits}
        self.asked: list[tuple[str, str]] = []

    def ask(self, wanted: Mapping[str, NodeQuestion]) -> dict[str, Answer]:
        self.asked += [(each.what, name) for name, each in wanted.items()]
        return {
            n: self.answers[each.what].get(n, "no answer in time") for n, each in wanted.items()
        }


def fallen(tmp_path: Path, nodes: Nodes) -> Mapping[str, Any]:
    """Ask about both replicas."""
    groups = [group("tiny-0", "gpu-01"), group("tiny-1", "gpu-02")]
    with Journal.create(tmp_path, ME) as journal:
        journal.append("started", id=ME)
        nothing = cast("Any", None)
        acting = FleetActions(
            journal=journal,
            nodes=cast("Any", nodes),
            declared=nothing,
            rules=nothing,
            by="me",
            deploy=nothing,
            front=nothing,
            servers={},
            found=nothing,
        )
        return acting.find_fallen(groups)


def test_one_that_died_is_named_with_its_last_words_and_others_are_not(tmp_path: Path) -> None:
    looks = {node: look(node) for node in UNITS}
    waits = {"gpu-01": ready("gpu-01", serves=False), "gpu-02": ready("gpu-02", serves=True)}

    found = fallen(tmp_path, Nodes(looks, waits))

    assert set(found) == {"tiny-0"}
    (why,) = found["tiny-0"]
    assert why.startswith(
        "gpu-01: vllm-tiny-0.service was ready earlier, but no longer serves: vllm-tiny-0.service"
    )
    assert "EngineCore died" in why


@pytest.mark.parametrize(
    "mark", [{"cordon": PERSON}, {"drained": {"tiny-0": PERSON}}], ids=["cordoned", "drained"]
)
def test_what_a_person_has_taken_out_of_service_is_not_asked(
    tmp_path: Path, mark: dict[str, Any]
) -> None:
    """Nor is it a reason to take the others back."""
    looks = {"gpu-01": look("gpu-01", **mark), "gpu-02": look("gpu-02")}
    nodes = Nodes(looks, {"gpu-02": ready("gpu-02", serves=True)})

    assert fallen(tmp_path, nodes) == {}
    assert ("the wait for answers", "gpu-01") not in nodes.asked
    assert ("the wait for answers", "gpu-02") in nodes.asked


@pytest.mark.parametrize("looks", [{}, {node: look(node) for node in UNITS}])
def test_a_node_that_does_not_answer_says_nothing_of_its_release(
    tmp_path: Path, looks: dict[str, Any]
) -> None:
    """Away from the start, or lost between the two questions."""
    assert fallen(tmp_path, Nodes(looks, {})) == {}
