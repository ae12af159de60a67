"""
The bytes of weights that each GPU holds after vLLM has loaded a model.  Pure.

What counts is what stays: packed weights, their scales and zero points, padded vocabularies and
experts, and the rotary tables, as `Model loading took` of the start-up log has it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import (
    Architecture,
    LatentCache,
    Layer,
    Part,
    Split,
    Weight,
    Where,
)
from gpufleet.sizing.architectures.quantization import Quantization, Scheme

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
"""Bytes of a number, by the names of `--dtype` and of `Weight.dtype`."""

_VOCABULARY_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE in vllm/model_executor/layers/vocab_parallel_embedding.py."""


@dataclass(frozen=True)
class Sharding:
    """Over how many GPUs, and how, a model is divided."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    """Experts are divided as a whole, over tensor x data ranks."""

    @property
    def replicates_shared_experts(self) -> bool:
        """
        Say whether each rank has all of the shared experts, since it gets a part of the tokens.

        Source: use_sequence_parallel_moe in vllm/config/parallel.py, DeepseekV2MLP.
        """
        return self.expert and self.tensor > 1 and self.data > 1


@dataclass(frozen=True)
class Weighed:
    """The largest rank of one pipeline stage."""

    bytes: int
    layers: range


Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""{tensor: (dtype, shape)}, as the headers of safetensors files have it."""


def weight_bytes(
    architecture: Architecture,
    quantization: Quantization | None,
    sharding: Sharding,
    *,
    dtype: str = "auto",
    stored: Stored | int | None = None,
    vllm: tuple[int, ...],
    partition: Sequence[int] | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> tuple[Weighed, ...]:
    """
    Return what the weights take on the largest rank of each pipeline stage.

    `dtype` is `--dtype`. `stored` says what the checkpoint has: {tensor: (dtype, shape)} from the
    headers of its safetensors files, or its total bytes from the index. `partition`: layers of each
    stage, as in VLLM_PP_LAYER_PARTITION. `compute_capability` decides the kernel of MXFP4 experts,
    FP8 blocks and zero points, and with it their padding and scales; None: the usual one. Raises
    `FleetError` for a partition that does not add up.
    """
    plan = _plan(architecture, quantization, stored)
    number = SIZES[architecture.dtype if dtype == "auto" else dtype]
    rank = _Rank(sharding, number, vllm, capability=compute_capability)
    sizes = [rank.weigh(kept) for kept, _ in plan.kinds]
    sizes_of_parts = [rank.weigh(kept) for kept in plan.parts]
    ranges = layer_ranges(len(architecture.layers), sharding.pipeline, partition)
    workspace = _workspace(architecture, vllm)
    weighed = []
    for stage, layers in enumerate(ranges):
        first, last = stage == 0, stage == len(ranges) - 1
        total = (
            workspace
            + plan.unknown
            + sum(
                round(sizes[kind] * plan.factors[kind]) * many
                for kind, many in Counter(plan.kind_of[layer] for layer in layers).items()
            )
        )
        for part, size in zip(architecture.parts, sizes_of_parts, strict=True):
            if _is_on(part, vllm, first=first, last=last, tied=architecture.tied):
                total += size
        weighed.append(Weighed(total, layers))
    return tuple(weighed)


def layer_ranges(
    layers: int, pipeline: int, partition: Sequence[int] | None = None
) -> tuple[range, ...]:
    """
    Return the layers of each pipeline stage.

    The layers that do not divide go to the stages before the last one, one each, from the back.
    Raises `FleetError` for a partition that does not add up. Source: get_pp_indices in
    vllm/distributed/utils.py.
    """
    if partition is None:
        counts = [layers // pipeline] * pipeline
        for place in range(2, layers % pipeline + 2):
            counts[-place] += 1
    else:
        counts = list(partition)
        if len(counts) != pipeline or sum(counts) != layers:
            raise FleetError(
                f"VLLM_PP_LAYER_PARTITION has {len(counts)} stages of {sum(counts)} layers in all, "
                f"the model has {layers} layers and --pipeline-parallel-size is {pipeline}; write "
                f"{pipeline} numbers that add up to {layers}"
            )
    ends = [sum(counts[: stage + 1]) for stage in range(pipeline)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _workspace(architecture: Architecture, vllm: tuple[int, ...]) -> int:
    """
    Return what loading takes once besides weights: FlashInfer's workspace for latent attention.

    Some releases allocate it when they look at the attention backends, used or not. Source:
    g_fi_workspace in v1/attention/backends/mla/flashinfer_mla.py, made at import from 0.11.1 to
    0.24, when first used from 0.25; logs of DeepSeek-V2-Lite and Kimi-VL with 0.19.
    """
    latent = any(
        isinstance(cache, LatentCache) for layer in architecture.layers for cache in layer.caches
    )
    return 128 << 20 if latent and (0, 11, 1) <= vllm < (0, 25) else 0


def _is_on(part: Part, vllm: tuple[int, ...], *, first: bool, last: bool, tied: bool) -> bool:
    if part.everywhere and (part.everywhere_until is None or vllm < part.everywhere_until):
        return True
    match part.where:
        case Where.EVERY:
            return True
        case Where.LAST:
            return last
        case Where.FIRST:
            # The last stage needs the embedding too where it is the head.
            return first or (last and tied and _is_embedding(part))


def _is_embedding(part: Part) -> bool:
    return any(weight.split is Split.VOCABULARY for weight in part.weights)


Kept = tuple[tuple[Weight, Scheme | None], ...]


@dataclass(frozen=True)
class _Plan:
    """Each weight with its scheme; layers that are alike only once."""

    architecture: Architecture
    quantization: Quantization | None
    kinds: tuple[tuple[Kept, int], ...]
    """Different layers, with the first one's number."""
    kind_of: tuple[int, ...]
    """Which of `kinds` each layer is."""
    parts: tuple[Kept, ...]
    factors: tuple[float, ...]
    """What each kind is to be multiplied by to agree with the stored tensors."""
    unknown: int
    """Bytes that are stored outside of the layers and of no known part."""
    stored: Stored | int | None


_plans: dict[tuple[int, int, int], _Plan] = {}
_MOST_PLANS = 256


def _plan(
    architecture: Architecture, quantization: Quantization | None, stored: Stored | int | None
) -> _Plan:
    """
    Return the plan of these objects, made once.

    Values of this size are slow to hash, so they are known by identity; a plan holds them, so an
    identity is not used again while it is known.
    """
    key = (id(architecture), id(quantization), stored if isinstance(stored, int) else id(stored))
    if found := _plans.get(key):
        return found
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    made = _plans[key] = _made(architecture, quantization, stored)
    return made


def _made(
    architecture: Architecture, quantization: Quantization | None, stored: Stored | int | None
) -> _Plan:
    kinds: dict[tuple[int, tuple[Scheme | None, ...]], int] = {}
    listed: list[tuple[Kept, int]] = []
    kind_of: list[int] = []
    for number, layer in enumerate(architecture.layers):
        schemes = _schemes(layer, f"{architecture.prefix}{number}.", quantization)
        # Equal layers are one object where a family is uniform.
        key = (id(layer), schemes)
        if key not in kinds:
            kinds[key] = len(listed)
            listed.append((tuple(zip(layer.weights, schemes, strict=True)), number))
        kind_of.append(kinds[key])
    parts = tuple(
        tuple(
            (
                weight,
                quantization.scheme_of(weight.name, head=part.name == "head", expert=weight.expert)
                if quantization
                and weight.linear
                and not _is_left(part, quantization, architecture.name)
                else None,
            )
            for weight in part.weights
        )
        for part in architecture.parts
    )
    factors, unknown = _measured(
        architecture, quantization, stored, (tuple(listed), tuple(kind_of), parts)
    )
    return _Plan(
        architecture,
        quantization,
        tuple(listed),
        tuple(kind_of),
        parts,
        factors,
        unknown,
        stored,
    )


_TEXT_ONLY = {"awq", "gptq", "auto-round", "hqq"}


def _is_left(part: Part, quantization: Quantization, architecture: str) -> bool:
    """
    Say whether a tower is left as it is though the config does not say so.

    Source: _maybe_ignore_quant_config in vLLM's qwen2_5_vl.py and others: these methods' tools
    quantize the text part alone, and list nothing; kimi_k25.py leaves it with compressed-tensors.
    """
    if part.name != "tower":
        return False
    left = architecture.startswith("KimiK25") and quantization.method == "compressed-tensors"
    return left or quantization.method in _TEXT_ONLY


def _schemes(
    layer: Layer, prefix: str, quantization: Quantization | None
) -> tuple[Scheme | None, ...]:
    if quantization is None:
        return (None,) * len(layer.weights)
    # A draft that the checkpoint keeps apart has whole names: no layer's number goes before them.
    return tuple(
        quantization.scheme_of(
            weight.name if weight.name.startswith("mtp.") else prefix + weight.name,
            expert=weight.expert,
        )
        if weight.linear
        else None
        for weight in layer.weights
    )


@dataclass(frozen=True)
class _Rank:
    """The rank that holds most, and how it keeps numbers."""

    sharding: Sharding
    number: int
    """Bytes of one number of the model's dtype."""
    vllm: tuple[int, ...]
    as_stored: bool = False
    """Weigh the checkpoint's tensors, without what loading adds."""
    capability: tuple[int, int] | None = None
    """The GPU's compute capability."""

    def weigh(self, kept: Kept) -> int:
        """Return the bytes of these weights on it, as the GPU's allocator hands them out."""
        total = 0
        tensors: dict[tuple[str, int, Scheme | None, int, bool], int] = {}
        for weight, scheme in kept:
            size, beside, count = self._one(weight, scheme)
            if self.as_stored:
                total += (size + beside) * count
                continue
            if weight.expert:
                size, beside, count = size * count, beside * count, 1
            total += allocated(beside, self.vllm) * count
            if not weight.linear or weight.split not in _FUSED:
                total += allocated(size, self.vllm) * count
                continue
            # Queries, keys and values, and gate and up, are one tensor in vLLM.
            module, _, name = weight.name.rpartition(".")
            module += _APART.get(name, "")
            key = (module, weight.columns, scheme, count, weight.expert)
            tensors[key] = tensors.get(key, 0) + size
        return total + sum(allocated(size, self.vllm) * key[3] for key, size in tensors.items())

    def _one(self, weight: Weight, scheme: Scheme | None) -> tuple[int, int, int]:
        """Return the bytes of one of a weight, of its scales, and how many there are."""
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
                return self._for_triton(weight, rows, columns, scheme), 0, count
            rows, columns = self._padded(weight, rows, columns)
        elif weight.name.endswith("kv_b_proj") and not self.as_stored:
            # MLA keeps it for decoding too, absorbed and not quantized.
            beside = rows * columns * self.number
        elif weight.expert and scheme.kind == "int" and not self.as_stored:
            scheme = _finer(weight, rows, columns, scheme)
        if scheme.block and scheme.kind == "fp8" and not self.as_stored:
            scheme = self._for_gpu(scheme)
        elif self._is_for_machete(weight, scheme):
            groups = rows * _up(columns, scheme.group) if scheme.group else rows
            beside += groups * self.number - _up(groups * scheme.bits, 8)
        size = _up(rows * columns * scheme.bits, 8)
        return size, packed_bytes(rows, columns, scheme) - size + beside, count

    def _shape(self, weight: Weight) -> tuple[int, int, int]:
        """Return rows, columns and how many of them this rank holds."""
        tensor, count = self.sharding.tensor, weight.count
        if weight.until and self.vllm >= weight.until:
            count = 0
        if weight.expert:
            if self.sharding.expert:
                count = _up(count, tensor * self.sharding.data)
                tensor = 1
            else:
                tensor *= self.sharding.data
        elif "shared_expert" in weight.name and self.sharding.replicates_shared_experts:
            tensor = 1
        # KimiMoE of vllm/models/kimi_k3 pads experts that TP makes smaller, since 0.27.
        least = weight.least if tensor > 1 and self.vllm >= (0, 27) else 0
        match weight.split:
            case Split.NONE:
                return weight.rows, weight.columns, count
            case Split.ROWS:
                return max(_up(weight.rows, tensor), least), weight.columns, count
            case Split.COLUMNS:
                return weight.rows, max(_up(weight.columns, tensor), least), count
            case Split.HEADS:
                heads = max(weight.heads, 1)
                return weight.rows // heads * _up(heads, tensor), weight.columns, count
            case Split.VOCABULARY:
                return _up(_to(weight.rows, _VOCABULARY_PADDING), tensor), weight.columns, count

    @property
    def _major(self) -> int | None:
        return self.capability[0] if self.capability else None

    def _is_for_machete(self, weight: Weight, scheme: Scheme) -> bool:
        """
        Say whether Hopper's kernel holds the zero points, as scaled numbers of the model's dtype.

        Source: transform_w_zp of kernels/linear/mixed_precision/machete.py; AWQ since 0.17.
        """
        return (
            self.capability == (9, 0)
            and self.vllm >= (0, 17)
            and scheme.kind == "int"
            and scheme.zero_points
            and not (scheme.symmetric or weight.expert or self.as_stored)
        )

    def _for_gpu(self, scheme: Scheme) -> Scheme:
        """
        Return FP8 blocks as the kernel has them: Marlin's, before Ada, knows no blocks.

        Each output gets its own copy of the scale, in the model's dtype. Source:
        prepare_fp8_layer_for_marlin in vLLM's quantization/utils/marlin_utils_fp8.py.
        """
        if scheme.block is None or self.capability is None or self.capability >= (8, 9):
            return scheme
        return replace(scheme, block=None, group=scheme.block[1], scale_bytes=self.number)

    def _padded(self, weight: Weight, rows: int, columns: int) -> tuple[int, int]:
        """
        Return an MXFP4 expert's shape as kernels want it: hidden to 256, intermediate to 128.

        Both to 256 on SM100 (FlashInfer's TRT-LLM kernels) up to 0.26. Source:
        mxfp4_round_up_hidden_size_and_intermediate_size in vLLM's mxfp4 oracle, and logs.
        """
        inner = 256 if self._major == 10 and self.vllm < (0, 27) else 128
        if weight.split is Split.COLUMNS:
            return _to(rows, 256), _to(columns, inner)
        halves = 2 if "gate_up" in weight.name else 1
        return _to(_up(rows, halves), inner) * halves, _to(columns, 256)

    def _for_triton(self, weight: Weight, rows: int, columns: int, scheme: Scheme) -> int:
        """
        Return the bytes of an MXFP4 expert on Hopper, whose layout pads the values alone.

        Inputs to 256, and with triton_kernels 3.6 (0.17) the outputs of gate and up as well.
        Source: _swizzle_mxfp4 in mxfp4_utils.py, and logs: gpt-oss-120b of 0.14.1, 20b of 0.19.0.
        """
        if weight.split is Split.COLUMNS:
            columns = _to(columns, 64)
            outputs = rows
        else:
            halves = 2 if "gate_up" in weight.name else 1
            rows = _to(_up(rows, halves), 64) * halves
            outputs = _to(rows, 256) if self.vllm >= (0, 17) else rows
        scales = packed_bytes(rows, columns, scheme) - rows * columns // 2
        return outputs * _to(columns, 256) // 2 + scales


def _finer(weight: Weight, rows: int, columns: int, scheme: Scheme) -> Scheme:
    """
    Return the scheme of experts whose part on a rank is no multiple of the group: a finer one.

    Source: MoeWNA16Method.create_weights in quantization/moe_wna16.py, which takes such shapes.
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
"""They come with vLLM; before, Marlin is taken where nobody installed them."""
_APART = dict.fromkeys(("in_proj_b", "in_proj_a", "in_proj_ba"), ".gates")
"""Delta nets' gates: one tensor beside the one of the other projections into the layer
(qwen_gdn_linear_attn.py)."""
_FUSED = {Split.ROWS, Split.HEADS}
_MIB = 1 << 20


def allocated(size: int, vllm: tuple[int, ...]) -> int:
    """
    Return what a tensor of so many bytes takes of the GPU's memory when a release loads it.

    Above 10 MiB the allocator asks for multiples of 2 MiB and keeps a rest of at most 1 MiB with
    the tensor; from 0.21 on, which sets max_split_size_mb to 20 while it loads, any rest with a
    tensor of 20 MiB or more. Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch (kMinLargeAlloc,
    kRoundLarge, should_split), load_model in vllm/v1/worker/gpu_worker.py, and logs: Qwen2.5-7B
    takes 56 MiB more than its weights with 0.19, and 98 MiB with 0.23.
    """
    if size <= 10 * _MIB:
        return _to(size, 512)
    rounded = _to(size, 2 * _MIB)
    whole = vllm >= (0, 21) and size >= 20 * _MIB
    return rounded if whole or rounded - size <= _MIB else _to(size, 512)


def packed_bytes(rows: int, columns: int, scheme: Scheme) -> int:
    """Return what a weight of this shape takes under a scheme, with its scales and zero points."""
    size = _up(rows * columns * scheme.bits, 8)
    if scheme.block:
        return (
            size + _up(rows, scheme.block[0]) * _up(columns, scheme.block[1]) * scheme.scale_bytes
        )
    if scheme.group < 0:
        return size + scheme.scale_bytes
    groups = rows * _up(columns, scheme.group) if scheme.group else rows
    size += groups * scheme.scale_bytes
    if scheme.zero_points:
        size += _up(groups * scheme.bits, 8)
    if scheme.activation_order:
        size += columns * 8
    return size


def _up(number: int, by: int) -> int:
    return -(-number // by)


def _to(number: int, multiple: int) -> int:
    return _up(number, multiple) * multiple


_DTYPES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U32": 4,
    "U16": 2,
}
"""Bytes of a number, by safetensors' names."""

_FLOATS = {"F64", "F32", "F16", "BF16"}
_NOT_KEPT = (".g_idx", ".input_scale", ".k_scale", ".v_scale", ".weight_shape", ".inv_freq")
"""What checkpoints have and the loaded model does not, or only as one number."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_TOWERS = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|vit|image\w*|encoder|mm_\w+)\.")
_DRAFTS = re.compile(r"(?:^|\.)mtp")


def _measured(
    architecture: Architecture,
    quantization: Quantization | None,
    stored: Stored | int | None,
    plan: tuple[tuple[tuple[Kept, int], ...], tuple[int, ...], tuple[Kept, ...]],
) -> tuple[tuple[float, ...], int]:
    """
    Return by what each kind of layer is to be multiplied to agree with the stored tensors, and the
    bytes outside of the layers that are stored and of no known part.

    A factor that is far from one is a checkpoint of something else (a merged adapter, a draft), so
    it does not count. A total alone says nothing of layers; it counts where the architecture is not
    known exactly, and is more than the arithmetic by less than half.
    """
    kinds, kind_of, parts = plan
    neutral = (1.0,) * len(kinds), 0
    if not stored or (quantization and quantization.online):
        return neutral
    number = SIZES[architecture.dtype]
    whole = _Rank(Sharding(), number, (), as_stored=True)
    inexact = architecture.multimodal and bool(architecture.notes)
    known = sum(whole.weigh(kept) for kept in parts)
    if isinstance(stored, int):
        known += sum(whole.weigh(kinds[kind][0]) for kind in kind_of)
        return neutral[0], stored - known if inexact and known < stored < known * 1.5 else 0
    of_layer: Counter[int] = Counter()
    rest = 0
    for name, (dtype, shape) in stored.items():
        if name.endswith(_NOT_KEPT):
            continue
        scale = "scale" in name
        size = _DTYPES.get(dtype, 1) if scale or dtype not in _FLOATS else number
        size *= math.prod(shape)
        if _DRAFTS.search(name):
            continue
        if (found := _LAYER.search(name)) and not _TOWERS.search(name):
            of_layer[int(found.group(1))] += size
        elif not (architecture.tied and "lm_head" in name):
            rest += size
    factors = []
    for kind, (kept, _) in enumerate(kinds):
        numbers = [layer for layer, each in enumerate(kind_of) if each == kind]
        found_bytes = sum(of_layer[layer] for layer in numbers)
        expected = whole.weigh(kept) * len(numbers)
        factor = found_bytes / expected if expected else 1.0
        factors.append(factor if 1 / _FAR < factor < _FAR else 1.0)
    return tuple(factors), max(0, rest - known) if inexact else 0


_FAR = 4
"""Further from the arithmetic than this, stored tensors are not the layer's own."""
