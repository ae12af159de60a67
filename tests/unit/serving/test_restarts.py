"""What a plan would restart is told by the units that lie on nodes."""

from __future__ import annotations

from dataclasses import replace

from gpufleet.node.cluster_network import Network
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.planning.stage import Group, Running, Stage
from gpufleet.serving import unit
from gpufleet.serving.restarts import find_restarts
from gpufleet.settings.node_settings import NodeSettings
from tests.support.rows import each_row

STAGE = Stage(
    model="llama",
    replica=0,
    node="gpu-01",
    gpus=(0,),
    gpu_uuids=("GPU-5f1c",),
    port=8000,
    tensor_parallel=1,
)


def settings(version="0.32.0", **flags):
    return NodeSettings.model_validate(
        {
            "vllm": {"version": version, "lock": "locks/vllm.txt", "listen": "127.0.0.1"},
            "serving": {"llama": {"model": "/srv/llama", "flags": flags}},
        }
    )


def started(stage=STAGE, version="0.32.0", **flags):
    here = settings(version, **flags)
    lines = unit.argument_lines(stage, here.serving["llama"], here.vllm)
    return Running("llama", 0, "gpu-01", stage.gpu_uuids, 8000, 0, f"{version}-1a2b", tuple(lines))


@each_row(
    ("running", "wanted", "stage", "says"),
    [
        (started(seed=1), settings(seed=1), STAGE, {}),
        (started(), settings(seed=1), STAGE, {"llama-0": "+ --seed 1"}),
        (started(seed=1), settings(), STAGE, {"llama-0": "- --seed 1"}),
        (started(seed=1), settings(seed=2), STAGE, {"llama-0": "- --seed 1, + --seed 2"}),
        (started(version="0.31.0"), settings(), STAGE, {"llama-0": "vLLM 0.31.0 -> 0.32.0"}),
        (
            started(),
            settings(),
            replace(STAGE, flags=(LayeredFlag("seed", 3, "preset chat"),)),
            {"llama-0": "+ --seed 3"},
        ),
    ],
)
def test_a_stage_restarts_for_what_its_unit_lacks_or_has_too_much(running, wanted, stage, says):
    assert find_restarts([stage], [running], {"gpu-01": wanted}) == says


def test_a_stage_that_is_new_here_or_says_nothing_of_itself_restarts_for_no_flag():
    assert find_restarts([STAGE], [], {"gpu-01": settings()}) == {}
    silent = replace(started(), arguments=())
    assert find_restarts([STAGE], [silent], {"gpu-01": settings(seed=1)}) == {}


NETWORKS = (("gpu-01", Network("eth1", "10.1.0.1")), ("gpu-02", Network("eth1", "10.1.0.2")))
HEAD = replace(
    STAGE,
    pipeline_parallel=2,
    nodes=("gpu-01", "gpu-02"),
    group=Group(networks=NETWORKS, cluster_port=29500),
)
RANKS = (HEAD, replace(HEAD, node="gpu-02", node_rank=1))


def units_of(here, release="0.32.0-1a2b"):
    return [
        Running(
            stage.model,
            stage.replica,
            stage.node,
            stage.gpu_uuids,
            8000,
            stage.node_rank,
            release,
            tuple(unit.argument_lines(stage, here.serving["llama"], here.vllm, release=release)),
        )
        for stage in RANKS
    ]


def both(here):
    return dict.fromkeys(("gpu-01", "gpu-02"), here)


def test_the_ranks_of_a_replica_restart_for_what_differs_on_any_of_them_said_once():
    """Their units name the release, which is no difference by itself."""
    assert find_restarts(RANKS, units_of(settings()), both(settings())) == {}

    found = find_restarts(RANKS, units_of(settings(seed=1)), both(settings(seed=2)))
    assert found == {"llama-0": "- --seed 1, + --seed 2"}

    older = units_of(settings("0.31.0"), release="0.31.0-1a2b")
    assert find_restarts(RANKS, older, both(settings())) == {"llama-0": "vLLM 0.31.0 -> 0.32.0"}
