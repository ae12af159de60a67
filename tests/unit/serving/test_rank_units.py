"""Units of replicas that span nodes: what systemd starts on each, and what the parser is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.node.cluster_network import Network
from gpufleet.planning.multinode import launch
from gpufleet.planning.stage import Group, Stage
from gpufleet.serving import flag_check
from gpufleet.serving.credentials import unit_credentials
from gpufleet.serving.unit import argument_lines, render_unit
from gpufleet.settings.serving_settings import Served, Vllm

NETWORKS = (
    ("gpu-01", Network(interface="eth1", address="10.1.0.1", hcas=("mlx5_0:1",))),
    ("gpu-02", Network(interface="eth2", address="10.1.0.2", hcas=("mlx5_3:1",))),
)
HEAD = Stage(
    model="llama",
    replica=0,
    node="gpu-01",
    gpus=tuple(range(8)),
    gpu_uuids=tuple(f"GPU-a{n}" for n in range(8)),
    port=8000,
    tensor_parallel=8,
    pipeline_parallel=2,
    nodes=("gpu-01", "gpu-02"),
    group=Group(networks=NETWORKS, cluster_port=29500),
)
WORKER = replace(HEAD, node="gpu-02", node_rank=1)
VLLM = Vllm.model_validate(
    {
        "version": "0.33.0",
        "lock": "locks/vllm.txt",
        "api_key_file": "secrets/api-key",
        "cluster_key_file": "secrets/cluster-key",
    }
)
SERVED = Served(model="/srv/llama", span_nodes=True, flags={"seed": 1})
KEYS = {"api-key": "7d" * 32, "cluster-key": "1c" * 32}


def rendered(stage: Stage) -> str:
    return render_unit(stage, SERVED, VLLM, release="0.33.0-1a2b3c4d5e", credentials=KEYS).content


@pytest.mark.parametrize(("stage", "rank"), [(HEAD, 0), (WORKER, 1)])
def test_each_node_starts_the_ranks_program_with_its_own_rank_and_network(stage, rank):
    unit = rendered(stage)
    assert "/usr/local/libexec/gpufleet/vllm-rank \\\n" in unit
    assert f"    --rank {rank} \\\n" in unit
    assert "    --node gpu-01=10.1.0.1 \\\n    --node gpu-02=10.1.0.2 \\\n" in unit
    assert "--nnodes 2" in unit
    assert f"--node-rank {rank}" in unit
    assert ("--headless" in unit) is bool(rank)
    own = dict(NETWORKS)[stage.node]
    assert f"Environment=VLLM_HOST_IP={own.address}\n" in unit
    assert f"Environment=NCCL_SOCKET_IFNAME=={own.interface}\n" in unit
    assert "LoadCredential=cluster-key:/etc/vllm/credentials/cluster-key\n" in unit
    assert "WatchdogSec=" in unit


def test_a_replica_on_one_node_knows_nothing_of_ranks():
    alone = replace(HEAD, pipeline_parallel=1, nodes=(), group=None)
    unit = render_unit(
        alone, SERVED, VLLM, release="0.33.0-1a2b3c4d5e", credentials={"api-key": "7d" * 32}
    ).content
    for word in ("vllm-rank", "nnodes", "WatchdogSec", "cluster-key"):
        assert word not in unit


def test_a_rank_that_was_short_of_memory_is_killed_and_not_stopped():
    """A stop is somebody's wish: the group would drain first, and start again without a pause."""
    assert "OOMPolicy=kill\n" in rendered(WORKER)
    assert "OOMPolicy=stop" not in rendered(WORKER)


def test_a_rank_without_a_driver_keeps_out_of_its_group_and_looks_again():
    """systemd starts nothing by itself that failed an assertion, also when the driver is back."""
    unit = rendered(WORKER)
    assert "AssertPathExists=" not in unit
    assert "ExecStartPre=/bin/sh -c 'test -e /dev/nvidiactl || {" in unit
    assert unit.index("ExecStartPre=") < unit.index("ExecStart=/")


def test_the_parser_is_asked_for_the_flags_of_each_rank_with_ports_that_are_numbers():
    for stage in (HEAD, WORKER):
        begun = flag_check.launch_command(stage, SERVED, VLLM, release="x")
        assert len(begun.argv) == len(begun.keys)
        assert "{" not in " ".join(begun.argv)
        assert ("--headless" in begun.argv) is bool(stage.node_rank)


def test_another_network_or_program_restarts_the_stage():
    other = replace(
        HEAD,
        group=replace(HEAD.group, networks=(NETWORKS[0], ("gpu-02", Network("eth2", "10.1.0.9")))),
    )
    assert rendered(other) != rendered(HEAD)


def fingerprint(stage, model=SERVED, vllm=VLLM):
    line = argument_lines(stage, model, vllm, release="0.33.0-1a2b3c4d5e")
    return next(each for each in line if each.startswith("--same fingerprint="))


def test_all_ranks_have_one_fingerprint_whatever_is_a_nodes_own():
    listens = VLLM.model_copy(update={"listen": "10.1.0.2"})
    uuids = tuple(f"GPU-b{n}" for n in range(8))
    assert fingerprint(replace(WORKER, gpu_uuids=uuids), vllm=listens) == fingerprint(HEAD)


@pytest.mark.parametrize(
    "change",
    [
        {"flags": {"seed": 2}},
        {"environment": {"NCCL_DEBUG": "INFO"}},
        {"data_parallel_balancing": "hybrid"},
    ],
)
def test_a_rank_that_a_deploy_has_not_reached_has_another_fingerprint(change):
    assert fingerprint(WORKER, SERVED.model_copy(update=change)) != fingerprint(HEAD)


def test_a_variable_of_the_nodes_own_may_differ():
    own = VLLM.model_copy(update={"environment": {"NCCL_IB_HCA": "=mlx5_7:1"}})
    assert fingerprint(WORKER, vllm=own) == fingerprint(HEAD)


def test_a_rank_without_a_server_is_given_no_api_key():
    """Nor restarted for another one: the head alone is, and the group forms anew once."""
    cluster = {"cluster-key": KEYS["cluster-key"]}
    assert unit_credentials(HEAD, SERVED) == ("api-key", "cluster-key")
    assert unit_credentials(WORKER, SERVED) == ("cluster-key",)

    unit = render_unit(WORKER, SERVED, VLLM, release="0.33.0-1a2b3c4d5e", credentials=cluster)
    assert "api-key" not in unit.content
    with pytest.raises(ValueError, match="API key"):
        render_unit(HEAD, SERVED, VLLM, release="0.33.0-1a2b3c4d5e", credentials=cluster)


def by_ray(stage: Stage) -> Stage:
    assert stage.group is not None
    return replace(stage, group=replace(stage.group, ray=(2, 60, 0)))


@pytest.mark.parametrize("stage", [HEAD, WORKER])
def test_rays_processes_have_a_token_and_a_unit_that_loads_it(stage):
    served = SERVED.model_copy(update={"distributed_executor_backend": "ray"})
    keys = {**KEYS, "ray-token": "3e" * 32}
    assert {*unit_credentials(by_ray(stage), served), "api-key"} == set(keys)
    unit = render_unit(
        by_ray(stage), served, VLLM, release="0.33.0-1a2b3c4d5e", credentials=keys
    ).content
    assert "LoadCredential=ray-token:/etc/vllm/credentials/ray-token\n" in unit
    assert "Environment=RAY_AUTH_MODE=token\n" in unit
    path = f"/run/credentials/{stage.unit}/ray-token"
    assert f"Environment=RAY_AUTH_TOKEN_PATH={path}\n" in unit


def test_another_token_restarts_rays_ranks_and_no_others():
    served = SERVED.model_copy(update={"distributed_executor_backend": "ray"})
    units_of = [
        render_unit(by_ray(HEAD), served, VLLM, release="x", credentials={**KEYS, **token})
        for token in ({"ray-token": "3e" * 32}, {"ray-token": "4f" * 32})
    ]
    assert units_of[0].fingerprint != units_of[1].fingerprint
    assert "ray-token" not in unit_credentials(HEAD, SERVED)


def test_the_token_does_not_tell_the_cluster_key():
    key = b"1c" * 32
    assert launch.ray_token(key) == launch.ray_token(key)
    assert launch.ray_token(key) != launch.ray_token(b"2d" * 32)
    assert key not in launch.ray_token(key)
    # Ray trims what is around it and asks for 32 characters in what it makes itself.
    assert len(launch.ray_token(key)) >= 32
    assert launch.ray_token(key).isalnum()
