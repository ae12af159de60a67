"""
Compute the bytes of weights on each GPU after loading. Pure.

The result corresponds to `Model loading took` in the start-up log, so it counts only memory that
remains after loading: packed weights with their scales and zero points, padded vocabularies and
experts, and the rotary tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import (
    Architecture,
    Layer,
    Part,
    Split,
    StagePlacement,
)
from gpufleet.sizing.architectures.description import Stored
from gpufleet.sizing.architectures.quantization_scheme import Quantization, Scheme
from gpufleet.sizing.rank_weights import SIZES, Kept, Rank, Sharding
from gpufleet.sizing.stored_weights import stored_factors


@dataclass(frozen=True)
class StageWeights:
    """The weights on the largest rank of one pipeline stage."""

    bytes: int
    layers: range
    layer_bytes: int = 0
    """Bytes of the decoder layers, without other parts such as the embedding and the head."""


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
) -> tuple[StageWeights, ...]:
    """
    Return the weights' bytes on the largest rank of each pipeline stage.

    `dtype` is `--dtype`. `stored` is the contents of the checkpoint: {tensor: (dtype, shape)} from
    the headers of its safetensors files, or its total bytes from the index. `partition` has the
    number of layers of each stage, as in VLLM_PP_LAYER_PARTITION. `compute_capability` determines
    which kernel vLLM uses for MXFP4 experts, FP8 blocks and zero points. The padding and the scales
    depend on this kernel. None means the usual kernel. Raises `FleetError` if the partition does
    not match the stages and layers.
    """
    plan = _plan(architecture, quantization, stored)
    number = SIZES[architecture.dtype if dtype == "auto" else dtype]
    rank = Rank(sharding, number, vllm, capability=compute_capability)
    sizes = [rank.weigh(kept) for kept in plan.kinds]
    sizes_of_parts = [rank.weigh(kept) for kept in plan.parts]
    ranges = layer_ranges(len(architecture.layers), sharding.pipeline, partition)
    workspace = _workspace(architecture, vllm)
    weighed = []
    for stage, layers in enumerate(ranges):
        first, last = stage == 0, stage == len(ranges) - 1
        in_layers = sum(
            round(sizes[kind] * plan.factors[kind]) * many
            for kind, many in Counter(plan.kind_of[layer] for layer in layers).items()
        )
        total = workspace + plan.unknown + in_layers
        for part, size in zip(architecture.parts, sizes_of_parts, strict=True):
            if _is_on(part, vllm, first=first, last=last, tied=architecture.tied):
                total += size
        weighed.append(StageWeights(total, layers, in_layers))
    return tuple(weighed)


def layer_ranges(
    layers: int, pipeline: int, partition: Sequence[int] | None = None
) -> tuple[range, ...]:
    """
    Return the layers of each pipeline stage.

    If the layers cannot be divided evenly, stages get one more layer each. vLLM begins with the
    stage before the last one and continues towards the first. Raises `FleetError` if the partition
    does not match `pipeline` and `layers`. Source: get_pp_indices in vllm/distributed/utils.py.
    """
    if partition is None:
        counts = [layers // pipeline] * pipeline
        for place in range(2, layers % pipeline + 2):
            counts[-place] += 1
    else:
        counts = list(partition)
        if len(counts) != pipeline or sum(counts) != layers:
            raise FleetError(
                f"VLLM_PP_LAYER_PARTITION has {len(counts)} stages with {sum(counts)} layers in "
                f"total, but the model has {layers} layers and --pipeline-parallel-size is "
                f"{pipeline}: write {pipeline} numbers that add up to {layers}"
            )
    ends = [sum(counts[: stage + 1]) for stage in range(pipeline)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _workspace(architecture: Architecture, vllm: tuple[int, ...]) -> int:
    """
    Return the bytes that vLLM allocates during loading besides weights: FlashInfer's workspace.

    The workspace is needed for latent attention. Some releases allocate it when they check the
    attention backends, even if FlashInfer is then not used. Source: g_fi_workspace in
    v1/attention/backends/mla/flashinfer_mla.py, created at import from 0.11.1 to 0.24, at first use
    from 0.25; logs of DeepSeek-V2-Lite and Kimi-VL with 0.19.
    """
    latent = architecture.has_latent_cache
    return 128 << 20 if latent and (0, 11, 1) <= vllm < (0, 25) else 0


def _is_on(part: Part, vllm: tuple[int, ...], *, first: bool, last: bool, tied: bool) -> bool:
    if part.everywhere and (part.everywhere_until is None or vllm < part.everywhere_until):
        return True
    match part.where:
        case StagePlacement.EVERY:
            return True
        case StagePlacement.LAST:
            return last
        case StagePlacement.FIRST:
            # If the head is the embedding, the last stage also needs the embedding.
            return first or (last and tied and _is_embedding(part))


def _is_embedding(part: Part) -> bool:
    return any(weight.split is Split.VOCABULARY for weight in part.weights)


@dataclass(frozen=True)
class _Plan:
    """All weights of a model, each with its quantization scheme. Equal layers appear only once."""

    architecture: Architecture
    quantization: Quantization | None
    kinds: tuple[Kept, ...]
    """The weights of each different kind of layer."""
    kind_of: tuple[int, ...]
    """For each layer, the index of its kind in `kinds`."""
    parts: tuple[Kept, ...]
    factors: tuple[float, ...]
    """
    For each kind of layer, the factor that scales the computed size to the size of the stored
    tensors.
    """
    unknown: int
    """Bytes of stored tensors outside of the layers and of all known parts."""
    stored: Stored | int | None


_plans: dict[tuple[int, int, int], _Plan] = {}
_MOST_PLANS = 256


def _plan(
    architecture: Architecture, quantization: Quantization | None, stored: Stored | int | None
) -> _Plan:
    """
    Return the plan of these objects from the cache; create it if it is missing.

    The objects are so large that hashing them would be slow. The key of the cache is therefore
    their identity (`id`). A plan refers to its objects, so Python cannot reuse their identity while
    the plan is in the cache.
    """
    key = (id(architecture), id(quantization), stored if isinstance(stored, int) else id(stored))
    if found := _plans.get(key):
        return found
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    made = _plans[key] = _new_plan(architecture, quantization, stored)
    return made


def _new_plan(
    architecture: Architecture, quantization: Quantization | None, stored: Stored | int | None
) -> _Plan:
    kinds: dict[tuple[int, tuple[Scheme | None, ...]], int] = {}
    listed: list[Kept] = []
    kind_of: list[int] = []
    for number, layer in enumerate(architecture.layers):
        schemes = _schemes(layer, f"{architecture.prefix}{number}.", quantization)
        # Families whose layers are all equal use the same object for them.
        key = (id(layer), schemes)
        if key not in kinds:
            kinds[key] = len(listed)
            listed.append(tuple(zip(layer.weights, schemes, strict=True)))
        kind_of.append(kinds[key])
    parts = tuple(
        tuple(
            (
                weight,
                quantization.scheme_of(weight.name, head=part.name == "head", expert=weight.expert)
                if quantization
                and weight.linear
                and not _is_unquantized(part, quantization, architecture.name)
                else None,
            )
            for weight in part.weights
        )
        for part in architecture.parts
    )
    factors, unknown = stored_factors(
        architecture, quantization, stored, kinds=listed, kind_of=kind_of, parts=parts
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


def _is_unquantized(part: Part, quantization: Quantization, architecture: str) -> bool:
    """
    Return whether a tower stays unquantized although the config does not state it.

    The tools of the methods in `_TEXT_ONLY` quantize only the text part, and do not list the tower
    as an exception. Source: _maybe_ignore_quant_config in vLLM's qwen2_5_vl.py and others.
    kimi_k25.py does not quantize the tower with compressed-tensors.
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
    # Weights of separate draft layers ("mtp.") have whole names, without the number of a layer
    # before them.
    return tuple(
        quantization.scheme_of(
            weight.name if weight.name.startswith("mtp.") else prefix + weight.name,
            expert=weight.expert,
        )
        if weight.linear
        else None
        for weight in layer.weights
    )
