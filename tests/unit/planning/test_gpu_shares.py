"""Shares of a GPU: which GPU a share gets, what it is for vLLM, and what is refused."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from hypothesis import strategies as st
from pydantic import ValidationError

from gpufleet.catalog.gpu_models import cuda_total_gib
from gpufleet.errors import FleetError
from gpufleet.planning.explanation import explain
from gpufleet.planning.gpu_shares import derive, start_seconds, utilization
from gpufleet.planning.gpu_totals import gpus_text
from gpufleet.planning.planner import plan
from gpufleet.planning.stage import Running
from gpufleet.settings.serving_settings import Served
from tests.support.models import described
from tests.support.planned import machine as recorded
from tests.support.planned import planned as planned_fleet
from tests.support.rows import each_row
from tests.unit.planning.test_planner import declare, machine

MODELS = {
    "/srv/chat": "meta-llama--Meta-Llama-3.1-8B",
    "/srv/embed": "Qwen--Qwen3-0.6B",
}
CHAT = {"model": "/srv/chat", "gpu_share": 0.6, "context": "8K"}
EMBED = {"model": "/srv/embed", "gpu_share": 0.2, "context": "8K"}
RERANK = {"model": "/srv/embed", "gpu_share": 0.1, "context": "4K"}
H100_GIB = cuda_total_gib("NVIDIA H100 80GB HBM3", 81559 << 20)


def share(part, **changes):
    """A model of which nothing is known but its share."""
    return {"model": "/srv/m", "tensor_parallel": 1, "gpu_share": part, **changes}


def whole(gpus=1, **changes):
    return {"model": "/srv/m", "tensor_parallel": gpus, **changes}


def places(found):
    """Where each stage is, as `node/GPUs`."""
    return {stage.id: f"{stage.node}/{','.join(map(str, stage.gpus))}" for stage in found.stages}


def running(found):
    return [Running(s.model, s.replica, s.node, s.gpu_uuids, s.port) for s in found.stages]


def planned(nodes, models, runs=(), **others):
    names = [node.name for node in nodes]
    return plan(nodes, dict.fromkeys(names, declare(models, **others)), running=runs)


# -- placing


def test_three_models_share_one_gpu():
    found = planned([machine("a", 1)], {"c": share(0.6), "e": share(0.2), "r": share(0.1)})

    assert places(found) == {"c-0": "a/0", "e-0": "a/0", "r-0": "a/0"}
    assert {stage.port for stage in found.stages} == {8000, 8001, 8002}
    assert {stage.gpu_uuids for stage in found.stages} == {("GPU-a-0",)}


def test_a_gpu_that_has_shares_is_filled_before_another_is_taken():
    found = planned(
        [machine("a", 2), machine("b", 2)], {"c": share(0.5), "e": share(0.3), "r": share(0.2)}
    )

    # 0.5 and 0.3 leave 0.15: 0.2 needs another GPU.
    assert places(found) == {"c-0": "a/0", "e-0": "a/0", "r-0": "b/0"}


def test_of_gpus_with_room_the_one_that_is_left_with_least_gets_a_share():
    found = planned([machine("a", 2)], {"c": share(0.7), "d": share(0.6), "e": share(0.2)})

    assert places(found)["e-0"] == places(found)["c-0"]


def test_replicas_of_a_model_are_on_gpus_of_their_own_and_spread_over_nodes():
    found = planned([machine("a", 2), machine("b", 2)], {"e": share(0.2, replicas=3)})

    assert sorted(places(found).values()) == ["a/0", "a/1", "b/0"]
    with pytest.raises(FleetError, match="one replica of each model"):
        planned([machine("a", 2)], {"e": share(0.2, replicas=3)})


def test_fit_is_one_replica_on_each_gpu_with_room():
    found = planned(
        [machine("a", 4)], {"big": whole(2), "c": share(0.8), "e": share(0.2, replicas="fit")}
    )

    assert sorted(value for name, value in places(found).items() if name[0] == "e") == ["a/3"]


def test_whole_gpus_and_shares_are_never_on_one_gpu():
    found = planned(
        [machine("a", 6)],
        {
            "w": whole(1, replicas=2),
            "c": share(0.9),
            "e": share(0.9),
            "f": whole(1, replicas="fit"),
        },
    )
    where = places(found)

    assert sorted(where.values()) == [f"a/{gpu}" for gpu in range(6)]
    assert "f-1" in where


def test_a_share_leaves_large_islands_whole():
    found = planned([machine("a", 4, 1)], {"e": share(0.2)})

    assert places(found) == {"e-0": "a/4"}


def test_what_runs_stays_where_it_runs():
    nodes = [machine("a", 2), machine("b", 2)]
    before = [
        Running("c", 0, "b", ("GPU-b-1",), 8000),
        Running("e", 0, "a", ("GPU-a-1",), 8000),
    ]
    found = planned(nodes, {"c": share(0.6), "e": share(0.2), "r": share(0.1)}, before)

    assert places(found)["c-0"] == "b/1"
    assert places(found)["e-0"] == "a/1"
    assert not found.moves


def test_taking_one_out_moves_no_other():
    nodes = [machine("a", 2)]
    before = planned(nodes, {"c": share(0.6), "e": share(0.2), "r": share(0.1)})
    found = planned(nodes, {"c": share(0.6), "r": share(0.1)}, running(before))

    assert places(found) == {"c-0": "a/0", "r-0": "a/0"}
    assert [(move.model, move.after) for move in found.moves] == [("e", ())]
    ports = {stage.id: stage.port for stage in before.stages}
    assert {stage.id: stage.port for stage in found.stages} == {
        name: ports[name] for name in ("c-0", "r-0")
    }


def test_the_smallest_moves_where_a_share_has_grown_too_large():
    nodes = [machine("a", 2)]
    before = planned(nodes, {"c": share(0.6), "e": share(0.3)})
    found = planned(nodes, {"c": share(0.7), "e": share(0.3)}, running(before))

    assert places(found) == {"c-0": "a/0", "e-0": "a/1"}
    assert [str(move) for move in found.moves] == [
        "e-0 restarts on a GPUs 1: GPU 0 on a no longer has room for the replica's share"
    ]


def test_a_new_large_share_moves_as_few_as_it_needs():
    nodes = [machine("a", 1), machine("b", 1)]
    settings = {"c": share(0.5), "d": share(0.3), "e": share(0.1)}
    before = [
        Running("c", 0, "a", ("GPU-a-0",), 8000),
        Running("d", 0, "b", ("GPU-b-0",), 8000),
        Running("e", 0, "b", ("GPU-b-0",), 8001),
    ]
    found = planned(nodes, {**settings, "n": share(0.8)}, before)

    assert places(found) == {"c-0": "a/0", "d-0": "a/0", "e-0": "b/0", "n-0": "b/0"}
    assert [move.model for move in found.moves] == ["d"]


def test_a_whole_model_that_fills_gpus_makes_way_for_a_share():
    nodes = [machine("a", 2)]
    before = planned(nodes, {"f": whole(1, replicas="fit")})
    found = planned(nodes, {"f": whole(1, replicas="fit"), "e": share(0.2)}, running(before))

    assert len(found.stages) == 2
    assert len(found.moves) == 1
    assert len(set(places(found).values())) == 2


PARTS = st.sampled_from([0.05, 0.1, 0.2, 0.25, 0.3, 0.45, 0.5, 0.6, 0.9, 0.95])


@tried(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(PARTS, st.sampled_from([1, 1, 2, "fit"])), min_size=1, max_size=5),
    st.lists(st.sampled_from([(1,), (2,), (2, 2), (4,)]), min_size=1, max_size=3),
    st.sampled_from([0, 1, "fit"]),
)
def test_every_plan_keeps_to_the_rules_and_the_next_one_changes_nothing(parts, shapes, others):
    nodes = [machine(f"n{at}", *shape) for at, shape in enumerate(shapes)]
    models = {f"m{at}": share(part, replicas=count) for at, (part, count) in enumerate(parts)}
    if others:
        models["w"] = whole(1, replicas=others)
    try:
        found = planned(nodes, models)
    except FleetError:
        return  # what a refusal says, the other tests look at
    on = defaultdict(list)
    for stage in found.stages:
        for gpu in stage.gpus:
            on[stage.node, gpu].append(stage)
    for here in on.values():
        if len(here) > 1:
            assert all(stage.gpu_share for stage in here)
            assert sum(stage.gpu_share for stage in here) <= 0.95 + 1e-9
            assert len({stage.model for stage in here}) == len(here)
    assert places(planned(nodes[::-1], dict(reversed(models.items())))) == places(found)
    again = planned(nodes, models, running(found))
    assert places(again) == places(found)
    assert not again.moves


# -- what is shown


def test_a_picture_names_the_shares_of_a_gpu_and_what_is_left():
    nodes = [machine("a", 2)]
    found = planned(nodes, {"c": share(0.6), "e": share(0.2), "r": share(0.1)})

    lines = explain(found, nodes).splitlines()
    assert "  GPU 0  c-0 0.6 port 8000, e-0 0.2 port 8001, r-0 0.1 port 8002, free 0.05" in lines
    assert "  GPU 1  free" in lines
    assert [gpus_text(stage) for stage in found.stages] == ["0 (0.6)", "0 (0.2)", "0 (0.1)"]


def test_json_has_the_share_where_there_is_one():
    found = planned([machine("a", 2)], {"c": share(0.6), "w": whole()}).as_json()
    assert [each.get("gpu_share") for each in found["stages"]] == [0.6, None]
    assert "gpu_share" not in found["stages"][1]


# -- what it is for vLLM


@pytest.mark.parametrize("part", [0.05, 0.1, 0.2, 0.35, 0.6, 0.95])
@pytest.mark.parametrize("total", [15.99, 23.5, 79.19, 139.8])
@pytest.mark.parametrize("release", [(0, 18, 0), (0, 24, 0), (0, 32, 0)])
def test_a_budget_and_what_is_outside_of_it_stay_within_the_share(part, total, release):
    found = utilization(part, total, release, enforce_eager=False)
    outside = 0.6 + (1.0 if release < (0, 29) else 0)

    assert 0 < found < part
    assert found * total + outside <= part * total + 1e-6 or found == 0.001


def test_the_releases_differ_by_their_cuda_graphs():
    """Those that take them from outside of the budget get a smaller one, unless they take none."""
    newest = utilization(0.2, 79.19, (0, 32, 0), enforce_eager=False)

    assert utilization(0.2, 79.19, (0, 28, 1), enforce_eager=False) < newest
    assert utilization(0.2, 79.19, (0, 28, 1), enforce_eager=True) == newest


def test_gpus_of_two_kinds_are_refused():
    small, large = machine("a", 1).gpus[0], machine("b", 1).gpus[0]
    small = type(small)(**{**vars(small), "name": "NVIDIA L4", "memory_mib": 23034})
    served = Served.model_validate(share(0.2))

    with pytest.raises(
        FleetError, match=r"NVIDIA H100 .* NVIDIA L4 \(.* GiB\).* with one kind of GPU"
    ):
        derive(served, {}, [small, large], (0, 32, 0))


def test_starts_on_one_gpu_are_waited_for_one_after_the_other():
    shared = [Served.model_validate(share(0.2, start_seconds=each)) for each in (100, 200)]
    alone = Served.model_validate(whole(start_seconds=250))

    assert start_seconds(shared) == 300
    assert start_seconds([*shared, alone]) == 300
    assert start_seconds([alone]) == 250


# -- whether it fits


def fleet(models, profile="h100x2-nvl", **others):
    settings = {
        "vllm": {"version": "0.32.0", "lock": "locks/vllm-0.32.0.txt", "listen": "127.0.0.1"},
        "serving": models,
        **others,
    }
    return planned_fleet({"gpu-01": recorded(profile, 1, MODELS)}, {"gpu-01": settings})


def test_a_plan_judges_each_share_and_says_what_vllm_is_told():
    found = fleet({"chat": CHAT, "embed": EMBED, "rerank": RERANK})

    flags = {
        stage.id: {each.name: each for each in stage.flags}["gpu-memory-utilization"]
        for stage in found.plan.stages
    }
    assert {name: flag.value for name, flag in flags.items()} == {
        "chat-0": 0.593,
        "embed-0": 0.193,
        "rerank-0": 0.093,
    }
    assert {flag.layer for flag in flags.values()} == {"gpu_share"}
    assert {stage.gpus for stage in found.plan.stages} == {(0,)}
    assert found.totals.planned == 1
    assert found.totals.free == 1


def test_a_share_that_is_too_small_names_the_least_that_fits():
    with pytest.raises(FleetError) as refused:
        fleet({"chat": {**CHAT, "gpu_share": 0.1}})
    [problem] = refused.value.problems
    least = float(re.search(r"set `gpu_share: ([0-9.]+)`", problem).group(1))
    assert 0.1 < least < 0.5

    fleet({"chat": {**CHAT, "gpu_share": least}})
    with pytest.raises(FleetError):
        fleet({"chat": {**CHAT, "gpu_share": round(least - 0.01, 2)}})


def test_shares_that_add_up_to_too_much_name_what_is_on_the_gpu():
    with pytest.raises(FleetError) as refused:
        fleet({"chat": CHAT, "embed": {**EMBED, "gpu_share": 0.5}}, gpus={"reserved": [1]})

    [problem] = refused.value.problems
    assert "serving.embed: 1 replica of 0.5 of a GPU declared, of which 0 fit" in problem
    assert "GPU 0: chat 0.6" in problem
    assert "lower `gpu_share` to 0.35" in problem


def test_a_refusal_names_no_share_that_is_too_small_for_the_model():
    with pytest.raises(FleetError) as refused:
        fleet(
            {"chat": {**CHAT, "gpu_share": 0.5}, "other": {**CHAT, "gpu_share": 0.48}},
            gpus={"reserved": [1]},
        )
    assert "lower `gpu_share` to 0.45" in str(refused.value)

    with pytest.raises(FleetError) as refused:
        fleet(
            {"chat": {**CHAT, "gpu_share": 0.85}, "other": {**CHAT, "gpu_share": 0.48}},
            gpus={"reserved": [1]},
        )
    assert "lower `gpu_share`" not in str(refused.value)
    assert "lower another model's share" in str(refused.value)


def test_a_model_that_nobody_can_read_is_refused_unless_that_is_accepted():
    unread = {"model": "/srv/unknown", "gpu_share": 0.2}
    with pytest.raises(FleetError, match="also set `tensor_parallel: 1`"):
        fleet({"m": unread})

    assert len(fleet({"m": {**unread, "tensor_parallel": 1}}).plan.stages) == 1


def test_a_preset_does_not_set_the_utilization_of_a_share():
    found = fleet({"chat": {**CHAT, "presets": ["memory-constrained"]}})

    values = [f for f in found.plan.stages[0].flags if f.name == "gpu-memory-utilization"]
    assert [(each.layer, each.value) for each in values] == [("gpu_share", 0.593)]


def test_graphs_outside_of_the_budget_have_to_fit_into_the_share():
    """Up to 0.19 vLLM captures them after it has given the budget away."""
    from gpufleet.sizing.fit import size
    from gpufleet.sizing.options import Options

    def judged(graphs_room):
        part = 0.4
        options = Options(
            gpu_memory_gib=H100_GIB,
            vllm=(0, 19, 0),
            max_model_len=8192,
            gpu_share=part,
            gpu_memory_utilization=part - graphs_room / H100_GIB,
        )
        return size(described("meta-llama--Meta-Llama-3.1-8B"), options)

    assert judged(1.6).fits
    tight = judged(0.6)
    assert not tight.fits
    assert "0.4 of the GPU" in " ".join(tight.reasons)


# -- what is beside it


BESIDE = {
    "tensor": ({"tensor_parallel": 2}, "`gpu_share` and `tensor_parallel: 2` exclude"),
    "pipeline": ({"pipeline_parallel": 2}, "`gpu_share` and `pipeline_parallel: 2` exclude"),
    "data": ({"data_parallel": 2}, "`gpu_share` and `data_parallel: 2` exclude"),
    "utilization": (
        {"flags": {"gpu-memory-utilization": 0.5}},
        "`gpu_share` and `flags.gpu-memory-utilization` exclude each other",
    ),
    "decode context": (
        {"flags": {"decode-context-parallel-size": 2}},
        "and `flags.decode-context-parallel-size` exclude each other",
    ),
    "prefill context": (
        {"flags": {"prefill-context-parallel-size": 2}},
        "and `flags.prefill-context-parallel-size` exclude each other",
    ),
    "all of a GPU": ({"gpu_share": 1}, "0.95"),
    "nothing": ({"gpu_share": 0}, "0.01"),
}


@each_row("changes,sentence", BESIDE.values(), BESIDE.keys())
def test_what_contradicts_a_share_is_refused(changes, sentence):
    with pytest.raises(ValidationError) as refused:
        Served.model_validate({"model": "/srv/m", "gpu_share": 0.2, **changes})

    assert sentence in str(refused.value)


@each_row("shares", [{"one"}, {"two"}, {"one", "two"}])
def test_an_entry_that_hands_its_cache_over_has_no_share(shares):
    models = {
        name: {**EMBED, "gpu_share": 0.2 if name in shares else None} for name in ("one", "two")
    }
    models["one"]["prefill"] = "two"
    with pytest.raises(FleetError) as refused:
        fleet(models)

    found = {
        name
        for name in models
        if f"serving.{name}.gpu_share: the entry transfers" in str(refused.value)
    }
    assert found == shares
