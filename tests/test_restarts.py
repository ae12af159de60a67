"""What a plan would restart is told by the units that lie on nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet import units
from gpufleet.planner import Running, Stage
from gpufleet.presets import LayeredFlag
from gpufleet.restarts import restarts
from gpufleet.settings import NodeSettings

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
    lines = units.argument_lines(stage, here.serving["llama"], here.vllm)
    return Running("llama", 0, "gpu-01", stage.gpu_uuids, 8000, 0, f"{version}-1a2b", tuple(lines))


@pytest.mark.parametrize(
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
    assert restarts([stage], [running], {"gpu-01": wanted}) == says


def test_a_stage_that_is_new_here_or_says_nothing_of_itself_restarts_for_no_flag():
    assert restarts([STAGE], [], {"gpu-01": settings()}) == {}
    silent = replace(started(), arguments=())
    assert restarts([STAGE], [silent], {"gpu-01": settings(seed=1)}) == {}
