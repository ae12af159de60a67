"""
Predict vLLM's refusals of a model, its division and a GPU before a start.  Pure.

Contract: `refusals` returns only refusals that certainly stop the server. Each one has its location
in vLLM's source, and one change of a setting that removes it. If a fact is unknown (the GPU's
capability, or an architecture that no release has), the rules on it are skipped. If there are no
refusals, the server may still fail to start: `sizing/fit.py` checks memory, and `flags/` checks
flags.

The source of some releases was not read. Such a release has the rules of the next older release
whose source was read. If an architecture or method is only in one of the two neighbouring releases,
the rules on it are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpufleet.catalog.vllm_support import Version
from gpufleet.sizing.architectures.components import Architecture
from gpufleet.sizing.architectures.quantization_scheme import Quantization
from gpufleet.sizing.launch_rules.choice import FLAGS, Choice, Refused, with_nearest
from gpufleet.sizing.launch_rules.dtype_rules import (
    check_bfloat16,
    check_float16,
    check_kv_cache_dtype,
    check_method_dtype,
)
from gpufleet.sizing.launch_rules.launch_case import LaunchCase
from gpufleet.sizing.launch_rules.length_rules import (
    check_batched_tokens,
    check_draft,
    check_lora,
    check_max_model_len,
)
from gpufleet.sizing.launch_rules.parallel_rules import (
    check_decode_context,
    check_expert_balance,
    check_expert_parallel,
    check_pipeline,
    check_tensor_parallel,
)
from gpufleet.sizing.launch_rules.release_rules import (
    check_architecture,
    check_gpu_generation,
    check_method,
    check_method_on_gpu,
    check_quantization_flag,
    check_sparse_attention,
)

__all__ = ["FLAGS", "Choice", "Refused", "refusals", "with_nearest"]


def refusals(
    architecture: Architecture,
    quantization: Quantization | None,
    choice: Choice,
    compute_capability: tuple[int, int] | None,
    vllm: Version,
) -> tuple[Refused, ...]:
    """
    Return all refusals of release `vllm`; refusals about the release itself come first.

    `quantization` is the checkpoint's quantization. `compute_capability` is (9, 0) for Hopper. If
    it is None, rules that depend on it are skipped.
    """
    case = LaunchCase(architecture, quantization, choice, compute_capability, vllm)
    return tuple(refused for rule in _RULES for refused in rule(case))


_RULES: tuple[Callable[[LaunchCase], Iterator[Refused]], ...] = (
    check_architecture,
    check_method,
    check_quantization_flag,
    check_gpu_generation,
    check_method_on_gpu,
    check_sparse_attention,
    check_bfloat16,
    check_float16,
    check_method_dtype,
    check_kv_cache_dtype,
    check_tensor_parallel,
    check_pipeline,
    check_expert_parallel,
    check_expert_balance,
    check_decode_context,
    check_max_model_len,
    check_batched_tokens,
    check_draft,
    check_lora,
)
