"""The words that a stage's server is started with."""

from __future__ import annotations

from gpufleet.engines.vllm import launch_arguments
from gpufleet.planning.stage import Stage
from gpufleet.settings.serving_settings import Served, Vllm


def vllm_arguments(stage: Stage, served: Served, node: Vllm) -> tuple[str, ...]:
    """Return every word after `vllm serve`."""
    return tuple(word for _, line in launch_arguments.lines(stage, served, node) for word in line)
