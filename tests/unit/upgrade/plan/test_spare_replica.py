"""A model with one replica: its outage is said, and whether the planner has room for one more."""

from __future__ import annotations

from typing import Any

from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.upgrade.plan import spare_replica
from gpufleet.upgrade.run.journal_entry import Entry
from tests.support.planned import declared_of, machine, planned
from tests.unit.upgrade.fleets import group

MODELS = {"/srv/q": "Qwen--Qwen3-0.6B", "/srv/big": "Qwen--Qwen3-32B"}
JOURNAL = (
    Entry(1.0, "planned", said={"waves": [{"groups": [group("q-0", "a").as_json()]}]}),
    Entry(2.0, "ready", group="q-0", said={"load_seconds": {"q-0": 95.0}}),
)


def settings(replicas: int | str, reserved: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    q = {"model": "/srv/q", "tensor_parallel": 1, "context": 4096, "replicas": replicas}
    return {
        "vllm": {"version": "0.32.0", "lock": "none.txt", "listen": "127.0.0.1"},
        "gpus": {"reserved": list(reserved)},
        "serving": {"q": q | more, "big": {"model": "/srv/big", "tensor_parallel": 2}},
    }


def running(documents: dict[str, Any], declared: dict[str, Any]) -> Assessment:
    """Put the units of a plan on its nodes, and plan anew, as the next run does."""
    for stage in planned(documents, declared).plan.stages:
        documents[stage.node].setdefault("stages", []).append(
            {"unit": stage.unit, "model": stage.model, "replica": stage.replica, "rank": 0}
            | {"port": stage.port, "gpus": list(stage.gpu_uuids), "release": "0.32.0-ab"}
        )
    return planned(documents, declared)


def said(replicas: int | str, reserved: tuple[int, ...] = (), **more: Any) -> list[str]:
    documents = {"a": machine("h100x8", 1, MODELS) | {"stages": []}}
    declared = {"a": settings(replicas, reserved, **more)}
    found = running(documents, declared)
    groups = [group(each.id, "a") for each in found.plan.stages if each.model == "q"]
    return list(spare_replica.remarks(groups, found, documents, declared_of(declared), [JOURNAL]))


def test_room_is_named_with_what_to_write() -> None:
    (sentence,) = said(1)
    assert sentence.startswith(
        "q has only one replica, so it does not answer while it loads (1 min 35 s"
    )
    assert " the last time): a (GPU " in sentence
    assert (
        "without moves or restarts. Before you change anything else, set `serving.q.replicas: 2`,"
        in sentence
    )


def test_what_is_named_is_what_the_planner_then_does() -> None:
    """Carried out: one stage more, on that GPU; taken away again, it is the one that goes."""
    documents = {"a": machine("h100x8", 1, MODELS) | {"stages": []}}
    first = running(documents, {"a": settings(1)})
    (sentence,) = spare_replica.remarks(
        [group("q-0", "a")], first, documents, declared_of({"a": settings(1)})
    )
    second = planned(documents, {"a": settings(2)})
    (new,) = {each.id: each for each in second.plan.stages}.keys() - {
        each.id for each in first.plan.stages
    }
    changes = {each.replica: str(each.action) for each in second.changes}
    assert changes.pop(new) == "start"
    assert set(changes.values()) == {"stay"}
    (gpu,) = next(each.gpus for each in second.plan.stages if each.id == new)
    assert f"a (GPU {gpu}) has room" in sentence

    there = {"a": machine("h100x8", 1, MODELS) | {"stages": []}}
    running(there, {"a": settings(2)})
    third = {each.replica: str(each.action) for each in planned(there, {"a": settings(1)}).changes}
    assert third == {"q-0": "stay", "big-0": "stay", "q-1": "stop"}


def test_where_nothing_is_free_that_is_said() -> None:
    (sentence,) = said(1, reserved=(0, 1, 2, 3, 4))
    assert "one more replica does not fit (" in sentence


def test_of_models_that_serve_meanwhile_nothing_is_said() -> None:
    assert said(2) == []


def test_what_was_never_measured_is_bounded_and_not_guessed() -> None:
    documents = {"a": machine("h100x8", 1, MODELS) | {"stages": []}}
    declared = {"a": settings(1, start_seconds=900)}
    found = running(documents, declared)
    (sentence,) = spare_replica.remarks(
        [group("q-0", "a")], found, documents, declared_of(declared)
    )
    assert "(not measured yet; 15 min at most, its `start_seconds`)" in sentence
