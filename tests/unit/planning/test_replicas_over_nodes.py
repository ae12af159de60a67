"""Replicas that the operator asks for by numbers larger than a node: where their parts lie."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.fleet.declared_hardware import with_identity
from gpufleet.node.topology import Domain, node_from_probe
from gpufleet.planning.candidates import Verdict
from gpufleet.planning.explanation import explain
from gpufleet.planning.parallelism import Division
from gpufleet.planning.planner import plan
from gpufleet.planning.stage import Running
from gpufleet.settings.node_settings import NodeSettings
from tests.support.checkout import ROOT
from tests.support.models import described
from tests.support.rows import each_row
from tests.unit.node.test_cluster_network import nic
from tests.unit.planning.test_placement_properties import told
from tests.unit.planning.test_planner import declare, machine, model

DATA = ROOT / "tests/data"
LLAMA = "meta-llama--Meta-Llama-3.1-70B"
DEEPSEEK = "deepseek-ai--DeepSeek-V2-Lite"
MISSING = {"missing": "not_supported"}


def fleet(count, *islands):
    return [machine(f"gpu-{number:02}", *(islands or (8,))) for number in range(1, count + 1)]


def rack(*cliques):
    """Trays of four GPUs; the number is the clique of each, 0: none."""
    trays = fleet(len(cliques), 4)
    return [
        replace(tray, domain=Domain("8f1d", clique) if clique else None)
        for tray, clique in zip(trays, cliques, strict=True)
    ]


def planned(nodes, running=(), name=None, **asked):
    wanted = declare({"m": model(**{"span_nodes": True, **asked})})
    known = {"m": described(name)} if name else None
    return plan(nodes, {node.name: wanted for node in nodes}, known, running)


def refused(nodes, **asked):
    with pytest.raises(FleetError) as caught:
        planned(nodes, **asked)
    (problem,) = caught.value.problems
    return problem


def parts(found):
    """For each replica its nodes in the order of ranks."""
    nodes = defaultdict(list)
    for stage in found.stages:
        nodes[stage.id].append(stage.node)
    return dict(nodes)


def running_of(found):
    return [
        Running(each.model, each.replica, each.node, each.gpu_uuids, each.port, each.node_rank)
        for each in found.stages
    ]


# Over how many nodes


@each_row(
    ("nodes", "asked", "count", "gpus"),
    [
        pytest.param(fleet(4), {"tensor_parallel": 16}, 2, 8, id="group-of-two-nodes"),
        pytest.param(fleet(4), {"tensor_parallel": 12}, 2, 6, id="as-few-as-hold-equal-shares"),
        pytest.param(fleet(4), {"tensor_parallel": 20}, 4, 5, id="even-before-few"),
        pytest.param(fleet(2, 1), {"tensor_parallel": 2}, 2, 1, id="a-gpu-on-each"),
        pytest.param(fleet(3), {"tensor_parallel": 4, "pipeline_parallel": 3}, 3, 4, id="pipeline"),
        pytest.param(
            fleet(4), {"tensor_parallel": 16, "pipeline_parallel": 2}, 4, 8, id="pipeline-of-wide"
        ),
        pytest.param(fleet(2), {"data_parallel": 12}, 2, 6, id="engines-of-a-gpu"),
        pytest.param(
            fleet(2), {"tensor_parallel": 8, "data_parallel": 2}, 2, 8, id="engines-of-a-node"
        ),
        pytest.param(
            fleet(4), {"tensor_parallel": 16, "data_parallel": 2}, 4, 8, id="engines-of-two-nodes"
        ),
        pytest.param(
            fleet(4), {"data_parallel": 32, "expert_parallel": True}, 4, 8, id="experts-on-h200"
        ),
        pytest.param(
            rack(*[7] * 18), {"data_parallel": 72, "expert_parallel": True}, 18, 4, id="a-rack"
        ),
        pytest.param(
            fleet(2, *[1] * 8), {"tensor_parallel": 16, "allow_pcie": True}, 2, 8, id="over-pcie"
        ),
    ],
)
def test_a_replica_lies_in_equal_shares_on_the_fewest_nodes(nodes, asked, count, gpus):
    found = planned(nodes, **asked).stages

    assert [len(stage.gpus) for stage in found] == [gpus] * count
    assert [stage.node_rank for stage in found] == list(range(count))
    assert {stage.nodes for stage in found} == {tuple(stage.node for stage in found)}


def test_what_a_node_holds_stays_on_a_node():
    """`span_nodes` allows more nodes, it does not ask for them."""
    asked = {"tensor_parallel": 4, "data_parallel": 2}

    assert parts(planned(fleet(2), **asked, replicas=2)) == {"m-0": ["gpu-01"], "m-1": ["gpu-02"]}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        pytest.param({"tensor_parallel": 16}, "TP 16", id="tensor"),
        pytest.param({"data_parallel": 16, "expert_parallel": True}, "DP 16 with EP", id="experts"),
        pytest.param({"data_parallel": 16}, None, id="engines-do-not-wait-for-each-other"),
        pytest.param({"tensor_parallel": 8, "pipeline_parallel": 2}, None, id="stages-wait-once"),
    ],
)
def test_the_plan_says_which_layers_wait_for_the_network(asked, said):
    (reason, *_) = planned(fleet(2), **asked).reasons

    waits = f"{said} is wider than a node: every layer waits for the network"
    assert (waits in reason) == (said is not None)
    assert ("wider than a node" in reason) == (said is not None)


def test_nodes_that_hold_a_group_are_not_joined_by_slower_ones():
    """One fast replica beside one that waits for the network is not what was asked for."""
    mixed = [machine("gpu-01", 8), machine("gpu-02", 4), machine("gpu-03", 4)]

    found = planned(mixed, tensor_parallel=8)

    assert parts(found) == {"m-0": ["gpu-01"]}
    assert "none on gpu-02, gpu-03, because TP 8 would span the network there" in found.reasons[0]
    assert "lower `replicas` to 1" in refused(mixed, tensor_parallel=8, replicas=2)


def test_what_runs_over_nodes_stays_when_a_larger_node_comes():
    small = fleet(2, 4)
    before = planned(small, tensor_parallel=8)

    after = planned([*small, machine("gpu-03", 8)], running_of(before), tensor_parallel=8)

    assert (after.stages, after.moves) == (before.stages, ())


def test_pcie_is_nearer_than_the_network():
    """Two nodes of eight cards would hold it over PCIe: it is not cut into sixteen instead."""
    problem = refused(fleet(16, *[1] * 8), tensor_parallel=16)

    assert "tensor_parallel 16 needs 16 GPUs in one NVLink island" in problem
    assert "set `allow_pcie: true`" in problem


@each_row("name", [LLAMA, DEEPSEEK])
@each_row("objective", ["balanced", "latency", "throughput", "memory"])
def test_no_group_is_cut_unasked(name, objective):
    """Whatever is looked for: over nodes without a number there are pipelines at most."""
    asked = {"tensor_parallel": None, "objective": objective, "context": 8192}

    for nodes in (fleet(4), fleet(8, 1)):
        found = planned(nodes, name=name, **asked)

        for considered in found.candidates:
            assert not [each for each in considered.candidates if each.division.spans_nodes]


@each_row("objective", ["balanced", "latency", "throughput", "memory"])
@each_row(("count", "data", "over"), [(4, 32, 4), (8, 32, 4), (8, 8, 1)])
def test_engines_that_are_asked_for_take_no_more_nodes_than_hold_them(objective, count, data, over):
    """Wider engines would fit on more nodes: whatever is looked for, however many there are."""
    found = planned(
        fleet(count),
        name=DEEPSEEK,
        tensor_parallel=None,
        data_parallel=data,
        objective=objective,
        context=8192,
    )

    (considered,) = found.candidates
    assert considered.chosen.division == Division(
        1, data_parallel=data, expert_parallel=True, nodes=over
    )
    assert considered.candidates[1].reason == f"fits, but needs {2 * over} nodes instead of {over}"


def test_engines_without_enough_nodes_are_refused_by_what_they_take():
    problem = refused(fleet(2), name=DEEPSEEK, tensor_parallel=None, data_parallel=32, context=8192)

    assert "TP 1 x DP 32 with EP, does not fit: the division needs 4 nodes" in problem
    assert "but only 2 are of this kind" in problem
    assert "set `data_parallel: 16`" in problem


def test_a_group_over_nodes_is_sized_like_any_other():
    """Sixteen GPUs share the weights of 131 GiB; what is not known stays not known."""
    found = planned(fleet(2), name=LLAMA, tensor_parallel=16, context=8192)

    assert found.candidates[0].chosen.sizing.weights_bytes_per_gpu < 9 << 30
    assert "did not check the memory" in planned(fleet(2), tensor_parallel=16).reasons[-1]


def test_a_rack_is_sized_by_who_gets_the_tokens_of_its_72_engines(recorded):
    """Gathered on every GPU they need more than it has; sent to their experts, less, or not much
    less: then the number that was asked for is taken, and the doubt is said."""
    trays = [recorded("gb200x4", f"gpu-{number:02}") for number in range(1, 19)]
    asked = {"name": "deepseek-ai--DeepSeek-R1", "data_parallel": 72, "context": 16384}

    with pytest.raises(FleetError, match="`max-num-batched-tokens: 8192` in `flags`"):
        planned(trays, **asked)
    few = planned(trays, **asked, flags={"max-num-batched-tokens": 4096})
    sent = planned(trays, **asked, flags={"all2all-backend": "flashinfer_nvlink_two_sided"})

    wide = Division(1, data_parallel=72, expert_parallel=True, nodes=18)
    for found, verdict in ((few, Verdict.FITS), (sent, Verdict.NEAR)):
        chosen = found.candidates[0].chosen
        assert (chosen.division, chosen.verdict) == (wide, verdict)
    assert any("may not start" in reason for reason in sent.reasons)


# What is refused


@each_row(
    ("nodes", "asked", "found", "write"),
    [
        pytest.param(
            fleet(2),
            {"tensor_parallel": 16, "span_nodes": False},
            "tensor_parallel 16 needs 16 GPUs in one NVLink island, but the largest on gpu-01, "
            "gpu-02 has only 8",
            "lower `tensor_parallel` to 8, or set `span_nodes: true`",
            id="not-allowed",
        ),
        pytest.param(
            fleet(4),
            {"data_parallel": 32, "expert_parallel": True, "span_nodes": False},
            "data_parallel 32 with experts on each GPU needs 32 GPUs in one NVLink island, but the "
            "largest on gpu-01, gpu-02, gpu-03, gpu-04 has only 8",
            "lower `data_parallel` to 8, or set `span_nodes: true`",
            id="experts-not-allowed",
        ),
        pytest.param(
            fleet(2),
            {"tensor_parallel": 4, "pipeline_parallel": 4, "span_nodes": False},
            "TP 4 x PP 4 needs 16 GPUs on one node in groups of 4, but the largest of gpu-01, "
            "gpu-02 has only 8",
            "lower `pipeline_parallel` to 2, or set `span_nodes: true`",
            id="pipeline-not-allowed",
        ),
        pytest.param(
            fleet(1),
            {"tensor_parallel": 16, "span_nodes": False},
            "tensor_parallel 16 needs 16 GPUs in one NVLink island, but the largest on gpu-01 has "
            "only 8",
            "lower `tensor_parallel` to 8",
            id="span-nodes-alone-would-not-do",
        ),
        pytest.param(
            fleet(1),
            {"tensor_parallel": 16},
            "TP 16 needs 2 nodes of the same kind with 8 GPUs each, but only gpu-01 is of the kind "
            "8 x NVIDIA H100 80GB HBM3, all on NVLink",
            "lower `tensor_parallel` to 8, or add nodes",
            id="too-few-nodes",
        ),
        pytest.param(
            fleet(2, 4),
            {"tensor_parallel": 5},
            "TP 5 needs 5 nodes of the same kind with 1 GPU each, but only gpu-01, gpu-02 are "
            "of the kind 4 x NVIDIA H100 80GB HBM3, all on NVLink",
            "lower `tensor_parallel` to 4, or raise `tensor_parallel` to 6, or add nodes",
            id="uneven",
        ),
        pytest.param(
            fleet(3),
            {"data_parallel": 32, "expert_parallel": True},
            "TP 1 x DP 32 with EP needs 4 nodes of the same kind with 8 GPUs each, but only "
            "gpu-01, gpu-02, gpu-03 are of the kind 8 x NVIDIA H100 80GB HBM3, all on NVLink",
            "lower `data_parallel` to 24, or add nodes",
            id="engines",
        ),
        pytest.param(
            fleet(1),
            {"tensor_parallel": 3, "pipeline_parallel": 3, "data_parallel": 3},
            "TP 3 x PP 3 x DP 3 needs 9 nodes of the same kind with 3 GPUs each, but only gpu-01 "
            "is of the kind 8 x NVIDIA H100 80GB HBM3, all on NVLink",
            "set `data_parallel: 1` and `pipeline_parallel: 2`, or add nodes",
            id="no-number-is-enough-alone",
        ),
        pytest.param(
            fleet(2, *[1] * 4),
            {"tensor_parallel": 4, "pipeline_parallel": 2, "span_nodes": False},
            "tensor_parallel 4 needs 4 GPUs in one NVLink island, but the largest on gpu-01, "
            "gpu-02 has only 1",
            "lower `tensor_parallel` to 1, or set `allow_pcie: true` and `span_nodes: true`",
            id="no-setting-is-enough-alone",
        ),
    ],
)
def test_a_refusal_says_what_it_takes_and_the_nearest_that_works(nodes, asked, found, write):
    assert refused(nodes, **asked) == f"serving.m: {found}: {write}"


def test_the_nearest_that_is_named_fits_the_model():
    """24 GPUs are there, and 64 heads are not divided by 24: 16 is named."""
    problem = refused(fleet(3), name=LLAMA, tensor_parallel=32, context=8192)

    assert problem.endswith("lower `tensor_parallel` to 16, or add nodes")


# NVLink over nodes


@each_row(
    ("cliques", "replicas", "nodes", "said"),
    [
        pytest.param(
            (1, 2, 2, 1),
            1,
            {"m-0": [1, 4]},
            "all nodes are within NVLink clique 1 of cluster 8f1d",
            id="one",
        ),
        pytest.param(
            (1, 1, 1, 2, 2),
            1,
            {"m-0": [4, 5]},
            "all nodes are within NVLink clique 2",
            id="the-smaller-one",
        ),
        pytest.param(
            (1, 2, 1, 2),
            2,
            {"m-0": [1, 3], "m-1": [2, 4]},
            "all nodes are within NVLink clique 1 of cluster 8f1d (m-0), "
            "all nodes are within NVLink clique 2",
            id="each-its-own",
        ),
        pytest.param(
            (1, 2, 3),
            1,
            {"m-0": [1, 2]},
            "every layer waits for the network, because no NVLink clique has room",
            id="no-room-in-any",
        ),
        pytest.param(
            (0, 1, 1),
            1,
            {"m-0": [2, 3]},
            "all nodes are within NVLink clique 1",
            id="before-nodes-without",
        ),
    ],
)
def test_a_group_over_nodes_lies_in_one_nvlink_clique(cliques, replicas, nodes, said):
    """And the plan says in which, or that it crosses."""
    found = planned(rack(*cliques), tensor_parallel=8, replicas=replicas)

    assert parts(found) == {
        name: [f"gpu-{number:02}" for number in numbers] for name, numbers in nodes.items()
    }
    assert f"TP 8 is wider than a node: {said}" in found.reasons[0]


def test_a_recorded_tray_knows_its_clique(recorded):
    """A board of eight whose switches end at it has a cluster of zeros."""
    assert recorded("gb200x4").domain == Domain("8f1d2c3b4a5e6f708192a3b4c5d6e7f8", 32766)
    assert recorded("h100x8").domain is None
    assert recorded("l40sx8").domain is None


@pytest.mark.parametrize(
    ("changes", "joined"),
    [
        pytest.param({0: {"state": 2}}, True, id="one-gpu-is-unfit"),
        pytest.param({key: {"state": 2} for key in range(4)}, False, id="none-has-joined"),
        pytest.param({0: {"clique": 1}}, False, id="two-cliques"),
        pytest.param({key: {"clique": MISSING} for key in range(4)}, False, id="not-told"),
    ],
)
def test_a_domain_is_what_all_gpus_that_joined_have_joined(changes, joined):
    document = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/gb200x4.json").read_text())
    for gpu, facts in changes.items():
        document["fabric"][gpu] |= facts

    assert (node_from_probe("gpu-01", document).domain is not None) == joined


# What always holds


NUMBERS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


ASKED = st.fixed_dictionaries(
    {
        "tensor_parallel": NUMBERS,
        "pipeline_parallel": NUMBERS,
        "data_parallel": NUMBERS,
        "expert_parallel": st.booleans(),
        "allow_pcie": st.booleans(),
        "replicas": st.integers(1, 3),
    }
)
BOARDS = st.sampled_from([(8,), (4,), (4, 4), (2, 2), (1,), (3,)])


@given(st.lists(st.tuples(BOARDS, st.integers(0, 2)), min_size=1, max_size=6), ASKED)
def test_shares_are_equal_on_distinct_nodes_of_one_kind(boards, asked):
    """Or it is refused, and each way that the refusal names is enough by itself."""
    nodes = [
        replace(machine(f"gpu-{at}", *islands), domain=Domain("8f1d", clique) if clique else None)
        for at, (islands, clique) in enumerate(boards)
    ]
    try:
        found = planned(nodes, **asked)
    except FleetError as error:
        (problem,) = error.problems
        for way in told(problem):
            changes = {key: yaml.safe_load(value) for key, value, _ in way}
            planned(nodes, **{**asked, "replicas": 1, **changes})
        return

    tensor, pipeline, data = (asked[f"{name}_parallel"] for name in ("tensor", "pipeline", "data"))
    replicas, expert, pcie = (asked[key] for key in ("replicas", "expert_parallel", "allow_pcie"))
    by_name = {node.name: node for node in nodes}
    assert len(parts(found)) == replicas
    for name, its_nodes in parts(found).items():
        stages = [stage for stage in found.stages if stage.id == name]
        assert [stage.node_rank for stage in stages] == list(range(len(stages)))
        assert len(set(its_nodes)) == len(its_nodes)
        assert {len(stage.gpus) for stage in stages} == {tensor * pipeline * data // len(stages)}
        assert len({tuple(map(len, by_name[node].islands)) for node in its_nodes}) == 1
        share, engine = len(stages[0].gpus), tensor * pipeline
        assert share % engine == 0 or engine % share == 0
        assert share % tensor == 0 or tensor % share == 0
        for stage in stages:
            group = share if expert and data > 1 else min(tensor, share)
            for start in range(0, share, group):
                part = set(stage.gpus[start : start + group])
                assert pcie or any(part <= set(island) for island in by_name[stage.node].islands)
    again = planned(nodes, running_of(found), **asked)
    assert (again.stages, again.moves) == (found.stages, ())


@pytest.mark.parametrize(
    ("asked", "link"),
    [
        pytest.param({"tensor_parallel": 4}, "NV18  over nodes", id="tensor"),
        pytest.param({"data_parallel": 4, "expert_parallel": True}, "over nodes", id="experts"),
        pytest.param({"tensor_parallel": 2, "pipeline_parallel": 2}, "NV18", id="pipeline"),
    ],
)
def test_the_explanation_has_the_nodes_of_a_replica_and_which_groups_they_cut(asked, link):
    nodes = fleet(2, 2)

    lines = explain(planned(nodes, **asked), nodes).splitlines()

    assert lines[1].split()[:6] == ["TP", "PP", "DP", "EP", "nodes", "replicas"]
    assert lines[2].split()[5:7] == ["2", "1"]
    (rank,) = [line for line in lines if "  rank 2  " in line]
    assert rank.endswith(f"m-0  rank 2  {link}")


# The whole way, from probes to what the processes are started with


def assessed(**asked):
    """Two recorded nodes with a config and one free GPU each, as the lab has them."""
    config = json.loads((DATA / "models/Qwen--Qwen3-0.6B.json").read_text())["config"]
    absent = {"missing": "absent"}
    documents, declared = {}, {}
    for number, name in enumerate(("gpu-01", "gpu-02"), 1):
        document = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())
        document["models"] = {
            "/srv/q": {"config": config, "hf_quant_config": absent, "bytes": absent}
        }
        document["nics"]["net"] = [nic("eth1", f"10.1.0.{number}/24", pci="0000:02:00.0")]
        documents[name] = with_identity(document, name)
        settings = {
            "vllm": {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"},
            "firewall": {},
            "gpus": {"reserved": list(range(1, 8))},
            "serving": {
                "q": {"model": "/srv/q", "context": 8192, "span_nodes": True, **asked},
            },
        }
        declared[name] = SimpleNamespace(
            groups=(), settings=NodeSettings.model_validate(settings), origins={}
        )
    return assessment.plan_fleet(documents, declared)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"tensor_parallel": 2}, id="tensor"),
        pytest.param({"tensor_parallel": 1, "pipeline_parallel": 2}, id="pipeline"),
        pytest.param({"tensor_parallel": 1, "data_parallel": 2}, id="data"),
        pytest.param({"data_parallel": 2}, id="data-of-planned-engines"),
    ],
)
def test_two_nodes_with_a_free_gpu_each_hold_a_replica_of_two(asked):
    """Ranks, sizes and the network that joins them, as the units need them."""
    found = assessed(**asked).plan

    assert [(each.node, each.node_rank, each.gpus) for each in found.stages] == [
        ("gpu-01", 0, (0,)),
        ("gpu-02", 1, (0,)),
    ]
    for stage in found.stages:
        assert stage.nodes == ("gpu-01", "gpu-02")
        assert stage.tensor_parallel * stage.pipeline_parallel * stage.data_parallel == 2
        assert [network.address for _, network in stage.group.networks] == ["10.1.0.1", "10.1.0.2"]
