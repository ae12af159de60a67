"""A cordoned node: what is planned on it and what is not, and who may lift it."""

from __future__ import annotations

import json

import pytest

from gpufleet.node.cordon import cordon_of
from gpufleet.node.topology import node_from_probe
from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.probe import cordon_mark
from gpufleet.planning.planner import plan
from gpufleet.planning.stage import Running
from gpufleet.settings.parse import parse_settings
from tests.support.checkout import ROOT

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
MARK = {"by": "ann@laptop", "why": "disk makes noises", "since": 1.0, "upgrade": None}


def node(name, **document):
    recorded = json.loads((NODES / "h100x8.json").read_text())
    return node_from_probe(name, {**recorded, **document})


def settings(replicas, *names):
    wanted = {"tiny": {"model": "/srv/tiny", "tensor_parallel": 4, "replicas": replicas}}
    vllm = {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"}
    return {name: parse_settings({"serving": wanted, "vllm": vllm}) for name in names}


def running(found, replica, gpus, port):
    return Running("tiny", replica, found.name, tuple(found.gpus[i].uuid for i in gpus), port)


def test_a_document_without_the_key_is_of_a_node_that_is_not_cordoned():
    """An older probe's."""
    assert cordon_of({}) is None
    assert node("a", cordon=None).cordon is None


def test_nothing_new_is_placed_on_a_cordoned_node():
    fleet = [node("a", cordon={**MARK, "passing": False}), node("b")]

    found = plan(fleet, settings(2, "a", "b"))

    assert {stage.node for stage in found.stages} == {"b"}
    assert any("a: cordoned by ann@laptop: disk makes noises" in each for each in found.reasons)


def test_what_runs_on_a_cordoned_node_stays_there():
    closed = node("a", cordon={**MARK, "passing": False})
    runs = [running(closed, 0, (4, 5, 6, 7), 8000)]

    found = plan([closed, node("b")], settings(3, "a", "b"), running=runs)

    assert [(each.node, each.gpus) for each in found.stages if each.replica == 0] == [
        ("a", (4, 5, 6, 7))
    ]
    assert [each.node for each in found.stages if each.replica > 0] == ["b", "b"]


def test_the_refusal_says_who_cordoned_it_why_and_how_to_lift_that():
    fleet = [node("a", cordon={**MARK, "passing": False}), node("b")]

    with pytest.raises(Exception, match="2 fit on a, b") as refused:
        plan(fleet, settings(3, "a", "b"))

    assert "cordoned by ann@laptop: disk makes noises" in str(refused.value)
    assert "`gpufleet uncordon INVENTORY a`" in str(refused.value)


def test_as_many_as_fit_are_as_many_as_fit_beside_it():
    fleet = [node("a", cordon={**MARK, "passing": False}), node("b")]

    found = plan(fleet, settings("fit", "a", "b"))

    assert [each.node for each in found.stages] == ["b", "b"]


def test_a_change_that_goes_on_does_not_move_what_it_will_bring_back():
    """Its own mark passes; left behind by one that ended, it holds."""
    goes_on = {**MARK, "upgrade": "u1", "passing": True}
    left = {**MARK, "upgrade": "u1", "passing": False}

    placed = plan([node("a", cordon=goes_on)], settings(2, "a"))

    assert [each.node for each in placed.stages] == ["a", "a"]
    with pytest.raises(Exception, match=r"in upgrade u1.*uncordon INVENTORY a --force"):
        plan([node("a", cordon=left)], settings(2, "a"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    found = tmp_path / "var/lib/gpufleet/change"
    found.mkdir(parents=True)
    return found


def test_the_probe_reads_the_mark_and_whether_its_upgrade_goes_on(home):
    assert cordon_mark.cordon() is None

    (home / "cordon.json").write_text(json.dumps(MARK))
    assert cordon_mark.cordon() == {**MARK, "passing": False}

    (home / "cordon.json").write_text(json.dumps({**MARK, "upgrade": "u1"}))
    (home / "lock.json").write_text(json.dumps({"id": "u2"}))
    assert cordon_mark.cordon()["passing"] is False

    (home / "lock.json").write_text(json.dumps({"id": "u1"}))
    assert cordon_mark.cordon()["passing"] is True
