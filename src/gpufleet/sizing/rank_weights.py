"""Compute one rank's part of each weight, packed, padded and allocated.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpufleet.sizing.architectures.components import (
    Split,
    Weight,
)
from gpufleet.sizing.architectures.quantization_scheme import Scheme

SIZES = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "int8": 1,
    "uint8": 1,
    "float64": 8,
    "int64": 8,
    "int32": 4,
}
"""Bytes per number, by the names of `--dtype` and of `Weight.dtype`."""

VOCABULARY_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE in vllm/model_executor/layers/vocab_parallel_embedding.py."""


@dataclass(frozen=True)
class Sharding:
    """The parallel sizes by which a model is divided over GPUs."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    """Whether whole experts are distributed over tensor x data ranks."""

    @property
    def replicates_shared_experts(self) -> bool:
        """
        Return whether each rank has all shared experts.

        This is the case if each rank processes a different part of the tokens.

        Source: use_sequence_parallel_moe in vllm/config/parallel.py, DeepseekV2MLP.
        """
        return self.expert and self.tensor > 1 and self.data > 1


Kept = tuple[tuple[Weight, Scheme | None], ...]


@dataclass(frozen=True)
class Rank:
    """The rank with the most weights: its division, number format, release and GPU."""

    sharding: Sharding
    number: int
    """Bytes per number in the model's dtype."""
    vllm: tuple[int, ...]
    as_stored: bool = False
    """Whether to count the tensors of the checkpoint, without what vLLM adds when it loads them."""
    capability: tuple[int, int] | None = None
    """The GPU's compute capability."""

    def weigh(self, kept: Kept) -> int:
        """
        Return the bytes of these weights on the rank, rounded like PyTorch's GPU allocator does.
        """
        total = 0
        tensors: dict[tuple[str, int, Scheme | None, int, bool], int] = {}
        for weight, scheme in kept:
            size, beside, count = self._weigh_one(weight, scheme)
            if self.as_stored:
                total += (size + beside) * count
                continue
            if weight.expert:
                size, beside, count = size * count, beside * count, 1
            total += allocated_bytes(beside, self.vllm) * count
            if not weight.linear or weight.split not in _FUSED:
                total += allocated_bytes(size, self.vllm) * count
                continue
            # Queries, keys and values, and gate and up, are one tensor in vLLM.
            module, _, name = weight.name.rpartition(".")
            module += _APART.get(name, "")
            key = (module, weight.columns, scheme, count, weight.expert)
            tensors[key] = tensors.get(key, 0) + size
        return total + sum(
            allocated_bytes(size, self.vllm) * key[3] for key, size in tensors.items()
        )

    def _weigh_one(self, weight: Weight, scheme: Scheme | None) -> tuple[int, int, int]:
        """
        Return the bytes of one copy of a weight, the bytes of its scales, and the number of copies.
        """
        if self.as_stored:
            rows, columns, count = weight.rows, weight.columns, 0 if weight.buffer else weight.count
        else:
            rows, columns, count = self._shape(weight)
        if scheme is None:
            size = SIZES[weight.dtype] if weight.dtype else self.number
            return rows * columns * size, 0, count
        beside = 0
        if scheme.kind == "mxfp4" and weight.expert and not self.as_stored:
            if self._major == 9 and self.vllm >= _TRITON_KERNELS:
                return self._triton_bytes(weight, rows, columns, scheme), 0, count
            rows, columns = self._padded_shape(weight, rows, columns)
        elif weight.name.endswith("kv_b_proj") and not self.as_stored:
            # For decoding, MLA also keeps a copy that is absorbed into other matrices and not
            # quantized.
            beside = rows * columns * self.number
        elif weight.expert and scheme.kind == "int" and not self.as_stored:
            scheme = _finer_groups(weight, rows, columns, scheme)
        if scheme.block and scheme.kind == "fp8" and not self.as_stored:
            scheme = self._kernel_scheme(scheme)
        elif self._is_for_machete(weight, scheme):
            groups = rows * _divide_up(columns, scheme.group) if scheme.group else rows
            beside += groups * self.number - _divide_up(groups * scheme.bits, 8)
        size = _divide_up(rows * columns * scheme.bits, 8)
        return size, packed_bytes(rows, columns, scheme) - size + beside, count

    def _shape(self, weight: Weight) -> tuple[int, int, int]:
        """Return the rows, columns and count of a weight on this rank."""
        tensor, count = self.sharding.tensor, weight.count
        if weight.until and self.vllm >= weight.until:
            count = 0
        if weight.expert:
            if self.sharding.expert:
                count = _divide_up(count, tensor * self.sharding.data)
                tensor = 1
            else:
                tensor *= self.sharding.data
        elif "shared_expert" in weight.name and self.sharding.replicates_shared_experts:
            tensor = 1
        if weight.divided_since and self.vllm < weight.divided_since:
            tensor = 1
        # Since 0.27, KimiMoE of vllm/models/kimi_k3 pads experts that TP makes too small.
        least = weight.least if tensor > 1 and self.vllm >= (0, 27) else 0
        match weight.split:
            case Split.NONE:
                return weight.rows, weight.columns, count
            case Split.ROWS:
                return max(_divide_up(weight.rows, tensor), least), weight.columns, count
            case Split.COLUMNS:
                return weight.rows, max(_divide_up(weight.columns, tensor), least), count
            case Split.HEADS:
                heads = max(weight.heads, 1)
                return weight.rows // heads * _divide_up(heads, tensor), weight.columns, count
            case Split.VOCABULARY:
                return (
                    _divide_up(_round_up(weight.rows, VOCABULARY_PADDING), tensor),
                    weight.columns,
                    count,
                )

    @property
    def _major(self) -> int | None:
        return self.capability[0] if self.capability else None

    def _is_for_machete(self, weight: Weight, scheme: Scheme) -> bool:
        """
        Return whether Machete, Hopper's kernel, stores scaled zero points in the model's dtype.

        Since 0.17, this includes AWQ. Source: transform_w_zp of
        kernels/linear/mixed_precision/machete.py.
        """
        return (
            self.capability == (9, 0)
            and self.vllm >= (0, 17)
            and scheme.kind == "int"
            and scheme.zero_points
            and not (scheme.symmetric or weight.expert or self.as_stored)
        )

    def _kernel_scheme(self, scheme: Scheme) -> Scheme:
        """
        Return the scheme of FP8 blocks as the GPU's kernel stores them.

        On GPUs before Ada, vLLM uses Marlin's kernel, which does not support blocks: each output
        gets its own copy of the scale, in the model's dtype. Source: prepare_fp8_layer_for_marlin
        in vLLM's quantization/utils/marlin_utils_fp8.py.
        """
        if scheme.block is None or self.capability is None or self.capability >= (8, 9):
            return scheme
        return replace(scheme, block=None, group=scheme.block[1], scale_bytes=self.number)

    def _padded_shape(self, weight: Weight, rows: int, columns: int) -> tuple[int, int]:
        """
        Return an MXFP4 expert's shape after padding.

        The hidden size is padded to a multiple of 256, and the intermediate size to a multiple of
        128. On SM100 up to 0.26, both are padded to a multiple of 256 (FlashInfer's TRT-LLM
        kernels). Source: mxfp4_round_up_hidden_size_and_intermediate_size in vLLM's mxfp4 oracle,
        and logs.
        """
        inner = 256 if self._major == 10 and self.vllm < (0, 27) else 128
        if weight.split is Split.COLUMNS:
            return _round_up(rows, 256), _round_up(columns, inner)
        halves = 2 if "gate_up" in weight.name else 1
        return _round_up(_divide_up(rows, halves), inner) * halves, _round_up(columns, 256)

    def _triton_bytes(self, weight: Weight, rows: int, columns: int, scheme: Scheme) -> int:
        """
        Return the bytes of an MXFP4 expert on Hopper, where only the values are padded to 256.

        The inputs are padded to a multiple of 256. Since 0.17 (triton_kernels 3.6), the outputs of
        gate and up are padded in the same way. The scales do not have this padding. Source:
        _swizzle_mxfp4 in mxfp4_utils.py, and logs: gpt-oss-120b of 0.14.1, 20b of 0.19.0.
        """
        if weight.split is Split.COLUMNS:
            columns = _round_up(columns, 64)
            outputs = rows
        else:
            halves = 2 if "gate_up" in weight.name else 1
            rows = _round_up(_divide_up(rows, halves), 64) * halves
            outputs = _round_up(rows, 256) if self.vllm >= (0, 17) else rows
        scales = packed_bytes(rows, columns, scheme) - rows * columns // 2
        return outputs * _round_up(columns, 256) // 2 + scales


def _finer_groups(weight: Weight, rows: int, columns: int, scheme: Scheme) -> Scheme:
    """
    Return a scheme with smaller groups if an expert's part on a rank is not a multiple of the
    group.

    vLLM halves the group until it divides the part.

    Source: MoeWNA16Method.create_weights in quantization/moe_wna16.py, which accepts such shapes.
    """
    inner = columns if weight.split is Split.COLUMNS else rows
    if weight.split is Split.ROWS and "gate_up" in weight.name:
        inner //= 2
    group = scheme.group
    while group > 1 and inner % group:
        group //= 2
    if group == scheme.group:
        return scheme
    return replace(scheme, group=group, zero_points=not scheme.symmetric)


_TRITON_KERNELS = (0, 12)
"""
The release from which vLLM contains triton_kernels. Earlier releases use Marlin if triton_kernels
is not installed.
"""
_APART = dict.fromkeys(("in_proj_b", "in_proj_a", "in_proj_ba"), ".gates")
"""
Gates of delta nets. They are in a different tensor than the other input projections of the layer.

Source: qwen_gdn_linear_attn.py.
"""
_FUSED = {Split.ROWS, Split.HEADS}
_MIB = 1 << 20


def allocated_bytes(size: int, vllm: tuple[int, ...]) -> int:
    """
    Return the bytes that a release allocates on the GPU for a tensor of `size` bytes.

    For a tensor above 10 MiB, PyTorch's allocator requests a multiple of 2 MiB. If at most 1 MiB of
    it remains, the rest cannot be used for other tensors. Since 0.21, vLLM sets max_split_size_mb
    to 20 during loading, so with a tensor of 20 MiB or more no rest can be used for other tensors.
    Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch (kMinLargeAlloc, kRoundLarge,
    should_split), load_model in vllm/v1/worker/gpu_worker.py, and logs: Qwen2.5-7B takes 56 MiB
    more than its weights with 0.19, and 98 MiB with 0.23.
    """
    if size <= 10 * _MIB:
        return _round_up(size, 512)
    rounded = _round_up(size, 2 * _MIB)
    whole = vllm >= (0, 21) and size >= 20 * _MIB
    return rounded if whole or rounded - size <= _MIB else _round_up(size, 512)


def packed_bytes(rows: int, columns: int, scheme: Scheme) -> int:
    """
    Return the bytes of a weight of this shape, stored in a scheme with its scales and zero points.
    """
    size = _divide_up(rows * columns * scheme.bits, 8)
    if scheme.block:
        return (
            size
            + _divide_up(rows, scheme.block[0])
            * _divide_up(columns, scheme.block[1])
            * scheme.scale_bytes
        )
    if scheme.group < 0:
        return size + scheme.scale_bytes
    groups = rows * _divide_up(columns, scheme.group) if scheme.group else rows
    size += groups * scheme.scale_bytes
    if scheme.zero_points:
        size += _divide_up(groups * scheme.bits, 8)
    if scheme.activation_order:
        size += columns * 8
    return size


def _divide_up(number: int, by: int) -> int:
    return -(-number // by)


def _round_up(number: int, multiple: int) -> int:
    return _divide_up(number, multiple) * multiple
