"""Placement: on fleets written out for one rule each, and on drawn ones for what always holds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.node.topology import Gpu, Node
from gpufleet.planning.explanation import Action, plan_changes
from gpufleet.planning.gpu_placement import Layout, mask
from gpufleet.planning.parallelism import Division
from gpufleet.planning.planner import plan
from gpufleet.planning.stage import Running
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served
from tests.support.models import described
from tests.support.rows import each_row

VLLM = {"version": "0.32.0", "lock": "locks/vllm.txt", "api_key_file": "secrets/api-key"}
LLAMA_2 = "meta-llama--Llama-2-7b"


def machine(name, *islands, numa=None, pcie="SYS"):
    """A node whose NVLink islands have the given sizes; `numa` is each GPU's, `pcie` any pair's."""
    parts, count = [], 0
    for size in islands:
        parts.append(range(count, count + size))
        count += size
    return Node(
        name=name,
        driver="580.95.05",
        cuda=(13, 0),
        gpus=tuple(
            Gpu(
                index=index,
                uuid=f"GPU-{name}-{index}",
                name="NVIDIA H100 80GB HBM3",
                bus_id=f"0000:{index:02x}:00.0",
                memory_mib=81559,
                compute_capability=(9, 0),
                numa_node=numa[index] if numa else 0,
            )
            for index in range(count)
        ),
        nvlink={pair: 18 for part in parts for pair in combinations(part, 2)},
        pcie={
            pair: pcie if isinstance(pcie, str) else pcie[pair]
            for pair in combinations(range(count), 2)
        },
    )


def declare(models, **others):
    return NodeSettings.model_validate({"vllm": VLLM, "serving": models, **others})


def model(**changes):
    """A model of which nothing is known but what is asked for."""
    return {"model": "/srv/model", "tensor_parallel": 1, **changes}


def gpus_on(fleet_plan, node):
    return [stage.gpus for stage in fleet_plan.stages_on(node)]


def problems_of(nodes, settings):
    with pytest.raises(FleetError) as refused:
        plan(nodes, settings)
    return refused.value.problems


# Where replicas go


def test_a_group_never_spans_two_islands():
    """Tensor parallelism talks in every layer: 4 GPUs in 2 islands hold two pairs, never a four."""
    node, pairs = machine("gpu-01", 2, 2), declare({"m": model(tensor_parallel=2, replicas=2)})

    assert gpus_on(plan([node], {"gpu-01": pairs}), "gpu-01") == [(0, 1), (2, 3)]

    (problem,) = problems_of([node], {"gpu-01": declare({"m": model(tensor_parallel=4)})})
    assert "serving.m: tensor_parallel 4 needs 4 GPUs in one NVLink island" in problem
    assert "lower `tensor_parallel` to 2, or set `allow_pcie: true`" in problem


@each_row(
    ("links", "size", "expected"),
    [
        # A bridge over four cards with one dead pair, and with another.
        pytest.param("01 02 03 12 13", 2, [(0, 2), (1, 3)], id="dead 2-3"),
        pytest.param("01 03 12 13 23", 2, [(0, 1), (2, 3)], id="dead 0-2"),
        # The greatest island is the middle of a chain.
        pytest.param("01 02 13", 2, [(0, 2), (1, 3)], id="chain"),
        # Two triangles that share a GPU's link: each keeps its own.
        pytest.param("01 02 12 23 34 35 45", 3, [(0, 1, 2), (3, 4, 5)], id="triangles"),
    ],
)
def test_links_decide_how_many_groups_a_node_holds(links, size, expected):
    """Islands are one way to cut a node; where links cross them another may hold more."""
    count = 1 + max(int(gpu) for gpu in links.replace(" ", ""))
    joined = {tuple(map(int, pair)): 12 for pair in links.split()}
    node = replace(machine("gpu-01", *[1] * count), nvlink=joined)

    def on(**wanted):
        found = plan([node], {"gpu-01": declare({"m": model(tensor_parallel=size, **wanted)})})
        return gpus_on(found, "gpu-01")

    assert on(replicas="fit") == on(replicas=len(expected)) == expected


@tried(deadline=None, max_examples=60)
@given(st.integers(2, 7).flatmap(lambda count: st.tuples(
    st.just(count), st.sets(st.sampled_from(list(combinations(range(count), 2)))))),
    st.integers(2, 3),
)  # fmt: skip
def test_no_other_placement_holds_more_groups(drawn, size):
    count, pairs = drawn
    node = replace(machine("gpu-01", *[1] * count), nvlink=dict.fromkeys(pairs, 4))
    groups = [each for each in combinations(range(count), size)
              if set(combinations(each, 2)) <= pairs]  # fmt: skip
    most = max(
        number
        for number in range(count // size + 1)
        if any(len({gpu for group in chosen for gpu in group}) == number * size
               for chosen in combinations(groups, number))
    )  # fmt: skip
    layout = Layout(node, {})
    free, placed = mask(range(count)), 0
    while group := layout.group(free, Division(size), pcie=False):
        assert group in groups
        assert layout.may_hold(group, Division(size), pcie=False)
        free, placed = free & ~mask(group), placed + 1

    assert placed == most == layout.most_groups(size)


def test_sixteen_gpus_with_a_dead_pair_are_counted_in_few_steps():
    """Without an end at what fits by number, the subsets of sixteen GPUs take seconds."""
    pairs = dict.fromkeys(combinations(range(16), 2), 12)
    del pairs[0, 1]
    layout = Layout(replace(machine("gpu-01", *[1] * 16), nvlink=pairs), {})

    assert layout.more_groups == {2: 8, 4: 4, 8: 2}
    assert len(layout._most) < 100


def test_the_smallest_sufficient_remainder_is_taken():
    """A single GPU goes to the island of two, so that the island of four stays whole."""
    found = plan([machine("gpu-01", 4, 2)], {"gpu-01": declare({"m": model(replicas=2)})})

    assert gpus_on(found, "gpu-01") == [(4,), (5,)]


def test_a_node_of_unlike_gpus_is_sized_by_the_least_of_their_memory():
    """13 GB of weights and their cache fit on one of the large ones alone."""
    node = machine("gpu-01", 2)
    small = replace(node.gpus[1], memory_mib=16384)
    wanted = declare({"m": {"model": "/srv/llama"}})
    llama = {"m": described(LLAMA_2)}

    alike = plan([node], {"gpu-01": wanted}, llama)
    unlike = plan([replace(node, gpus=(node.gpus[0], small))], {"gpu-01": wanted}, llama)

    assert [stage.tensor_parallel for stage in alike.stages] == [1]
    assert [stage.tensor_parallel for stage in unlike.stages] == [2]


def test_a_node_of_unlike_gpus_serves_what_the_oldest_of_them_can():
    """MXFP4 needs Ampere: a group may get the GPU that is older."""
    node = machine("gpu-01", 2)
    turing = replace(node.gpus[1], compute_capability=(7, 5))
    settings = {"gpu-01": declare({"m": {"model": "/srv/gpt-oss"}})}
    oss = {"m": described("openai--gpt-oss-20b")}

    assert plan([node], settings, oss).stages
    with pytest.raises(FleetError, match=r"7\.5"):
        plan([replace(node, gpus=(node.gpus[0], turing))], settings, oss)


def test_a_node_that_serves_by_its_processors_is_sized_so():
    wanted = declare({"m": {"model": "/srv/llama"}}, vllm={**VLLM, "device": "cpu"})

    found = plan([machine("gpu-01", 1)], {"gpu-01": wanted}, {"m": described(LLAMA_2)})

    assert [each.kind.device for each in found.candidates] == ["cpu"]


def test_a_model_that_is_too_large_for_all_that_there_is_needs_another_checkpoint():
    """It is not told that a flag would help: nothing that it can write does."""
    wanted = declare({"m": {"model": "/srv/v3"}})
    v3 = {"m": described("deepseek-ai--DeepSeek-V3")}

    with pytest.raises(FleetError, match="use a smaller or quantized checkpoint"):
        plan([machine("gpu-01", 2)], {"gpu-01": wanted}, v3)


def test_gpus_of_one_numa_node_are_preferred():
    """NVLink joins all eight, but the CPU threads that feed a pair should sit on one socket."""
    odd_even = [index % 2 for index in range(8)]
    node = machine("gpu-01", 8, numa=odd_even)

    found = plan([node], {"gpu-01": declare({"m": model(tensor_parallel=4, replicas=2)})})

    assert gpus_on(found, "gpu-01") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_group_larger_than_a_numa_node_is_placed_all_the_same():
    """NUMA is a preference; NVLink is the rule."""
    node = machine("gpu-01", 8, numa=[0, 0, 0, 0, 1, 1, 1, 1])

    found = plan([node], {"gpu-01": declare({"m": model(tensor_parallel=8)})})

    assert gpus_on(found, "gpu-01") == [tuple(range(8))]


def test_large_groups_are_placed_before_small_ones():
    """By name, `a` would come first and leave no island of four for `z`."""
    wanted = {"a": model(replicas=2, port=9000), "z": model(tensor_parallel=4)}

    found = plan([machine("gpu-01", 4, 2)], {"gpu-01": declare(wanted)})

    assert {stage.id: stage.gpus for stage in found.stages} == {
        "a-0": (4,),
        "a-1": (5,),
        "z-0": (0, 1, 2, 3),
    }


def test_replicas_are_spread_over_the_nodes():
    """Fewest replicas of the model first, then most free GPUs, then the name."""
    fleet = [machine("gpu-01", 2), machine("gpu-02", 4), machine("gpu-03", 4)]
    wanted = declare({"m": model(replicas=4)})

    found = plan(fleet, {node.name: wanted for node in fleet})

    assert [stage.node for stage in found.stages] == ["gpu-02", "gpu-03", "gpu-01", "gpu-02"]


def test_a_model_stays_on_the_nodes_that_declare_it():
    fleet = [machine("gpu-01", 8), machine("gpu-02", 8)]
    settings = {"gpu-01": declare({}), "gpu-02": declare({"m": model(replicas=3)})}

    assert {stage.node for stage in plan(fleet, settings).stages} == {"gpu-02"}


def test_ports_count_up_on_each_node():
    """The first replica of a node has the declared port, whichever replica of the fleet it is."""
    fleet = [machine("gpu-01", 2), machine("gpu-02", 2)]
    wanted = declare({"m": model(replicas=4, port=8000)})

    found = plan(fleet, {node.name: wanted for node in fleet})

    assert sorted((stage.node, stage.port) for stage in found.stages) == [
        ("gpu-01", 8000),
        ("gpu-01", 8001),
        ("gpu-02", 8000),
        ("gpu-02", 8001),
    ]


def test_pcie_groups_are_as_near_as_they_can_be():
    """Allowed to leave NVLink, a group takes one switch before one socket before the node."""
    switches = {(0, 1): "NODE", (0, 2): "PIX", (0, 3): "SYS"} | {
        (1, 2): "NODE",
        (1, 3): "SYS",
        (2, 3): "SYS",
    }
    node = machine("gpu-01", 1, 1, 1, 1, pcie=switches)

    def group(size):
        wanted = declare({"m": model(tensor_parallel=size, allow_pcie=True)})
        return plan([node], {"gpu-01": wanted})

    assert gpus_on(group(2), "gpu-01") == [(0, 2)]
    assert gpus_on(group(3), "gpu-01") == [(0, 1, 2)]
    assert gpus_on(group(4), "gpu-01") == [(0, 1, 2, 3)]
    assert "PCIe (PIX, allowed by `allow_pcie`)" in group(2).reasons[0]
    assert "PCIe (NODE, allowed by `allow_pcie`)" in group(3).reasons[0]


def test_an_island_comes_before_pcie():
    """`allow_pcie` widens the choice, it does not change what is best."""
    node = machine("gpu-01", 1, 2, pcie="PIX")

    found = plan([node], {"gpu-01": declare({"m": model(tensor_parallel=2, allow_pcie=True)})})

    assert gpus_on(found, "gpu-01") == [(1, 2)]


# Hardware as it is


@each_row(
    ("profile", "size", "expected"),
    [
        pytest.param("h100x8", 2, [(0, 1), (2, 3), (4, 5), (6, 7)], id="one-island-two-sockets"),
        pytest.param("h100x8", 8, [tuple(range(8))], id="whole-node"),
        pytest.param("a100x4-pcie", 2, [(0, 1), (2, 3)], id="bridged-pairs"),
        pytest.param("gb200x4", 4, [(0, 1, 2, 3)], id="tray-of-a-rack"),
        pytest.param("l40sx8", 1, [(index,) for index in range(8)], id="no-nvlink"),
    ],
)
def test_recorded_nodes_are_filled_whole(recorded, profile, size, expected):
    """As many groups as there are GPUs for: no profile's layout wastes one."""
    wanted = declare({"m": model(tensor_parallel=size, replicas=len(expected))})

    found = plan([recorded(profile)], {"gpu-01": wanted})

    assert gpus_on(found, "gpu-01") == expected


@pytest.mark.parametrize("profile", ["l40sx8", "rtx4090x2"])
def test_cards_without_nvlink_take_groups_only_on_demand(recorded, profile):
    """The refusal names the setting that allows it, and then it is done and said."""
    wanted = model(tensor_parallel=2)

    (problem,) = problems_of([recorded(profile)], {"gpu-01": declare({"m": wanted})})
    allowed = plan([recorded(profile)], {"gpu-01": declare({"m": wanted | {"allow_pcie": True}})})

    assert "`allow_pcie: true`" in problem
    assert gpus_on(allowed, "gpu-01") == [(0, 1)]
    assert "by `allow_pcie`" in allowed.reasons[0]


def test_a_mixed_fleet_takes_each_model_where_it_fits(recorded):
    """Four replicas of two: pairs of both kinds of node, none across the A100s' bridges."""
    fleet = [recorded("h100x8", "gpu-01"), recorded("a100x4-pcie", "gpu-02")]
    wanted = declare({"m": model(tensor_parallel=2, replicas=4)})

    found = plan(fleet, {node.name: wanted for node in fleet})

    assert gpus_on(found, "gpu-01") == [(0, 1), (2, 3)]
    assert gpus_on(found, "gpu-02") == [(0, 1), (2, 3)]
    assert "linked by NVLink (NV12) or NVLink (NV18)" in found.reasons[0]


# What a plan says


def test_a_plan_gives_its_reasons():
    """How many, of what, where, over which links, and who was passed over."""
    fleet = [machine("gpu-01", 4), machine("gpu-02", 4), machine("gpu-03", 1, 1)]
    wanted = declare({"m": model(tensor_parallel=2, replicas=2)})

    found = plan(fleet, {node.name: wanted for node in fleet})

    assert found.reasons == (
        "m: 2 replicas of 2 GPUs, 1 each on gpu-01, gpu-02; the GPUs of each group are linked "
        "by NVLink (NV18); none on gpu-03, because no NVLink island there has 2 GPUs",
        "m: gpufleet did not check the memory: it does not know the model",
    )


def test_a_plan_is_json_with_a_schema():
    found = plan([machine("gpu-01", 2)], {"gpu-01": declare({"m": model(tensor_parallel=2)})})

    assert json.loads(json.dumps(found.as_json())) == {
        "schema": 1,
        "stages": [
            {
                "id": "m-0",
                "unit": "vllm-m-0.service",
                "model": "m",
                "kind": "generate",
                "engine": "vllm",
                "replica": 0,
                "node": "gpu-01",
                "gpus": [0, 1],
                "gpu_uuids": ["GPU-gpu-01-0", "GPU-gpu-01-1"],
                "port": 8000,
                "ports": [8000],
                "tensor_parallel": 2,
                "pipeline_parallel": 1,
                "data_parallel": 1,
                "expert_parallel": False,
                "node_rank": 0,
                "nodes": ["gpu-01"],
                "flags": [],
            }
        ],
        "reasons": list(found.reasons),
        "moves": [],
    }


# What is refused


def test_a_fleet_too_small_says_how_many_fit():
    """The operator reads what fits and which settings to lower."""
    wanted = {"big": model(tensor_parallel=4, port=9000), "m": model(tensor_parallel=2, replicas=4)}

    (problem,) = problems_of([machine("gpu-01", 8)], {"gpu-01": declare(wanted)})

    assert problem == (
        "serving.m: 4 replicas of 2 GPUs declared, of which 2 fit on gpu-01 (8 GPUs, of which 4 "
        "are used by models that were placed earlier): lower `replicas` to 2, or lower "
        "`tensor_parallel`, or add nodes"
    )


def test_one_model_has_one_declaration():
    """Two declarations would make two different services behind one name."""
    fleet = [machine("gpu-01", 4), machine("gpu-02", 4)]
    settings = {
        "gpu-01": declare({"m": model(replicas=2)}),
        "gpu-02": declare({"m": model(replicas=3, port=8100)}),
    }

    (problem,) = problems_of(fleet, settings)

    assert "serving.m differs between gpu-01 and gpu-02" in problem
    assert "replicas: 2 and 3; port: 8000 and 8100" in problem


DCGM = {
    "cuda": {
        "repository": {"url": "http://mirror", "keyring_sha256": "0" * 64},
        "toolkit": None,
    },
    "dcgm": {"version": "1", "exporter_version": "1", "port": 8000},
}


@pytest.mark.parametrize(
    ("models", "others", "sentence"),
    [
        pytest.param(
            {"m": model(port=8001)},
            {"node_exporter": {"port": 8001}},
            "port 8001 is used by node_exporter.port and serving.m.port on gpu-01",
            id="exporter",
        ),
        pytest.param(
            {"m": model(port=8000)},
            DCGM,
            "port 8000 is used by dcgm.port and serving.m.port on gpu-01",
            id="dcgm",
        ),
        pytest.param(
            {"m": model(port=8000), "n": model(port=8000)},
            {},
            "port 8000 is used by serving.m.port and serving.n.port on gpu-01",
            id="another-model",
        ),
    ],
)
def test_a_port_that_was_written_twice_is_refused(models, others, sentence):
    """The second would fail to bind, minutes into its start; both keys are named."""
    settings = declare(models, **others)

    (problem,) = problems_of([machine("gpu-01", 8)], {"gpu-01": settings})

    assert problem.startswith(sentence)


@pytest.mark.parametrize(
    ("models", "others", "ports"),
    [
        pytest.param(
            {"m": model(replicas=3)},
            {"node_exporter": {"port": 8001}},
            {"m-0": 8000, "m-1": 8002, "m-2": 8003},
            id="an-exporter's",
        ),
        pytest.param({"m": model()}, DCGM, {"m-0": 8001}, id="a-default-is-no-wish"),
        pytest.param(
            {"m": model(replicas=2), "n": model(port=8001)},
            {},
            {"m-0": 8000, "m-1": 8002, "n-0": 8001},
            id="another-model's-first",
        ),
        pytest.param(
            {"m": model(replicas=2), "n": model()},
            {},
            {"m-0": 8000, "m-1": 8001, "n-0": 8002},
            id="two-defaults",
        ),
    ],
)
def test_ports_of_others_are_stepped_over(models, others, ports):
    """A first port that somebody wrote is that model's; all others take what is free."""
    found = plan([machine("gpu-01", 8)], {"gpu-01": declare(models, **others)})

    assert {stage.id: stage.port for stage in found.stages} == ports


def test_a_port_of_another_program_is_stepped_over_and_a_written_one_refused():
    node, taken = machine("gpu-01", 8), {"gpu-01": [8000, 8001]}

    found = plan([node], {"gpu-01": declare({"m": model()})}, ports=taken)

    assert [stage.port for stage in found.stages] == [8002]
    assert found.reasons[-1] == (
        "m: port 8002 on gpu-01, because port 8000 is used by a program that gpufleet does not "
        "manage"
    )
    with pytest.raises(
        FleetError, match=r"used by a program that gpufleet does not manage and serving\.m\.port"
    ):
        plan([node], {"gpu-01": declare({"m": model(port=8000)})}, ports=taken)


def test_ports_end_at_65535():
    (problem,) = problems_of(
        [machine("gpu-01", 2)], {"gpu-01": declare({"m": model(replicas=2, port=65535)})}
    )

    assert "would need port 65536" in problem


def test_everything_wrong_is_said_at_once():
    """Three nodes and two models, each with a mistake of its own: one run finds all of them."""
    fleet = [machine("gpu-01", 8), machine("gpu-03"), machine("gpu-04", 2)]
    settings = {
        "gpu-01": declare({"a": model()}),
        "gpu-03": declare({"b": model()}),
        "gpu-04": declare({"c": model(tensor_parallel=4)}),
        "gpu-05": declare({"a": model()}),
    }

    found = problems_of(fleet, settings)

    assert [problem.split(":")[0] for problem in found] == ["gpu-03", "gpu-05", "serving.c"]
    assert "no usable GPU" in found[0]
    assert "gpufleet has no probe of this node" in found[1]


def test_an_unfit_gpu_serves_nothing_and_the_plan_says_why():
    """Islands shrink with it: seven GPUs of an NVSwitch board hold one group of four."""
    whole = machine("gpu-01", 8)
    gpus = tuple(gpu for gpu in whole.gpus if gpu.index != 2)
    node = replace(whole, gpus=gpus, unfit={2: "ecc-uncorrected"})

    found = plan([node], {"gpu-01": declare({"m": model(tensor_parallel=4)})})

    assert [stage.gpus for stage in found.stages] == [(0, 1, 3, 4)]
    assert found.reasons[0] == "gpu-01: GPU 2 is not used (ecc-uncorrected)"


def test_a_long_list_of_nodes_is_shortened():
    """A sentence about 500 nodes stays a sentence."""
    fleet = [machine(f"gpu-{number:03}", 1) for number in range(500)]
    wanted = declare({"m": model(replicas=501)})

    (problem,) = problems_of(fleet, {node.name: wanted for node in fleet})

    assert "500 fit on gpu-000, gpu-001, gpu-002 and 497 more (500 GPUs)" in problem


# What holds for any fleet


@st.composite
def fleets(draw):
    nodes = [
        machine(
            f"gpu-{number:02}", *draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
        )
        for number in range(draw(st.integers(1, 4)))
    ]
    models = {
        name: model(
            tensor_parallel=draw(st.sampled_from([1, 2, 4])),
            replicas=draw(st.integers(1, 4)),
            port=port,
        )
        for name, port in (("a", 8000), ("b", 8100), ("c", 8200))
    }
    settings = {
        node.name: declare({name: models[name] for name in models if draw(st.booleans())})
        for node in nodes
    }
    return nodes, settings


def outcome(nodes, settings):
    try:
        return plan(nodes, settings)
    except FleetError as refused:
        return refused.problems


@tried(deadline=None)
@given(fleets(), st.randoms(use_true_random=False))
def test_the_same_fleet_has_the_same_plan(fleet, random):
    """The order in which nodes answer, or files are read, moves nothing, nor changes a refusal."""
    nodes, settings = fleet
    shuffled = [*settings.items()]
    random.shuffle(shuffled)

    assert outcome(random.sample(nodes, len(nodes)), dict(shuffled)) == outcome(nodes, settings)


@tried(deadline=None)
@given(fleets())
def test_every_plan_keeps_the_rules(fleet):
    """No GPU serves twice, no group leaves its island, no port is used twice on a node."""
    nodes, settings = fleet
    found = outcome(nodes, settings)
    if isinstance(found, tuple):
        return

    by_name = {node.name: node for node in nodes}
    used = Counter((stage.node, gpu) for stage in found.stages for gpu in stage.gpus)
    ports = Counter((stage.node, stage.port) for stage in found.stages)
    assert max([*used.values(), *ports.values()], default=1) == 1
    for stage in found.stages:
        assert len(stage.gpus) == stage.tensor_parallel
        assert all(pair in by_name[stage.node].nvlink for pair in combinations(stage.gpus, 2))
        assert stage.model in settings[stage.node].serving
    wanted = {name: m for node in settings.values() for name, m in node.serving.items()}
    assert Counter(stage.model for stage in found.stages) == {
        name: declared.replicas for name, declared in wanted.items()
    }


@tried(deadline=None)
@given(fleets(), st.sampled_from("abc"))
def test_one_more_replica_moves_none_of_its_model(fleet, grown):
    """A running model must not restart because it gets company."""
    nodes, settings = fleet
    more = {
        name: node.model_copy(
            update={
                "serving": {
                    key: declared.model_copy(update={"replicas": declared.replicas + 1})
                    if key == grown
                    else declared
                    for key, declared in node.serving.items()
                }
            }
        )
        for name, node in settings.items()
    }
    before, after = outcome(nodes, settings), outcome(nodes, more)
    if isinstance(before, tuple) or isinstance(after, tuple):
        return

    assert {stage for stage in before.stages if stage.model == grown} <= set(after.stages)


def test_probing_again_changes_nothing():
    """A plan depends on the hardware, not on what else a probe saw (driver, address)."""
    node, settings = machine("gpu-01", 8), {"gpu-01": declare({"m": model(replicas=3)})}

    assert plan([node], settings) == plan(
        [replace(node, driver="615.71.05", address="10.0.0.9")], settings
    )


def test_model_declares_pcie_deliberately():
    """The operator's word is needed before a group leaves NVLink."""
    assert Served.model_validate(model()).allow_pcie is False


def test_a_default_port_yields_to_one_that_was_written():
    """Also where the other model has no replica: it may get one there tomorrow."""
    fleet = [machine("gpu-01", 2), machine("gpu-02", 1)]
    settings = {node.name: declare({"a": model(port=8000), "z": model()}) for node in fleet}

    found = plan(fleet, settings)
    again = plan(fleet, settings, running=running_of(found))

    assert {stage.id: (stage.node, stage.port) for stage in found.stages} == {
        "a-0": ("gpu-01", 8000),
        "z-0": ("gpu-01", 8001),
    }
    assert "z: port 8001 on gpu-01, because port 8000 is used by serving.a.port" in found.reasons
    assert again.stages == found.stages


# What runs


def running_of(found):
    """The plan, carried out."""
    return [
        Running(stage.model, stage.replica, stage.node, stage.gpu_uuids, stage.port)
        for stage in found.stages
    ]


def on(name, model_name, number, *gpus, port=8000):
    return Running(model_name, number, name, tuple(f"GPU-{name}-{gpu}" for gpu in gpus), port)


def test_what_runs_stays_where_no_plan_would_put_it():
    """Not the first node, not the first GPU, not the lowest number: no reason to stop it."""
    fleet = [machine("gpu-01", 4), machine("gpu-02", 4)]
    wanted = declare({"m": model(tensor_parallel=2, replicas=2)})
    runs = on("gpu-02", "m", 5, 1, 3)

    found = plan(fleet, {node.name: wanted for node in fleet}, running=[runs])

    assert [(each.id, each.node, each.gpus) for each in found.stages] == [
        ("m-0", "gpu-01", (0, 1)),
        ("m-5", "gpu-02", (1, 3)),
    ]
    assert found.moves == ()


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        pytest.param(on("gpu-09", "m", 0, 0, 1), "gpu-09 is no longer in the inventory", id="node"),
        pytest.param(
            on("gpu-01", "m", 0, 2, 3),
            "a GPU of gpu-01 can no longer be used (GPU 3 is not used (xid))",
            id="gpu",
        ),
        pytest.param(
            on("gpu-01", "m", 0, 0),
            "the plan is TP 2 with 2 GPUs on each node, but the replica ran on 1 GPU",
            id="size",
        ),
        pytest.param(
            on("gpu-01", "m", 0, 2, 4),
            "the replica's GPUs on gpu-01 are not in the same NVLink island",
            id="link",
        ),
    ],
)
def test_what_cannot_stay_moves_and_the_plan_says_why(runs, why):
    whole = machine("gpu-01", 4, 4)
    node = replace(whole, gpus=tuple(gpu for gpu in whole.gpus if gpu.index != 3), unfit={3: "xid"})

    found = plan([node], {"gpu-01": declare({"m": model(tensor_parallel=2)})}, running=[runs])

    (move,) = found.moves
    assert move.why == why
    assert [stage.gpus for stage in move.after] == [(0, 1)]
    assert found.reasons[-1].endswith(f": {why}")


def test_fewer_replicas_stop_the_last_ones():
    node, settings = machine("gpu-01", 4), declare({"m": model(replicas=2)})
    runs = [on("gpu-01", "m", number, number, port=8000 + number) for number in range(4)]

    found = plan([node], {"gpu-01": settings}, running=runs)

    assert [stage.id for stage in found.stages] == ["m-0", "m-1"]
    assert [str(move) for move in found.moves] == [
        "m-2 stops on gpu-01: `replicas` is 2",
        "m-3 stops on gpu-01: `replicas` is 2",
    ]


def test_as_many_as_fit_make_way_for_a_number_that_was_asked_for():
    """Four of `b` ran on the node; `a` needs two GPUs, and as few of `b` as can be make way."""
    wanted = {"a": model(tensor_parallel=2, port=9000), "b": model(replicas="fit")}
    runs = [on("gpu-01", "b", number, number, port=8000 + number) for number in range(4)]

    found = plan([machine("gpu-01", 4)], {"gpu-01": declare(wanted)}, running=runs)

    assert {stage.id: stage.gpus for stage in found.stages} == {
        "a-0": (2, 3),
        "b-0": (0,),
        "b-1": (1,),
    }
    assert [str(move) for move in found.moves] == [
        "b-2 stops on gpu-01: a-0 needs its GPUs on gpu-01",
        "b-3 stops on gpu-01: a-0 needs its GPUs on gpu-01",
    ]


def test_a_model_that_nobody_declares_any_more_stops():
    found = plan(
        [machine("gpu-01", 2)],
        {"gpu-01": declare({"m": model()})},
        running=[on("gpu-01", "old", 0, 1, port=9000)],
    )

    assert [str(move) for move in found.moves] == [
        "old-0 stops on gpu-01: no node declares the model"
    ]


# As many as fit


def test_as_many_as_fit_take_turns():
    """Neither model takes all because its name is first."""
    wanted = {"a": model(replicas="fit"), "b": model(replicas="fit", port=9000)}

    found = plan([machine("gpu-01", 8)], {"gpu-01": declare(wanted)})

    assert Counter(stage.model for stage in found.stages) == {"a": 4, "b": 4}


def test_as_many_as_fit_is_at_least_one():
    wanted = {"a": model(tensor_parallel=2), "b": model(replicas="fit", port=9000)}

    (problem,) = problems_of([machine("gpu-01", 2)], {"gpu-01": declare(wanted)})

    assert problem.startswith("serving.b: 1 replica of 1 GPU declared, of which 0 fit on gpu-01")


# GPUs of others, NICs


def test_reserved_gpus_serve_nothing_and_the_plan_says_so():
    found = plan(
        [machine("gpu-01", 4)],
        {"gpu-01": declare({"m": model(tensor_parallel=2)})},
        reserved={"gpu-01": [0]},
    )

    assert gpus_on(found, "gpu-01") == [(1, 2)]
    assert found.reasons[0] == "gpu-01: GPU 0 is not used (reserved for others)"


def test_gpus_behind_one_nic_are_preferred():
    """Of one NUMA node and one island, the pair that shares a NIC."""
    nics = {"gpu-01": {0: [("mlx5_0", "PIX")], 1: [("mlx5_1", "PIX")], 2: [("mlx5_0", "PIX")]}}

    found = plan(
        [machine("gpu-01", 3)], {"gpu-01": declare({"m": model(tensor_parallel=2)})}, nics=nics
    )

    assert gpus_on(found, "gpu-01") == [(0, 2)]


def test_a_replica_that_runs_twice_stays_once():
    """Its node was away, the plan put it elsewhere, and now the node is back: one of them stops."""
    fleet = [machine("gpu-01", 2), machine("gpu-02", 2)]
    wanted = declare({"m": model(tensor_parallel=2)})
    runs = [on("gpu-01", "m", 0, 0, 1), on("gpu-02", "m", 0, 0, 1)]

    found = plan(fleet, {node.name: wanted for node in fleet}, running=runs)

    assert [stage.node for stage in found.stages] == ["gpu-01"]
    assert [str(move) for move in found.moves] == [
        "m-0 stops on gpu-02: gpu-01 also runs this replica"
    ]
    assert [(each.action, each.why) for each in plan_changes(found, runs)] == [
        (Action.STOP, "gpu-01 also runs this replica"),
        (Action.STAY, ""),
    ]


def test_the_difference_names_what_starts_stops_moves_and_restarts():
    """By replica: what it was, what it will be, and why."""
    fleet = [machine("gpu-01", 2), machine("gpu-02", 2)]
    wanted = declare({"m": model(tensor_parallel=2, replicas=2), "n": model(port=9000)})
    runs = [on("gpu-02", "m", 0, 0, 1), on("gpu-09", "m", 1, 0, 1), on("gpu-01", "o", 0, 1)]
    fleet.append(machine("gpu-03", 1))

    found = plan(fleet, {node.name: wanted for node in fleet}, running=runs)
    changes = plan_changes(found, runs, {"m-0": "its flags changed"}, fleet)

    assert [(each.action, each.replica, each.before, each.after) for each in changes] == [
        ("restart", "m-0", "gpu-02 GPUs 0-1 port 8000", "gpu-02 GPUs 0-1 port 8000"),
        (
            "move",
            "m-1",
            "gpu-09 GPUs GPU-gpu-09-0, GPU-gpu-09-1 port 8000",
            "gpu-01 GPUs 0-1 port 8000",
        ),
        ("start", "n-0", "", "gpu-03 GPU 0 port 9000"),
        ("stop", "o-0", "gpu-01 GPU 1 port 8000", ""),
    ]
    assert [each.why for each in changes] == [
        "its flags changed",
        "gpu-09 is no longer in the inventory",
        "",
        "no node declares the model",
    ]


def test_what_may_stop_makes_way_before_what_would_move():
    """`b` has a number and would go elsewhere; one of `c`, as many as fit, is one less."""
    wanted = {
        "a": model(tensor_parallel=2, port=9000),
        "b": model(port=8100, replicas=2),
        "c": model(port=8200, replicas="fit"),
    }
    runs = [
        on("gpu-01", "b", 0, 2, port=8100),
        on("gpu-01", "b", 1, 3, port=8101),
        on("gpu-01", "c", 0, 0, port=8200),
        on("gpu-01", "c", 1, 1, port=8201),
        on("gpu-02", "c", 2, 0, port=8200),
    ]
    fleet = [machine("gpu-01", 4), machine("gpu-02", 1)]

    found = plan(fleet, {node.name: declare(wanted) for node in fleet}, running=runs)

    assert {stage.id: stage.gpus for stage in found.stages if stage.node == "gpu-01"} == {
        "a-0": (0, 1),
        "b-0": (2,),
        "b-1": (3,),
    }
    assert [move.why for move in found.moves] == ["a-0 needs its GPUs on gpu-01"] * 2


def test_two_that_run_on_one_gpu_are_told_apart():
    """Somebody started the second by hand: the GPU is the first one's, the second leaves it."""
    wanted = {"a": model(port=8000), "b": model(port=8100)}
    runs = [on("gpu-01", "a", 0, 1, port=8000), on("gpu-01", "b", 0, 1, port=8100)]

    found = plan([machine("gpu-01", 2)], {"gpu-01": declare(wanted)}, running=runs)

    assert {stage.id: stage.gpus for stage in found.stages} == {"a-0": (1,), "b-0": (0,)}
    assert [str(move) for move in found.moves] == [
        "b-0 restarts on gpu-01 GPUs 0: a different replica now uses its GPUs on gpu-01"
    ]


def test_a_further_replica_leaves_the_port_that_another_model_declares():
    """The first port of a model is its own, whoever was there before."""
    wanted = {"m": model(replicas=2, port=8000), "n": model(port=8001)}
    runs = [on("gpu-01", "m", 0, 0, port=8000), on("gpu-01", "m", 1, 1, port=8001)]

    found = plan([machine("gpu-01", 4)], {"gpu-01": declare(wanted)}, running=runs)

    assert {stage.id: (stage.gpus, stage.port) for stage in found.stages} == {
        "m-0": ((0,), 8000),
        "m-1": ((1,), 8002),
        "n-0": ((2,), 8001),
    }
    assert [move.why for move in found.moves] == ["the replica's port changes from 8001 to 8002"]


@each_row(
    ("port", "kept"),
    [
        pytest.param(8003, True, id="as-if-replicas-before-it-had-stopped"),
        pytest.param(7999, False, id="below-the-declared-one"),
        pytest.param(8004, False, id="more-than-the-node-can-hold"),
        pytest.param(9100, False, id="an-exporter's"),
        pytest.param(None, True, id="not-known"),
    ],
)
def test_a_port_is_kept_if_a_plan_could_have_given_it(port, kept):
    """So that a `port` that was changed takes effect, and a stopped neighbour restarts nobody."""
    runs = [on("gpu-01", "m", 0, 1, port=port)]

    found = plan([machine("gpu-01", 4)], {"gpu-01": declare({"m": model()})}, running=runs)

    assert (found.moves == ()) == kept
    assert found.stages[0].port == (port if kept and port else 8000)
