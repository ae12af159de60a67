"""Compare the GPU memory in the plan with the memory that vLLM reports. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpufleet.doctor.observations import LogCause
from gpufleet.planning.planner import FleetPlan
from gpufleet.serving.status import FleetStatus
from gpufleet.sizing.fit_suggestions import gib
from gpufleet.sizing.options import Sizing

RULES = frozenset(
    {
        "mem-no-kv",
        "mem-kv-negative",
        "mem-kv-one-request",
        "mem-torch-oom",
        "mem-graph-capture",
        "mem-cpu-node",
    }
    | {"mem-sampler-warmup", "mem-free-below-util", "mem-external-weights"}
)
"""The log rules about memory that a plan also takes into account."""


def short_of_memory(status: FleetStatus, logs: Mapping[str, Sequence[LogCause]]) -> Collection[str]:
    """Return the models whose logs report that there is too little memory."""
    return {
        each.model
        for each in status.replicas
        if any(cause.rule in RULES for cause in logs.get(each.id, ()))
    }


def planned_sizes(plan: FleetPlan, models: Collection[str]) -> dict[tuple[str, str], Sizing]:
    """Return the memory that the plan assigns to these models, by model and node."""
    return {
        (considered.model, node): chosen.sizing
        for considered in plan.candidates
        if considered.model in models and (chosen := considered.chosen) and chosen.sizing
        for node in considered.names
    }


def size_sentence(size: Sizing) -> str:
    """Return a sentence on the memory that the plan assigns on each GPU."""
    fits = "no context fits"
    if size.largest_max_model_len:
        fits = f"{size.largest_max_model_len:,} tokens fit"
    return (
        f"the plan for each GPU: weights need {gib(size.weights_bytes_per_gpu)}; a context of "
        f"{size.max_model_len:,} tokens needs {gib(size.kv_bytes_for_max_model_len_per_gpu)}, "
        f"{gib(size.kv_cache_bytes_per_gpu)} are available: {fits}"
    )
