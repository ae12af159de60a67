"""
Check whether tensor parallelism can divide quantized weights with blocks or groups. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpufleet.sizing.architectures.components import Split, StateCache
from gpufleet.sizing.launch_rules.divisibility_rules import expert_ranks, ranks_flag
from gpufleet.sizing.launch_rules.launch_case import Fault, LaunchCase, quantized_weights, shape_of

REFINED_BLOCK = 32
"""
The smallest block to which vLLM can reduce the blocks of FP8 experts' scales:
refine_fp8_moe_block_shape of vllm/model_executor/layers/fused_moe/oracle/fp8.py.
"""
_WHOLE_QUANTIZED_UNTIL = (0, 11)
_GROUPED_QUANTIZED_UNTIL = (0, 14)


def check_quantized_state(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find quantized Mamba 2 layers that the release does not divide."""
    if tensor == 1 or case.quantization is None or case.vllm[:2] >= _GROUPED_QUANTIZED_UNTIL:
        return
    for cache in shape_of(case.architecture).caches:
        if isinstance(cache, StateCache) and cache.kind == "mamba2":
            groups = cache.shapes[1][0] if len(cache.shapes) == 3 else 0
            if case.vllm[:2] < _WHOLE_QUANTIZED_UNTIL or (groups and groups % tensor):
                yield Fault(
                    "quantized-state",
                    f"{case.release} cannot divide {case.model}'s quantized Mamba 2 layers over "
                    f"{tensor} GPUs",
                    "vllm/model_executor/layers/mamba/mamba_mixer2.py: MambaMixer2",
                )
                return


_MERGED_MAY_MISMATCH = (0, 14)
"""
The first release with _maybe_allow_fp8_block_shape_mismatch in
vllm/model_executor/layers/linear.py.
"""
_NOT_MERGED = ("q_b_proj", "kv_b_proj")


def check_fp8_blocks(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find FP8 matrices whose part on a rank is not a multiple of their block."""
    method = case.quantization.method if case.quantization else ""
    if tensor == 1:
        return
    # The exception does not apply to compressed-tensors, which stores its blocks in a different
    # attribute.
    allowed = case.vllm[:2] >= _MERGED_MAY_MISMATCH and method == "fp8"
    for weight, scheme in quantized_weights(case):
        if scheme.block is None or weight.expert:
            continue
        rows, columns = scheme.block
        merged = not weight.name.endswith(_NOT_MERGED)
        if weight.split is Split.COLUMNS:
            size, block = weight.columns // tensor, columns
        elif merged and allowed:
            continue
        elif weight.split is Split.HEADS:
            size, block = max(1, weight.heads // tensor) * weight.rows // weight.heads, rows
        else:
            size, block = weight.rows // tensor, rows
        if size % block:
            yield Fault(
                "fp8-block",
                f"with --tensor-parallel-size {tensor}, {size} of {case.model}'s {weight.name} are "
                f"on each GPU, but {size} is not a multiple of the FP8 block of {block}",
                "vllm/model_executor/layers/quantization/utils/fp8_utils.py: "
                "validate_fp8_block_shape"
                if case.vllm >= (0, 11)
                else "vllm/model_executor/layers/quantization/fp8.py: "
                "Fp8LinearMethod.create_weights",
            )
            return


_REFINED_SINCE = (0, 29)
"""
The first release with resolve_fp8_moe_weight_block_shape in
vllm/model_executor/layers/fused_moe/oracle/fp8.py.
"""


def check_fp8_expert_blocks(case: LaunchCase, tensor: int, expert: bool) -> Iterator[Fault]:
    """Find FP8 experts whose part on a rank is not a multiple of their block."""
    ranks = expert_ranks(case, tensor, expert)
    method = case.quantization.method if case.quantization else ""
    for weight, scheme in quantized_weights(case):
        if scheme.block is None or not weight.expert or weight.split is not Split.COLUMNS:
            continue
        rows, columns = scheme.block
        size = weight.columns // ranks
        if size % rows == 0 and (tensor == 1 or size % columns == 0):
            continue
        hidden = case.architecture.hidden_size
        if method == "fp8" and case.vllm[:2] >= _REFINED_SINCE:
            if math.gcd(rows, columns, size, hidden) >= REFINED_BLOCK:
                continue
        elif method not in {"fp8", "compressed-tensors"}:
            continue
        yield Fault(
            "fp8-expert-block",
            f"with {ranks_flag(case, tensor, ranks)}, each of {case.model}'s experts has an "
            f"intermediate size of {size} on a GPU, but {size} is not a multiple of the experts' "
            f"FP8 block of {rows}",
            "vllm/model_executor/layers/quantization/utils/fp8_utils.py: "
            "validate_fp8_block_shape_moe"
            if case.vllm[:2] >= (0, 30)
            else "vllm/model_executor/layers/quantization: create_weights of the experts' method",
        )
        return


_IN_GROUPS = {"awq", "gptq", "compressed-tensors", "modelopt"}


def check_groups(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find matrices whose part on a rank is not a whole number of quantization groups."""
    method = case.quantization.method if case.quantization else ""
    if tensor == 1 or method not in _IN_GROUPS:
        return
    for weight, scheme in quantized_weights(case):
        if weight.expert or weight.split is not Split.COLUMNS or scheme.group <= 0:
            continue
        if scheme.kind != "int" and not (method == "modelopt" and scheme.kind == "nvfp4"):
            continue
        size = weight.columns // tensor
        if size % scheme.group and scheme.group < weight.columns:
            yield Fault(
                "quantization-group",
                f"with --tensor-parallel-size {tensor}, {size} inputs of {case.model}'s "
                f"{weight.name} are on each GPU, but {size} is not a multiple of the quantization "
                f"group of {scheme.group}",
                "vllm/distributed/utils.py: verify_group_size_divides_partition"
                if case.vllm[:2] >= (0, 28)
                else "vllm/model_executor/layers/quantization: create_weights of the method",
            )
            return


_EXPERT_GROUPS_CHECKED = (0, 24)
"""
The first release that checks the groups: create_weights of compressed_tensors_moe_wna16.py. Earlier
releases cut off the scales.
"""
_SMALLEST_GROUP = 32
"""
If a group does not divide a size, MoeWNA16Method.create_weights halves the group, but not below
this size.
"""


def check_expert_groups(case: LaunchCase, tensor: int, expert: bool) -> Iterator[Fault]:
    """Find experts whose part on a rank is not a whole number of quantization groups."""
    method = case.quantization.method if case.quantization else ""
    ranks = expert_ranks(case, tensor, expert)
    for weight, scheme in quantized_weights(case):
        if not weight.expert or weight.split is not Split.COLUMNS or scheme.kind != "int":
            continue
        size, group = weight.columns // ranks, scheme.group
        if group <= 0 or size % group == 0:
            continue
        if method == "compressed-tensors" and case.vllm[:2] >= _EXPERT_GROUPS_CHECKED:
            rule = "compressed_tensors/compressed_tensors_moe: the WNA16 method"
        elif method in {"awq", "gptq"} and not _group_divides(
            group, size, case.architecture.hidden_size
        ):
            rule = "moe_wna16.py: MoeWNA16Method.create_weights"
        else:
            continue
        yield Fault(
            "expert-group",
            f"with {ranks_flag(case, tensor, ranks)}, each of {case.model}'s experts has an "
            f"intermediate size of {size} on a GPU, but {size} is not a multiple of the "
            f"quantization group of {group}",
            f"vllm/model_executor/layers/quantization/{rule}",
        )
        return


def _group_divides(group: int, *sizes: int) -> bool:
    """Return whether a group, halved as often as needed, divides all sizes."""
    while any(size % group for size in sizes):
        group //= 2
        if group < _SMALLEST_GROUP:
            return False
    return True


_PREQUANTIZED_GONE = (0, 28)


def check_bitsandbytes(case: LaunchCase, tensor: int, _: bool) -> Iterator[Fault]:
    """Find a bitsandbytes checkpoint, which some releases do not divide."""
    own = case.checkpoint
    if tensor > 1 and own and own.method == "bitsandbytes" and case.vllm[:2] < _PREQUANTIZED_GONE:
        yield Fault(
            "bitsandbytes",
            f"{case.release} cannot divide a checkpoint that bitsandbytes has quantized",
            "vllm/model_executor/model_loader/bitsandbytes_loader.py: BitsAndBytesModelLoader",
        )
