"""Compute the environment variables of a stage's process.  Pure."""

from __future__ import annotations

from gpufleet import node_paths
from gpufleet.artifacts.release import RELEASES
from gpufleet.engines import operator_values
from gpufleet.planning.multinode import launch
from gpufleet.planning.stage import Stage
from gpufleet.settings.serving_settings import EngineSettings, Served
from gpufleet.versions import numbers

# Older releases read each entry of CUDA_VISIBLE_DEVICES as a number. With a UUID, they fail while
# they inspect the model (vllm/platforms/interface.py of 0.23.0 and 0.24.0).
_UUIDS_SINCE = (0, 24)


def rank(stage: Stage, model: Served, vllm: EngineSettings) -> launch.Rank:
    """
    Return the additional launch arguments of a stage of a multi-node replica.

    Raises `FleetError` for settings that the release or the model does not support.
    """
    if stage.group is None:
        raise ValueError(f"{stage.id} is on one node")
    return launch.rank_launch(
        stage,
        model,
        dict(stage.group.networks),
        vllm=numbers(vllm.version),
        device=vllm.device,
        ray=stage.group.ray,
        experts=stage.group.experts,
        side_channel_port=stage.group.side_channel_port or launch.NIXL_PORT,
    )


def environment(
    stage: Stage, model: Served, vllm: EngineSettings, release: str, toolkit: str | None = None
) -> dict[str, str]:
    """
    Return the variables of the stage's process, by name.

    Variables in `vllm.environment` override built-in variables, and the model's `environment`
    overrides both. On the Python path, the folder of gpufleet's middleware comes before the
    operator's folders, so that a module of the operator cannot replace the middleware.

    Raises `FleetError` with every invalid name, every name that the plan sets, and every value that
    systemd cannot express.
    """
    own = operator_values.variables(stage, model, vllm)
    built_in = (
        _directories(stage) | offline_variables(model) | _device(stage, vllm, release, toolkit)
    )
    if stage.group:
        built_in |= rank(stage, model, vllm).variables
    if stage.handover:
        network = dict(stage.handover.networks)[stage.node]
        built_in |= launch.transfer_variables(stage, model, network, port=stage.handover.port)
    found = built_in | own
    if vllm.api_key_file is not None:
        found["PYTHONPATH"] = ":".join(filter(None, (node_paths.GUARD, found.get("PYTHONPATH"))))
    return dict(sorted(found.items()))


def _directories(stage: Stage) -> dict[str, str]:
    """
    Return the stage's own home and cache directories.

    If stages shared directories, they would disturb each other, and files of removed stages would
    remain.
    """
    state, cache_directory = (
        f"{node_paths.VLLM_STATE}/{stage.id}",
        f"{node_paths.VLLM_CACHE}/{stage.id}",
    )
    return {
        "HOME": state,
        "HF_HOME": f"{state}/huggingface",
        "VLLM_CONFIG_ROOT": f"{state}/config",
        "XDG_CACHE_HOME": cache_directory,
        "VLLM_CACHE_ROOT": f"{cache_directory}/vllm",
        "TRITON_CACHE_DIR": f"{cache_directory}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache_directory}/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{cache_directory}/flashinfer",
        "CUDA_CACHE_PATH": f"{cache_directory}/cuda",
        "VLLM_RPC_BASE_PATH": f"{node_paths.VLLM_RUN}/{stage.id}",
    }


def offline_variables(model: Served) -> dict[str, str]:
    """Return the variables that are the same for all ranks of a model, whatever their GPUs."""
    return {
        # Files are downloaded before the start, because the start must not depend on the Hub.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Without this variable, vLLM's time limit for the start of its engine is 600 s, whatever
        # `start_seconds` is.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(model.start_seconds),
    }


def _device(
    stage: Stage, vllm: EngineSettings, release: str, toolkit: str | None
) -> dict[str, str]:
    folder = f"{RELEASES}/{release}"
    if vllm.device == "cpu":
        # Without `nobind`, several ranks on one NUMA node fail. Each rank has one thread, because
        # ranks share cores.
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        return operator_values.search_path(folder, None) | threads
    return operator_values.search_path(folder, toolkit) | {
        # NVML's order of GPUs. CUDA's own order is by speed, so an index would select a different
        # GPU.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(_visible(stage, vllm)),
    }


def _visible(stage: Stage, vllm: EngineSettings) -> tuple[str, ...]:
    """
    Return the GPUs' UUIDs if vLLM accepts UUIDs, or else their indexes.

    If a GPU is missing after a reboot, an index may select a different GPU. A UUID never does.
    """
    major, minor, *_ = vllm.version.split(".")
    if (int(major), int(minor)) >= _UUIDS_SINCE:
        return stage.gpu_uuids
    return tuple(map(str, stage.gpus))
