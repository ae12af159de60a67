"""Build the arguments of `sglang serve` for a stage of the plan. Pure.

The arguments do not contain API keys. `on_node/serving/sglang_serve.py` adds the keys on the node.
"""

from __future__ import annotations

from gpufleet.artifacts.model_files import model_directory
from gpufleet.engines.operator_values import argument_lines
from gpufleet.planning.stage import Stage, served_name
from gpufleet.settings.base import KeyPath
from gpufleet.settings.serving_settings import Argument, EngineSettings, Served


def lines(
    stage: Stage, model: Served, sglang: EngineSettings
) -> list[tuple[KeyPath, tuple[str, ...]]]:
    """
    Return the arguments in groups.

    Each group is a flag with its values, and becomes one line. It has the path of its setting, such
    as `("serving", "llama", "port")`. Raises `FleetError` for values that cannot be passed to a
    process.
    """
    own = ("serving", stage.model)
    section = sglang.engine
    planned: dict[KeyPath, tuple[str, Argument]] = {
        (*own, "model"): ("model-path", model_directory(model)),
        (*own, "served_name"): ("served-model-name", served_name(stage, model)),
        (section, "listen"): ("host", sglang.listen),
        (*own, "port"): ("port", stage.port),
        (*own, "tensor_parallel"): ("tp-size", stage.tensor_parallel),
        # Without this flag, the server has no metrics, so waves and alerts could not observe it.
        (section, "version"): ("enable-metrics", True),
    }
    if stage.pipeline_parallel > 1:
        planned[*own, "pipeline_parallel"] = ("pp-size", stage.pipeline_parallel)
    if sglang.device == "cpu":
        planned[section, "device"] = ("device", "cpu")
    for each in stage.flags:
        planned[*own, each.layer, each.name] = (each.name, each.value)
    return argument_lines(stage, model, planned)
