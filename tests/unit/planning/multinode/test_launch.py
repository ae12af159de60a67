"""
What each node's process of a replica is started with, and that every release takes it.

Stages are made up here, of every shape; tests/unit/planning/multinode/test_documented_examples.py
has those of real plans.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.engines.vllm import launch_arguments
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.flags.check import check
from gpufleet.node.cluster_network import Network
from gpufleet.on_node.rank.rank import arguments
from gpufleet.planning.multinode.launch import (
    command,
    endpoint_ports,
    fill_ports,
    rank_launch,
    transfer_variables,
)
from gpufleet.planning.stage import Stage
from gpufleet.settings import engine_flags
from gpufleet.settings.serving_settings import OLDEST_VLLM, Served, Vllm
from tests.support.rows import each_row

SUPPORTED = [one for one in schema.versions() if schema.sort_key(one) >= OLDEST_VLLM]
NEWEST = SUPPORTED[-1]
RAY = (2, 60, 0)
HCAS = tuple(f"mlx5_{number}:1" for number in range(8))


def vllm(version=NEWEST):
    return Vllm(version=version, lock="locks/vllm.txt", api_key_file="secrets/api-key")


def served(**changes):
    settings = {"model": "/srv/models/m", "span_nodes": True}
    return Served.model_validate(settings | changes)


def stages(
    nodes, gpus, tensor=1, pipeline=1, data=1, *, expert=False, name="m", port=8000, first=1
):
    """The stages of one replica on `nodes` nodes of `gpus` GPUs each."""
    names = tuple(f"gpu-{number:02}" for number in range(first, first + nodes))
    return [
        Stage(
            model=name,
            replica=0,
            node=node,
            gpus=tuple(range(gpus)),
            gpu_uuids=tuple(f"GPU-{rank:02}{index:02}" for index in range(gpus)),
            port=port,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=data,
            expert_parallel=expert,
            node_rank=rank,
            nodes=names,
        )
        for rank, node in enumerate(names)
    ]


def networks(replica, *, interface="eth1", hcas=()):
    return {
        stage.node: Network(interface, f"10.1.0.{int(stage.node[-2:])}", hcas) for stage in replica
    }


def arranged(replica, model, *, version=NEWEST, hcas=(), **more):
    found = networks(replica, hcas=hcas)
    return [
        rank_launch(stage, model, found, vllm=schema.sort_key(version)[:3], **more)
        for stage in replica
    ]


RELEASE = "/opt/vllm/releases/0.33.0-1f2e3d4c5b"


def started(stage, model, rank, version=NEWEST, *, hcas=()):
    """The lines that the rank's program is started with."""
    replica = [replace(stage, node=node, node_rank=n) for n, node in enumerate(stage.nodes)]
    return command(
        stage,
        model,
        rank,
        networks(replica, hcas=hcas),
        port=model.cluster_port,
        same={"release": "0.33.0-1f2e3d4c5b", "model": "9d1f62ac"},
        programs=f"{RELEASE}/bin",
        server=(f"{RELEASE}/bin/vllm", "serve"),
        serve=[line for _, line in launch_arguments.lines(stage, model, vllm(version))],
    )


def programs(stage, model, rank, version=NEWEST):
    """What the rank's own parser makes of them, with the first incarnation's ports."""
    line = [word for line in started(stage, model, rank, version) for word in line]
    options, found = arguments(line)
    assert (options.replica, options.rank) == (stage.id, stage.node_rank)
    assert [node.name for node in options.node] == list(stage.nodes)
    return [[fill_ports(word, options.port) for word in each] for each in found]


def command_line(stage, model, rank, version=NEWEST):
    """Every word behind `vllm serve`, with the first incarnation's ports."""
    serving = programs(stage, model, rank, version)[-1]
    return serving[serving.index("serve") + 1 :]


# The examples

DEEPSEEK = {
    "all2all-backend": "deepep_low_latency",
    "enable-eplb": True,
    "eplb-config": {"num_redundant_experts": 32},
}
EXAMPLES = {
    "Two nodes of eight H100, native": (
        stages(2, 8, tensor=8, pipeline=2, name="llama-405b"),
        served(tensor_parallel=8, pipeline_parallel=2),
        HCAS,
    ),
    "Two nodes of eight H100, Ray": (
        stages(2, 8, tensor=8, pipeline=2, name="llama-405b"),
        served(tensor_parallel=8, pipeline_parallel=2, distributed_executor_backend="ray"),
        HCAS,
    ),
    "Four nodes of eight H200, one server per node": (
        stages(4, 8, data=32, expert=True, name="deepseek"),
        served(
            data_parallel=32,
            expert_parallel=True,
            data_parallel_balancing="hybrid",
            flags=DEEPSEEK,
        ),
        HCAS,
    ),
    "Four nodes of eight H200, one server": (
        stages(4, 8, data=32, expert=True, name="deepseek"),
        served(data_parallel=32, expert_parallel=True, flags=DEEPSEEK),
        HCAS,
    ),
    "An NVL72 rack": (
        stages(18, 4, data=72, expert=True, name="deepseek"),
        served(
            data_parallel=72,
            expert_parallel=True,
            data_parallel_balancing="hybrid",
            flags={**DEEPSEEK, "all2all-backend": "flashinfer_nvlink_two_sided"},
        ),
        HCAS[:4],
    ),
    "Prefill for other nodes' decode": (
        stages(2, 8, data=16, expert=True, name="deepseek-prefill"),
        served(
            data_parallel=16,
            expert_parallel=True,
            flags={
                "all2all-backend": "deepep_high_throughput",
                "kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
            },
        ),
        HCAS,
    ),
    "Decode of what other nodes prefilled": (
        stages(2, 8, data=16, expert=True, name="deepseek-decode", first=3),
        served(
            data_parallel=16,
            expert_parallel=True,
            flags={
                "all2all-backend": "deepep_low_latency",
                "kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"},
            },
        ),
        HCAS,
    ),
}
OTHER_SHAPES = {
    "TP over nodes": (stages(2, 1, tensor=2), served(tensor_parallel=2), ()),
    "PP over nodes": (stages(2, 1, pipeline=2), served(pipeline_parallel=2), ()),
    "DP over nodes": (stages(2, 1, data=2), served(data_parallel=2), ()),
    "decode context": (
        stages(2, 8, tensor=16),
        served(tensor_parallel=16, flags={"decode-context-parallel-size": 8}),
        HCAS,
    ),
    "engines larger than a node": (
        stages(4, 8, tensor=8, pipeline=2, data=2, expert=True),
        served(tensor_parallel=8, pipeline_parallel=2, data_parallel=2),
        HCAS,
    ),
    "engines larger than a node, each with a server": (
        stages(4, 8, tensor=8, pipeline=2, data=2, expert=True),
        served(
            tensor_parallel=8,
            pipeline_parallel=2,
            data_parallel=2,
            data_parallel_balancing="external",
        ),
        HCAS,
    ),
    "one engine a node, each with a server": (
        stages(2, 8, tensor=8, data=2, expert=True),
        served(tensor_parallel=8, data_parallel=2, data_parallel_balancing="external"),
        HCAS,
    ),
    "Ray with engines on each node": (
        stages(2, 8, tensor=4, data=4, expert=True),
        served(tensor_parallel=4, data_parallel=4, distributed_executor_backend="ray"),
        HCAS,
    ),
}
ALL = EXAMPLES | OTHER_SHAPES


@each_row("version", SUPPORTED)
@each_row("name", ALL)
def test_every_release_takes_the_command_line_of_every_rank(name, version):
    replica, model, hcas = ALL[name]
    known = schema.load(version)

    # A replica's ranks differ by numbers alone, but for the first and the last.
    for stage in (replica[0], replica[-1]):
        rank = arranged(replica, model, version=version, hcas=hcas, ray=RAY)[stage.node_rank]
        if not rank.serves:
            continue
        line = command_line(stage, model, rank, version)
        problems = check(known, line, rank.variables)

        assert [str(each) for each in problems if each.refuses] == []


@each_row("version", [each for each in SUPPORTED if schema.sort_key(each) >= (0, 22)])
def test_one_process_with_a_server_an_engine_is_taken_where_it_exists(version):
    replica = stages(2, 8, data=16, expert=True)
    model = served(data_parallel=16, data_parallel_balancing="external")

    for stage, rank in zip(replica, arranged(replica, model, version=version), strict=True):
        problems = check(schema.load(version), command_line(stage, model, rank, version))

        assert [each for each in problems if each.refuses] == []
        assert rank.flags["data-parallel-supervisor-port"] == 8008
        assert rank.endpoints == tuple(range(8000, 8009))


# Who is who


def test_the_head_of_a_pipeline_serves_and_the_others_have_no_server():
    replica, model, hcas = EXAMPLES["Two nodes of eight H100, native"]

    head, worker = arranged(replica, model, hcas=hcas)

    assert head.flags == {
        "distributed-executor-backend": "mp",
        "nnodes": 2,
        "node-rank": 0,
        "master-addr": "10.1.0.1",
        "master-port": "{master_port}",
    }
    assert worker.flags == head.flags | {"node-rank": 1, "headless": True}
    assert (head.endpoints, worker.endpoints) == ((8000,), ())
    assert (head.ready_port, worker.ready_port) == ("{master_port}", "")
    assert (head.ray, head.unset) == ((), ())


def test_each_node_gets_its_own_address_and_interfaces_by_their_whole_names():
    replica = stages(2, 8, tensor=16)
    found = {
        "gpu-01": Network("eth1", "10.1.0.1", ("mlx5_1:1", "mlx5_10:1")),
        "gpu-02": Network("enp9s0", "10.1.0.2", ("mlx5_0:1",)),
    }

    one, other = (rank_launch(each, served(), found, vllm=(0, 33, 0)) for each in replica)

    assert one.variables == {
        "VLLM_HOST_IP": "10.1.0.1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_IB_HCA": "=mlx5_1:1,mlx5_10:1",
    }
    assert other.variables["NCCL_SOCKET_IFNAME"] == "=enp9s0"
    assert other.variables["NCCL_IB_HCA"] == "=mlx5_0:1"


def test_nccl_leaves_rdma_alone_on_all_nodes_if_one_has_none():
    replica = stages(2, 8, tensor=16)
    found = {
        each.node: Network("eth1", f"10.1.0.{each.node_rank}", no_rdma=True) for each in replica
    }

    rank = rank_launch(replica[0], served(), found, vllm=(0, 33, 0))

    assert rank.variables["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_HCA" not in rank.variables


def test_a_cpu_needs_no_nccl():
    replica, model, _ = OTHER_SHAPES["TP over nodes"]

    rank = arranged(replica, model, device="cpu", hcas=HCAS)[0]

    assert rank.variables == {"VLLM_HOST_IP": "10.1.0.1", "GLOO_SOCKET_IFNAME": "eth1"}


def test_behind_one_server_the_others_start_where_the_one_before_ended():
    replica, model, _ = EXAMPLES["Four nodes of eight H200, one server"]

    ranks = arranged(replica, model)

    assert [each.flags.get("data-parallel-start-rank") for each in ranks] == [None, 8, 16, 24]
    assert [each.flags.get("headless", False) for each in ranks] == [False, True, True, True]
    assert {each.flags["data-parallel-address"] for each in ranks} == {"10.1.0.1"}
    assert [each.ready_port for each in ranks] == ["{rpc_port}", "", "", ""]


def test_with_a_server_a_node_every_node_says_that_and_where_it_starts():
    replica, model, _ = EXAMPLES["Four nodes of eight H200, one server per node"]

    ranks = arranged(replica, model)

    assert [each.flags["data-parallel-start-rank"] for each in ranks] == [0, 8, 16, 24]
    assert all(each.flags["data-parallel-hybrid-lb"] is True for each in ranks)
    assert not any("headless" in each.flags for each in ranks)
    assert [each.endpoints for each in ranks] == [(8000,)] * 4


@pytest.mark.parametrize("balancing", ["hybrid", "external"])
def test_with_one_engine_a_node_both_are_a_server_an_engine(balancing):
    replica = stages(2, 8, tensor=8, data=2, expert=True)

    ranks = arranged(replica, served(data_parallel_balancing=balancing))

    assert [each.flags["data-parallel-rank"] for each in ranks] == [0, 1]
    assert not any("data-parallel-size-local" in each.flags for each in ranks)


def test_engines_larger_than_a_node_have_their_server_on_their_first_node():
    replica, model, _ = OTHER_SHAPES["engines larger than a node, each with a server"]

    ranks = arranged(replica, model)

    assert [each.endpoints for each in ranks] == [(8000,), (), (8000,), ()]
    assert [each.flags.get("headless", False) for each in ranks] == [False, True, False, True]
    assert [each.flags["node-rank"] for each in ranks] == [0, 1, 2, 3]


def test_a_process_without_a_server_gets_no_number_of_servers():
    """vLLM refuses both together, and the operator wrote it for the head."""
    replica, _, _ = EXAMPLES["Four nodes of eight H200, one server"]
    model = served(data_parallel=32, flags={"api-server-count": 4})

    head, worker, *_ = arranged(replica, model)

    assert "--api-server-count" in command_line(replica[0], model, head)
    assert "--api-server-count" not in command_line(replica[1], model, worker)


shapes = st.tuples(
    st.integers(2, 6),  # nodes
    st.sampled_from([1, 2, 4, 8]),  # GPUs of each
    st.sampled_from(["internal", "hybrid"]),
    st.sampled_from([1, 2, 4, 8]),  # GPUs of an engine
)


@given(shapes)
def test_every_engine_is_on_exactly_one_node(shape):
    nodes, gpus, balancing, engine = shape
    if engine > gpus:
        return
    engines = nodes * gpus // engine
    replica = stages(nodes, gpus, tensor=engine, data=engines)

    found = []
    for rank in arranged(replica, served(data_parallel_balancing=balancing)):
        first = rank.flags.get("data-parallel-start-rank", rank.flags.get("data-parallel-rank", 0))
        found += range(first, first + rank.flags.get("data-parallel-size-local", 1))

    assert found == list(range(engines))


@each_row("name", ALL)
def test_what_listens_is_known_without_the_networks_too(name):
    replica, model, hcas = ALL[name]

    for stage, rank in zip(replica, arranged(replica, model, hcas=hcas, ray=RAY), strict=True):
        assert rank.endpoints == endpoint_ports(stage, model)


# Ray


def test_ray_runs_on_every_node_and_the_server_on_the_first():
    replica, model, hcas = EXAMPLES["Two nodes of eight H100, Ray"]

    head, worker = arranged(replica, model, hcas=hcas, ray=RAY)

    assert head.flags == {"distributed-executor-backend": "ray"}
    assert (head.serves, worker.serves) == (True, False)
    assert head.ray[:5] == ("ray", "start", "--head", "--port", "{master_port}")
    assert worker.ray[:4] == ("ray", "start", "--address", "10.1.0.1:{master_port}")
    assert worker.ray[4:6] == ("--node-manager-port", worker.ready_port)
    assert head.variables["RAY_ADDRESS"] == "10.1.0.1:{master_port}"
    for rank, address in ((head, "10.1.0.1"), (worker, "10.1.0.2")):
        assert rank.ray[rank.ray.index("--node-ip-address") + 1] == address
        assert rank.ray[rank.ray.index("--num-gpus") + 1] == "8"
        assert rank.ray[-1] == "--block"


def test_what_only_the_head_of_ray_may_be_told_the_workers_are_not():
    """`ray start` without --head ends with these."""
    replica, model, _ = EXAMPLES["Two nodes of eight H100, Ray"]

    head, worker = arranged(replica, model, ray=RAY)

    for option in ("--port", "--include-dashboard"):
        assert option in head.ray
        assert option not in worker.ray


def test_a_nodes_own_interfaces_are_not_copied_to_the_others_by_ray():
    replica, model, hcas = EXAMPLES["Two nodes of eight H100, Ray"]

    head, worker = arranged(replica, model, hcas=hcas, ray=RAY)

    assert head.unset == ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME")
    assert worker.variables["NCCL_SOCKET_IFNAME"] == "=eth1"


@pytest.mark.parametrize(("version", "copied"), [("0.21.0", True), ("0.22.0", False)])
def test_engines_that_are_actors_on_other_nodes_do_not_get_the_heads_address(version, copied):
    """Until 0.21 they would be told that they are on the head's node, and wait for it there."""
    engines, model, _ = OTHER_SHAPES["Ray with engines on each node"]
    one = EXAMPLES["Two nodes of eight H100, Ray"]

    head, _ = arranged(engines, model, version=version, ray=RAY)

    assert ("VLLM_HOST_IP" in head.unset) is copied
    assert head.variables["VLLM_HOST_IP"] == "10.1.0.1"  # for Ray itself, and so for its actors
    # The one engine of a pipeline is the server's own process.
    assert "VLLM_HOST_IP" not in arranged(one[0], one[1], version=version, ray=RAY)[0].unset


@pytest.mark.parametrize(("release", "token"), [((2, 51, 1), False), ((2, 52, 0), True)])
def test_ray_asks_for_a_token_where_it_can(release, token):
    replica, model, _ = EXAMPLES["Two nodes of eight H100, Ray"]

    for rank in arranged(replica, model, ray=release):
        assert ("RAY_AUTH_MODE" in rank.variables) is token
        assert ("RAY_AUTH_TOKEN_PATH" in rank.variables) is token


def test_by_ray_one_server_starts_the_engines_of_all_nodes():
    replica, model, _ = OTHER_SHAPES["Ray with engines on each node"]

    head, worker = arranged(replica, model, ray=RAY)

    assert head.flags == {
        "distributed-executor-backend": "ray",
        "data-parallel-backend": "ray",
        "data-parallel-address": "10.1.0.1",
        "data-parallel-size-local": 2,
    }
    assert head.variables["VLLM_RAY_DP_PACK_STRATEGY"] == "strict"
    assert not worker.serves


# What cannot be


def refusal(replica, model, **more):
    with pytest.raises(FleetError) as caught:
        arranged(replica, model, **more)
    return str(caught.value)


@each_row(
    ("replica", "model", "more", "said"),
    [
        (
            stages(2, 8, tensor=16),
            served(distributed_executor_backend="ray"),
            {},
            "add `ray` to the lock",
        ),
        (
            stages(2, 8, data=16),
            served(distributed_executor_backend="ray", data_parallel_balancing="hybrid"),
            {"ray": RAY},
            "write `internal`",
        ),
        (
            stages(2, 8, tensor=8, data=2),
            served(data_parallel_balancing="external"),
            {"experts": False},
            "write `replicas: 2` and `data_parallel: 1`",
        ),
        (
            stages(2, 8, data=16),
            served(data_parallel_balancing="external"),
            {"version": "0.21.0"},
            "needs vLLM 0.22 or newer, but the release is 0.21.0: write `hybrid`",
        ),
        (
            stages(2, 8, data=16),
            served(data_parallel_balancing="external", flags={"api-server-count": 4}),
            {},
            "serving.m.flags.api-server-count: the value is 4, but with `data_parallel_balancing: ",
        ),
        (stages(3, 8, tensor=6, data=4), served(), {}, "a multiple of the other"),
        (
            stages(2, 8, tensor=16),
            served(flags={"distributed-executor-backend": "mp"}),
            {},
            "serving.m.flags.distributed-executor-backend: the plan sets this flag for a "
            "replica that spans nodes: set `distributed_executor_backend` beside `flags` instead",
        ),
        (
            stages(2, 8, data=16),
            served(flags={"data-parallel-start-rank": 8}),
            {},
            "serving.m.flags.data-parallel-start-rank: the plan sets this flag for a replica "
            "that spans nodes: remove the flag",
        ),
    ],
    ids=[
        "no ray",
        "ray and hybrid",
        "dense and external",
        "old and external",
        "servers and external",
        "uneven",
        "our backend",
        "our rank",
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(replica, model, more, said):
    assert said in refusal(replica, model, **more)


@each_row("name", ALL)
def test_a_flag_that_is_set_here_is_refused_from_an_operator(name):
    replica, model, hcas = ALL[name]
    ours = {flag for rank in arranged(replica, model, hcas=hcas, ray=RAY) for flag in rank.flags}

    for flag in ours - engine_flags.of("vllm").planned:  # the settings themselves refuse those
        written = model.model_copy(update={"flags": {**model.flags, flag: 1}})

        assert f".flags.{flag}:" in refusal(replica, written, ray=RAY)


# KV caches handed over


@pytest.mark.parametrize(
    "config",
    [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        '{"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}',
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}]},
        },
    ],
    ids=["nixl", "text", "among others"],
)
def test_nixl_is_told_the_address_and_devices_that_reach_the_other_side(config):
    (stage, _) = stages(2, 8, tensor=16)
    network = Network("eth1", "10.1.0.1", ("mlx5_0:1",))

    found = transfer_variables(
        stage, served(flags={"kv-transfer-config": config}), network, port=5700
    )

    assert found == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700",
        "UCX_NET_DEVICES": "mlx5_0:1,eth1",
    }


def test_nixl_has_no_rdma_where_nccl_has_none():
    (stage, _) = stages(2, 8, tensor=16)
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    network = Network("eth1", "10.1.0.1", ("mlx5_0:1",), no_rdma=True)

    found = transfer_variables(stage, served(flags={"kv-transfer-config": config}), network)

    assert found["UCX_NET_DEVICES"] == "eth1"


@pytest.mark.parametrize("config", [None, {"kv_connector": "OffloadingConnector"}])
def test_who_hands_nothing_over_needs_no_side_channel(config):
    (stage, _) = stages(2, 8, tensor=16)
    model = served(flags={"kv-transfer-config": config} if config else {})

    assert transfer_variables(stage, model, Network("eth1", "10.1.0.1")) == {}
