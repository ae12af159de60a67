"""One change of a fleet at a time: with the real program of the nodes, on directories."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.on_node.change import change, hold
from gpufleet.on_node.common import linux_facts
from gpufleet.upgrade.run import node_locks
from gpufleet.upgrade.run.node_answers import Answer
from gpufleet.upgrade.run.node_questions import NodeQuestion
from tests.support.program_parameters import parameters

NODES = ("gpu-01", "gpu-02", "gpu-03")
MINE, THEIRS = "20261122T134708Z-ab12", "20261122T134709Z-cd34"


class OnDisk:
    """Nodes as directories: each is asked by running its program's functions there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dead: set[str] = set()

    def __call__(self, wanted: Mapping[str, NodeQuestion]) -> dict[str, Answer]:
        return {
            name: "cannot be reached: no route to host"
            if name in self.dead
            else change.answer({**parameters(each.program), "sysroot": str(self.folder / name)})
            for name, each in wanted.items()
        }

    def owners(self) -> dict[str, str | None]:
        """Read the files: another route than the program's."""
        found: dict[str, str | None] = {}
        for name in NODES:
            file = self.folder / name / "var/lib/gpufleet/change/lock.json"
            found[name] = json.loads(file.read_text())["id"] if file.exists() else None
        return found


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnDisk:
    monkeypatch.setattr(linux_facts, "ROOT", "")  # the program sets it; other tests need it back
    for name in NODES:
        (tmp_path / name / "var/lib").mkdir(parents=True)
    return OnDisk(tmp_path)


def take(nodes: OnDisk, upgrade: str, owner: str, *, steal: bool = False) -> dict[str, Any]:
    return node_locks.take(
        nodes,
        NODES,
        upgrade=upgrade,
        owner=owner,
        origin="/home/ops",
        what="vLLM 0.32.0",
        steal=steal,
    )


def test_the_lock_lies_on_all_nodes_and_goes_from_all(nodes: OnDisk) -> None:
    """Taken again by the same upgrade, as --resume does, it stays."""
    assert take(nodes, MINE, "ann@laptop") == {}
    assert take(nodes, MINE, "ann@laptop") == {}
    assert nodes.owners() == dict.fromkeys(NODES, MINE)

    assert node_locks.release(nodes, NODES, MINE) == ()
    assert nodes.owners() == dict.fromkeys(NODES)


def test_a_second_operator_is_refused_with_owner_since_and_what(nodes: OnDisk) -> None:
    """And has nothing of the fleet afterwards."""
    take(nodes, MINE, "ann@laptop")

    with pytest.raises(FleetError) as refused:
        take(nodes, THEIRS, "bob@desk")
    assert re.search(
        rf"gpu-01 has been locked by ann@laptop from /home/ops: vLLM 0\.32\.0 \({MINE}\) since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\. .*--steal WHY",
        str(refused.value),
    )
    assert nodes.owners() == dict.fromkeys(NODES, MINE)


def test_what_was_taken_is_given_back_where_another_has_a_later_node(nodes: OnDisk) -> None:
    """Two inventories may share nodes: whoever cannot have all has none."""
    node_locks.take(
        nodes, ["gpu-03"], upgrade=THEIRS, owner="bob@desk", origin="/", what="a driver"
    )

    with pytest.raises(FleetError, match="gpu-03 has been locked by bob@desk"):
        take(nodes, MINE, "ann@laptop")
    assert nodes.owners() == {"gpu-01": None, "gpu-02": None, "gpu-03": THEIRS}


def test_a_node_that_does_not_answer_is_no_lock(nodes: OnDisk) -> None:
    """Nobody knows who changes it: nothing is begun."""
    nodes.dead = {"gpu-02"}

    with pytest.raises(FleetError, match="gpu-02: cannot be reached"):
        take(nodes, MINE, "ann@laptop")
    assert nodes.owners() == dict.fromkeys(NODES)


def test_taking_over_knowingly_says_from_whom(nodes: OnDisk) -> None:
    """The other one's journal is named by its id."""
    take(nodes, THEIRS, "bob@desk")
    stolen = take(nodes, MINE, "ann@laptop", steal=True)

    assert {name: lock.id for name, lock in stolen.items()} == dict.fromkeys(NODES, THEIRS)
    assert nodes.owners() == dict.fromkeys(NODES, MINE)
    # The other one comes back, and its unlock leaves ours.
    assert node_locks.release(nodes, NODES, THEIRS) == ()
    assert nodes.owners() == dict.fromkeys(NODES, MINE)


@pytest.mark.parametrize("steal", [False, True])
def test_an_upgrade_waits_for_the_deploys_that_have_nodes(nodes: OnDisk, *, steal: bool) -> None:
    """All of them are named at once; none is taken from a deploy that works."""
    for name, who in (("gpu-01", "bob@desk"), ("gpu-03", "cat@desk")):
        said = hold.answer(
            {
                "id": f"run-{who[:3]}",
                "owner": who,
                "origin": "/srv",
                "what": "deploys/node.py",
                "process": 4711,
                "pid": os.getpid(),
                "sysroot": str(nodes.folder / name),
            }
        )
        assert said["held"]

    with pytest.raises(FleetError) as refused:
        take(nodes, MINE, "ann@laptop", steal=steal)
    assert [each.split(" since ")[0] for each in refused.value.problems] == [
        "gpu-01: bob@desk is running a deploy there (deploys/node.py)",
        "gpu-03: cat@desk is running a deploy there (deploys/node.py)",
    ]
    assert nodes.owners() == dict.fromkeys(NODES)
