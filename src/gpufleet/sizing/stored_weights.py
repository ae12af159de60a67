"""Correct the computed size of weights with the sizes of a checkpoint's stored tensors. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from gpufleet.sizing.architectures.components import (
    Architecture,
)
from gpufleet.sizing.architectures.description import Stored
from gpufleet.sizing.architectures.quantization_scheme import Quantization
from gpufleet.sizing.rank_weights import SIZES, Kept, Rank, Sharding

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
"""Bytes per number, by safetensors' names."""

_FLOATS = {"F64", "F32", "F16", "BF16"}
_NOT_KEPT = (".g_idx", ".input_scale", ".k_scale", ".v_scale", ".weight_shape", ".inv_freq")
"""Endings of tensors that the loaded model does not have, or has only as a single number."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_TOWERS = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|vit|image\w*|encoder|mm_\w+)\.")
_DRAFTS = re.compile(r"(?:^|\.)mtp")


def stored_factors(
    architecture: Architecture,
    quantization: Quantization | None,
    stored: Stored | int | None,
    *,
    kinds: Sequence[Kept],
    kind_of: Sequence[int],
    parts: Sequence[Kept],
) -> tuple[tuple[float, ...], int]:
    """
    Return the ratio of stored to computed size for each kind of layer, and the unknown bytes.

    Unknown bytes are stored tensors that belong to no layer and no known part. `kind_of` has each
    layer's index in `kinds`. If `stored` is only a total, the sizes of layers are unknown, and all
    ratios are 1. The total is then used only for unknown bytes, and only if the architecture is not
    known exactly and the total exceeds the computed size by less than half.
    """
    neutral = (1.0,) * len(kinds), 0
    if not stored or (quantization and quantization.online):
        return neutral
    whole = Rank(Sharding(), SIZES[architecture.dtype], (), as_stored=True)
    inexact = architecture.multimodal and bool(architecture.notes)
    known = sum(whole.weigh(kept) for kept in parts)
    if isinstance(stored, int):
        known += sum(whole.weigh(kinds[kind]) for kind in kind_of)
        return neutral[0], stored - known if inexact and known < stored < known * 1.5 else 0
    of_layer, rest = _stored_bytes(architecture, stored)
    expected = [whole.weigh(kept) for kept in kinds]
    return _factors(expected, kind_of, of_layer), max(0, rest - known) if inexact else 0


def _stored_bytes(architecture: Architecture, stored: Stored) -> tuple[Counter[int], int]:
    """Return the bytes of each layer's stored tensors, and of the tensors outside of layers."""
    of_layer: Counter[int] = Counter()
    rest = 0
    for name, (dtype, shape) in stored.items():
        if name.endswith(_NOT_KEPT) or _DRAFTS.search(name):
            continue
        as_stored = "scale" in name or dtype not in _FLOATS
        size = _DTYPES.get(dtype, 1) if as_stored else SIZES[architecture.dtype]
        size *= math.prod(shape)
        if (found := _LAYER.search(name)) and not _TOWERS.search(name):
            of_layer[int(found.group(1))] += size
        elif not (architecture.tied and "lm_head" in name):
            rest += size
    return of_layer, rest


def _factors(
    expected: Sequence[int], kind_of: Sequence[int], of_layer: Counter[int]
) -> tuple[float, ...]:
    """
    Return the ratio of stored to computed bytes for each kind of layer.

    A ratio far from 1 means that the checkpoint is of a different kind (a merged adapter, a draft).
    Such a ratio is replaced by 1.
    """
    factors = []
    for kind, bytes_of_one in enumerate(expected):
        numbers = [layer for layer, each in enumerate(kind_of) if each == kind]
        whole = bytes_of_one * len(numbers)
        factor = sum(of_layer[layer] for layer in numbers) / whole if whole else 1.0
        factors.append(factor if 1 / _FAR < factor < _FAR else 1.0)
    return tuple(factors)


_FAR = 4
"""
Maximum ratio between stored and computed bytes. If the ratio is larger, the stored tensors do not
belong to the layer.
"""
