"""The bytes of weights that each GPU holds after vLLM has loaded a model.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpufleet.architecture.parts import Architecture
from gpufleet.architecture.quantization import Quantization


@dataclass(frozen=True)
class Sharding:
    """Over how many GPUs, and how, a model is divided."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    """Experts are divided as a whole, over tensor x data ranks."""


@dataclass(frozen=True)
class Weighed:
    """The largest rank of one pipeline stage."""

    bytes: int
    layers: range


def weight_bytes(
    architecture: Architecture,
    quantization: Quantization | None,
    sharding: Sharding,
    *,
    dtype: str = "auto",
    stored: Mapping[str, tuple[str, tuple[int, ...]]] | int | None = None,
    vllm: tuple[int, ...],
    partition: Sequence[int] | None = None,
) -> tuple[Weighed, ...]:
    """
    Return what the weights take on the largest rank of each pipeline stage.

    `dtype` is `--dtype`. `stored` says what the checkpoint has: {tensor: (dtype, shape)} from the
    headers of its safetensors files, or its total bytes from the index. `partition`: layers of each
    stage, as in VLLM_PP_LAYER_PARTITION.
    """
    raise NotImplementedError


def layer_ranges(
    layers: int, pipeline: int, partition: Sequence[int] | None = None
) -> tuple[range, ...]:
    """
    Return the layers of each pipeline stage.

    The layers that do not divide go to the stages before the last one, one each, from the back.
    Source: get_pp_indices in vllm/distributed/utils.py.
    """
    raise NotImplementedError
