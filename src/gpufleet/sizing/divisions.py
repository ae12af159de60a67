"""Estimate the memory of a model for every possible division over the GPUs of a node. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpufleet.sizing.architectures.description import Description
from gpufleet.sizing.fit import size
from gpufleet.sizing.options import Options, Sizing


@dataclass(frozen=True)
class SizedDivision:
    """The parallel sizes of a division, and the estimated memory of one GPU."""

    tensor: int
    pipeline: int
    data: int
    sizing: Sizing

    @property
    def at_once(self) -> float:
        """Return how many requests of maximum length all engines together can hold at once."""
        return self.sizing.max_concurrency * self.data

    def as_json(self) -> dict[str, Any]:
        """Return the parallel sizes and the values of the sizing as a dict for JSON."""
        sizes = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "data_parallel_size": self.data,
        }
        return {**sizes, **self.sizing.as_json()}


def divisions(description: Description, options: Options, gpus: int) -> Iterator[SizedDivision]:
    """
    Yield each division of `gpus` GPUs, beginning with the largest tensor parallel size.

    Tensor and pipeline parallel sizes are powers of two. Divisions with more stages than layers are
    omitted. The parallel sizes of `options` are replaced.
    """
    layers = len(description.architecture.layers)
    for tensor in _powers_down(gpus):
        for pipeline in reversed([*_powers_down(gpus // tensor)]):
            data, rest = divmod(gpus, tensor * pipeline)
            if rest or pipeline > layers:
                continue
            divided = replace(
                options, tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data
            )
            yield SizedDivision(tensor, pipeline, data, size(description, divided))


def _powers_down(most: int) -> Iterator[int]:
    """
    Yield the powers of two up to `most`, the largest first.

    >>> [*_powers_down(6)]
    [4, 2, 1]
    """
    yield from (1 << power for power in reversed(range(most.bit_length())))
