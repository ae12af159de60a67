"""Recommend FP8 weights if a model would need fewer GPUs with them. Pure.

gpufleet never applies the recommendation itself: quantization changes answers, so this module sets
no flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpufleet.errors import FleetError
from gpufleet.planning import candidates
from gpufleet.planning.candidates import CandidateSet, Sizer
from gpufleet.settings.engine_flags import DEFAULT
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.architectures.description import Description
from gpufleet.sizing.architectures.quantization import online_quantization
from gpufleet.versions import numbers

# FP8 tensor cores: Ada and Hopper (CUDA programming guide, compute capabilities).
FP8_CAPABILITY = (8, 9)
# vLLM's names for quantizing to FP8 while loading, the newer name first. vLLM has `fp8_per_tensor`
# since 0.20. Since then, `fp8` is only for checkpoints that are already in FP8.
FP8 = ("fp8_per_tensor", "fp8")


def advice(
    considered: tuple[CandidateSet, ...],
    serving: Mapping[str, Served],
    described: Mapping[str, Description | str],
    sizer: Sizer,
) -> Iterator[str]:
    """
    Yield a sentence for each model and kind of node on which FP8 weights would need fewer GPUs.

    A model is skipped if it is already quantized, if its description is unknown, or if the operator
    has set its number of GPUs.
    """
    for each in considered:
        description = described.get(each.model)
        if each.chosen is None or not isinstance(description, Description):
            continue
        served = serving[each.model]
        if served.engine != DEFAULT:
            continue
        if description.quantization is not None or "quantization" in served.flags:
            continue
        if served.tensor_parallel is not None:
            continue  # the operator has set the number of GPUs
        now = each.chosen.division
        method = _fp8_method(each)
        if now.gpus == 1 or method is None:
            continue
        quantized = served.model_copy(
            update={"flags": {**served.flags, "quantization": method}, "tensor_parallel": None}
        )
        try:
            found = candidates.evaluate_divisions(
                each.model, quantized, description, each.kind, each.nodes, sizer=sizer
            ).chosen
        except FleetError:
            continue
        if found is not None and found.division.gpus < now.gpus:
            yield (
                f"{each.model} on {each.kind}: with FP8 weights, {found.division} would be "
                f"enough instead of {now}. Use an FP8 checkpoint of the model, or set "
                f"`flags.quantization: {method}`, with which vLLM quantizes the weights while it "
                "loads them. Both change answers slightly, so gpufleet leaves the decision to you"
            )


def _fp8_method(considered: CandidateSet) -> str | None:
    """
    Return the release's name for the method that quantizes weights to FP8 while loading them.

    The result is None if the GPU or the release does not support this.
    """
    if considered.kind.compute_capability < FP8_CAPABILITY:
        return None
    vllm = numbers(considered.kind.vllm)
    return next((name for name in FP8 if online_quantization(name, vllm) is not None), None)
