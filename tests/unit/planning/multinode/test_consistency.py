"""What nodes of one replica have to have in common, and what crosses between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.errors import FleetError
from gpufleet.node.cluster_network import Network
from gpufleet.node.topology import Domain, Node
from gpufleet.planning.multinode.consistency import check_consistency
from gpufleet.planning.stage import Group
from gpufleet.serving import unit
from gpufleet.settings.node_settings import NodeSettings
from tests.support.planned import machine, planned
from tests.support.rows import each_row
from tests.unit.planning.multinode.test_launch import HCAS, stages

LOCK = "vllm==0.33.0\ndeep-ep==1.2.1\n"
RACK = Domain("8f1d2c3b4a5e6f708192a3b4c5d6e7f8", 32766)


def said(
    replica, *, flags=None, vllm=(), rdma=True, domains=(), lock=LOCK, has_experts=None, **served
):
    """What is remarked; `vllm` are further settings of each node's, by its place."""
    vllm, domains = dict(vllm), dict(domains)
    networks = tuple(
        (each.node, Network("eth1", f"10.1.0.{rank}", HCAS if rdma is True or rank in rdma else ()))
        for rank, each in enumerate(replica)
    )
    group = Group(networks, 29500, experts=has_experts) if len(replica) > 1 else None
    declared = {
        each.node: NodeSettings.model_validate(
            {
                "vllm": {"version": "0.33.0", "lock": "lock", "listen": "127.0.0.1"}
                | vllm.get(rank, {}),
                "serving": {"m": {"model": "/srv/m", "flags": flags or {}, **served}},
            }
        )
        for rank, each in enumerate(replica)
    }
    nodes = {
        each.node: Node(each.node, None, None, (), {}, {}, domain=domains.get(rank))
        for rank, each in enumerate(replica)
    }
    return check_consistency(
        [replace(each, group=group) for each in replica],
        declared,
        nodes,
        {"lock": lock, "other": lock},
    )


def refusal(*given, **more):
    with pytest.raises(FleetError) as caught:
        said(*given, **more)
    return caught.value.problems


def experts(nodes=2, gpus=8, first=1):
    return stages(nodes, gpus, data=nodes * gpus, expert=True, first=first)


def test_a_replica_of_nodes_that_are_alike_is_worth_no_word():
    assert said(stages(2, 8, tensor=8, pipeline=2)) == ()
    assert said(experts(), flags={"all2all-backend": "deepep_low_latency"}) == ()


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        (
            {"lock": "other"},
            "vllm.lock: the value is lock on gpu-01, but other on gpu-02. m-0 spans both",
        ),
        (
            {"version": "0.32.0"},
            "vllm.version: the value is 0.33.0 on gpu-01, but 0.32.0 on gpu-02",
        ),
        (
            {"cluster_key_file": "k"},
            "vllm.cluster_key_file: the value is None on gpu-01, but k on gpu-02",
        ),
        (
            {"environment": {"NCCL_DEBUG": "INFO"}},
            "vllm.environment: gpu-01 and gpu-02 have different values of NCCL_DEBUG, but m-0",
        ),
    ],
)
def test_what_would_keep_ranks_apart_for_ever_is_refused(differs, sentence):
    (found,) = refusal(stages(2, 8, tensor=8, pipeline=2), vllm={1: differs})
    assert sentence in found


def test_a_nodes_own_interface_and_address_may_be_its_own():
    own = {"environment": {"NCCL_SOCKET_IFNAME": "=ib0"}, "listen": "::1"}
    assert said(stages(2, 8, tensor=8, pipeline=2), vllm={1: own}) == ()


def test_a_server_an_engine_is_for_replicas_over_nodes():
    (found,) = refusal(
        [replace(stages(1, 8, data=8)[0], nodes=())], data_parallel_balancing="external"
    )
    assert "write `internal`, or `replicas: 8` and `data_parallel: 1`" in found


@pytest.mark.parametrize(
    ("backend", "lock", "sentence"),
    [
        ("deepep_v2", "vllm==0.33.0", "needs the package deep_ep, but lock does not contain"),
        ("nixl_ep", LOCK, "needs the package nixl, but lock does not contain"),
        ("moonep", LOCK, "needs the package moonep, but lock does not contain"),
        ("mori_low_latency", LOCK, "is for GPUs of AMD: write `allgather_reducescatter`"),
    ],
)
def test_a_backend_whose_package_nobody_installs_is_refused(backend, lock, sentence):
    (found,) = refusal(experts(), flags={"all2all-backend": backend}, lock=lock)
    assert sentence in found


def test_nixls_own_wheel_has_its_experts_too():
    assert said(experts(), flags={"all2all-backend": "nixl_ep"}, lock="nixl==1.5.0") == ()


@pytest.mark.parametrize(
    ("backend", "release", "gone"),
    [
        ("pplx", "0.18.0", True),
        ("naive", "0.18.0", False),
        ("naive", "0.19.0", True),
    ],
)
def test_a_backend_that_a_release_only_warns_of_is_named(backend, release, gone):
    both = {rank: {"version": release} for rank in (0, 1)}
    found = said(experts(), flags={"all2all-backend": backend}, vllm=both)

    assert bool(found) is gone
    if gone:
        assert f"vLLM no longer has {backend}, and uses allgather_reducescatter" in found[0]


def test_a_backend_that_exchanges_nothing_needs_no_package():
    """Without data parallelism experts exchange no tokens."""
    flags = {"all2all-backend": "deepep_v2"}
    assert said(stages(2, 8, tensor=16, expert=True), flags=flags, lock="vllm==0.33.0") == ()


@each_row(
    ("backend", "rdma", "domains", "sentence"),
    [
        (None, [0], {}, "m-0: the experts are on 2 nodes, but gpu-02 has no RDMA. So every layer"),
        (None, [], {}, "gpu-01, gpu-02 have no RDMA"),
        (None, [], {0: RACK, 1: RACK}, None),
        ("deepep_low_latency", [0], {}, "needs RDMA between these nodes, but gpu-02 has no RDMA"),
        ("pplx", [0], {}, "gpu-02 has no RDMA. So every layer"),
        ("flashinfer_nvlink_two_sided", True, {}, "needs NVLink between all these nodes"),
        ("flashinfer_nvlink_two_sided", True, {0: RACK, 1: RACK}, None),
        (
            "flashinfer_nvlink_two_sided",
            True,
            {0: RACK, 1: RACK._replace(clique=1)},
            "needs NVLink between all these nodes",
        ),
    ],
)
def test_over_what_experts_talk_is_said_where_it_is_slow_or_not_there(
    backend, rdma, domains, sentence
):
    flags = {"all2all-backend": backend} if backend else {}
    found = said(experts(), flags=flags, rdma=rdma, domains=domains)
    if sentence is None:
        assert found == ()
    else:
        assert sentence in found[-1]


@pytest.mark.parametrize(("has_experts", "remarked"), [(True, 1), (False, 0), (None, 0)])
def test_experts_that_are_divided_over_engines_talk_as_much(has_experts, remarked):
    engines = stages(2, 8, data=16)
    assert len(said(engines, rdma=[], has_experts=has_experts)) == remarked


@pytest.mark.parametrize(("size", "crosses"), [(8, False), (4, False), (16, True), (1, False)])
def test_a_context_that_lies_on_several_nodes_is_said_to(size, crosses):
    flags = {"decode-context-parallel-size": size}
    found = said(stages(2, 8, tensor=16), flags=flags)
    assert bool(found) is crosses
    if crosses:
        assert "write 8 or less to keep each context on one node" in found[0]


# What runs keeps its ports


def test_a_replica_that_runs_keeps_its_ports_when_one_comes_whose_name_is_before_its_own():
    """Both would begin at 29500; another port would be a restart."""
    asked = {
        "model": "/srv/m",
        "span_nodes": True,
        "tensor_parallel": 4,
        "pipeline_parallel": 3,
        "context": 8192,
    }
    machines = {f"n{n}": machine("h100x8", n, {"/srv/m": "Qwen--Qwen3-32B"}) for n in (1, 2, 3)}
    settings = {
        "vllm": {"version": "0.33.0", "lock": "none", "listen": "127.0.0.1"},
        "serving": {"z": asked},
    }
    here = NodeSettings.model_validate(settings)
    first = planned(machines, dict.fromkeys(machines, settings)).plan
    for stage in first.stages:
        machines[stage.node]["stages"] = [
            {
                "unit": stage.unit,
                "model": "z",
                "replica": 0,
                "rank": stage.node_rank,
                "port": stage.port,
                "gpus": list(stage.gpu_uuids),
                "side_channel": 0,
                "release": "0.33.0-x",
                "arguments": unit.argument_lines(
                    stage, here.serving["z"], here.vllm, release="0.33.0-x"
                ),
            }
        ]

    settings["serving"]["a"] = asked
    found = planned(machines, dict.fromkeys(machines, settings))

    assert {stage.id: stage.group.cluster_port for stage in found.plan.stages} == {
        "z-0": 29500,
        "a-0": 29516,
    }
    assert found.restarts == {}
