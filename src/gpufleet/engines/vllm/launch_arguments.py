"""Build the arguments of `vllm serve` for a stage of the plan. Pure."""

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
"""The name of gpufleet's middleware in the flag `--middleware`."""

# Layers of flags that come from settings of an entry of `serving`.
_SETTINGS = ("context", KIND, adapter_flags.LAYER, disaggregation.LAYER, gpu_shares.LAYER)


def lines(
    stage: Stage, model: Served, vllm: EngineSettings
) -> list[tuple[KeyPath, tuple[str, ...]]]:
    """
    Return the arguments in groups.

    Each group is a flag with its values, and becomes one line. It has the path of its setting, such
    as `("serving", "llama", "port")`. Raises `FleetError` for values that cannot be passed to a
    process.
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
    # If an operator adds settings for the connector, they are already part of the flag that
    # `prefill` sets.
    merged = {each.name for each in stage.flags if each.layer == disaggregation.LAYER}
    found = [
        ((*own, "model"), (model_directory(model),)),
        *argument_lines(stage, model, planned, merged=merged),
    ]
    if vllm.api_key_file is not None:
        # The last middleware runs before those of operators, and so before everything that vLLM
        # answers.
        found.append((("vllm", "api_key_file"), ("--middleware", MIDDLEWARE)))
    return found
