"""The variables of a stage's SGLang process.  Pure."""

from __future__ import annotations

from gpufleet import node_paths
from gpufleet.artifacts.release import RELEASES
from gpufleet.engines import operator_values
from gpufleet.planning.stage import Stage
from gpufleet.settings.serving_settings import EngineSettings, Served


def environment(
    stage: Stage, model: Served, sglang: EngineSettings, release: str, toolkit: str | None = None
) -> dict[str, str]:
    """
    Return the variables of the stage's process, by name.

    Precedence: built-in < `sglang.environment` < the model's `environment`. Raises `FleetError`
    with every invalid name, and every value that systemd cannot express.
    """
    own = operator_values.variables(stage, model, sglang)
    folder = f"{RELEASES}/{release}"
    built_in = _directories(stage) | offline_variables(model)
    if sglang.device == "cpu":
        # One thread each: ranks of the lab share cores.
        built_in |= operator_values.search_path(folder, None)
        built_in |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    else:
        built_in |= operator_values.search_path(folder, toolkit)
        # In NVML's order. sglang_serve.py replaces UUIDs by numbers, the only ones SGLang reads
        # (srt/distributed/device_communicators/custom_all_reduce_utils.py of 0.5.23).
        built_in |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(stage.gpu_uuids),
        }
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
    """Return the variables that all ranks of a model share, whatever their GPUs."""
    # Files are downloaded before the start, which must not depend on the Hub.
    return {"HF_HUB_OFFLINE": "1"}
