"""Compute the environment variables of a stage's SGLang process. Pure."""

from __future__ import annotations

from gpufleet import node_paths
from gpufleet.artifacts.release import RELEASES
from gpufleet.engines import operator_values
from gpufleet.engines.sglang import sglang_rank
from gpufleet.planning.stage import Stage
from gpufleet.settings.serving_settings import EngineSettings, Served


def environment(
    stage: Stage, model: Served, sglang: EngineSettings, release: str, toolkit: str | None = None
) -> dict[str, str]:
    """
    Return the variables of the stage's process, by name.

    Variables in `sglang.environment` override built-in variables, and the model's `environment`
    overrides both. Raises `FleetError` with every invalid name, and every value that systemd cannot
    express.
    """
    own = operator_values.variables(stage, model, sglang)
    folder = f"{RELEASES}/{release}"
    built_in = _directories(stage) | offline_variables(model)
    if sglang.device == "cpu":
        built_in |= operator_values.search_path(folder, None) | {
            "SGLANG_USE_CPU_ENGINE": "1",
            # One thread for each rank, because ranks of the lab share cores.
            "OMP_NUM_THREADS": "1",
            # Ranks on one NUMA node need one entry for each rank. Otherwise SGLang fails with an
            # AssertionError.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" for _ in stage.gpus),
            # Otherwise tensor parallelism compiles a kernel with g++ for minutes.
            "TORCHDYNAMO_DISABLE": "1",
        }
    else:
        built_in |= operator_values.search_path(folder, toolkit)
        # GPUs are numbered in NVML's order. sglang_serve.py replaces UUIDs with numbers, because
        # SGLang reads only numbers (srt/distributed/device_communicators/custom_all_reduce_utils.py
        # of 0.5.23).
        built_in |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(stage.gpu_uuids),
        }
    if stage.group:
        built_in |= sglang_rank.rank(stage, model, sglang).variables
    return dict(sorted((built_in | own).items()))


def _directories(stage: Stage) -> dict[str, str]:
    """Return the stage's own home and cache directories."""
    state, cache = f"{node_paths.VLLM_STATE}/{stage.id}", f"{node_paths.VLLM_CACHE}/{stage.id}"
    return {
        "HOME": state,
        "HF_HOME": f"{state}/huggingface",
        "XDG_CACHE_HOME": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{cache}/flashinfer",
        "CUDA_CACHE_PATH": f"{cache}/cuda",
    }


def offline_variables(_: Served) -> dict[str, str]:
    """Return the variables that are the same for all ranks of a model, whatever their GPUs."""
    # Files are downloaded before the start, because the start must not depend on the Hub.
    return {"HF_HUB_OFFLINE": "1"}
