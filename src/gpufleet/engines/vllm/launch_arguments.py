"""The arguments of `vllm serve` for a stage of the plan.  Pure."""

from __future__ import annotations

from gpufleet.artifacts.model_files import model_directory
from gpufleet.engines.operator_values import argument_lines
from gpufleet.planning import adapter_flags, gpu_shares
from gpufleet.planning.flag_layers import KIND
from gpufleet.planning.multinode import disaggregation
from gpufleet.planning.stage import Stage, served_name
from gpufleet.settings.base import KeyPath
from gpufleet.settings.serving_settings import Argument, EngineSettings, Served

MIDDLEWARE = "gpufleet_guard.Guard"
"""The middleware's name for `--middleware`."""

# Layers of flags that are settings of an entry.
_SETTINGS = ("context", KIND, adapter_flags.LAYER, disaggregation.LAYER, gpu_shares.LAYER)


def lines(
    stage: Stage, model: Served, vllm: EngineSettings
) -> list[tuple[KeyPath, tuple[str, ...]]]:
    """
    Return the arguments in groups of one line each, a flag and its values.

    Each group has the path of the setting that it comes from: `("serving", "llama", "port")`.
    Raises `FleetError` for values that no process can receive.
    """
    own = ("serving", stage.model)
    planned: dict[KeyPath, tuple[str, Argument]] = {
        (*own, "served_name"): ("served-model-name", served_name(stage, model)),
        ("vllm", "listen"): ("host", vllm.listen),
        (*own, "port"): ("port", stage.port),
        (*own, "tensor_parallel"): ("tensor-parallel-size", stage.tensor_parallel),
        (*own, "drain_seconds"): ("shutdown-timeout", model.drain_seconds),
    }
    if stage.pipeline_parallel > 1:
        planned[*own, "pipeline_parallel"] = ("pipeline-parallel-size", stage.pipeline_parallel)
    if stage.data_parallel > 1:
        planned[*own, "data_parallel"] = ("data-parallel-size", stage.data_parallel)
    if stage.expert_parallel:
        planned[*own, "expert_parallel"] = ("enable-expert-parallel", True)
    for each in stage.flags:
        setting = each.layer in _SETTINGS
        layer = each.layer if setting else "presets"
        value = each.value
        if stage.group and each.layer == disaggregation.LAYER and isinstance(value, dict):
            value = {**value, "engine_id": disaggregation.engine_id(stage)}
        planned[*own, layer, each.name] = (each.name, value)
    # What an operator adds to a connector's settings is in what `prefill` sets.
    merged = {each.name for each in stage.flags if each.layer == disaggregation.LAYER}
    found = [
        ((*own, "model"), (model_directory(model),)),
        *argument_lines(stage, model, planned, merged=merged),
    ]
    if vllm.api_key_file is not None:
        # The last one stands before those of operators, and so before all that vLLM answers.
        found.append((("vllm", "api_key_file"), ("--middleware", MIDDLEWARE)))
    return found
