"""
Estimate the start-up memory that no config states, as ranges from recorded starts. Pure.

A start has one or more of the `PARTS`. The memory of each part is in a range from the lowest to the
highest measured value, with a margin. The lower ends of ranges are added, and so are the higher
ends, because a new release or a different host enlarges several parts together. The stated range is
the share `AT_ONCE` of the sum, because in no start all parts were at their ends at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.sizing.architectures.components import (
    Architecture,
    CompressedCache,
    LatentCache,
)
from gpufleet.sizing.dummy_run import GIB, DummyRun, peak_bytes


@dataclass(frozen=True)
class Estimate:
    """A number of bytes that no config states, as a range from `low` to `high`."""

    low: int
    high: int

    @property
    def bytes(self) -> int:
        """Return the middle of the range."""
        return (self.low + self.high) // 2

    @property
    def error_bytes(self) -> int:
        """Return half the width of the range."""
        return self.high - self.bytes

    def narrowed(self, share: float) -> Estimate:
        """Return the estimate with the same middle, and with its range narrowed to this share."""
        half = math.ceil(share * self.error_bytes)
        return Estimate(self.bytes - half, self.bytes + half)

    def __add__(self, other: Estimate) -> Estimate:
        """
        Return the sum of both ends, not the root of squares: all parts may be at an end at once.
        """
        return Estimate(self.low + other.low, self.high + other.high)


Ranges = Mapping[str, tuple[float, float]]
"""The range of each part in GiB, from low to high."""

PARTS: Ranges = {
    "process before 0.9.1": (0.3, 1.0),
    "process up to 0.16": (-0.1, 0.3),
    "process up to 0.19": (0.1, 0.6),
    "process from 0.20": (0.0, 1.5),
    "images": (-0.2, 0.7),
    "images, many tokens": (0.0, 2.8),
    "switched links up to 0.16": (0.2, 1.8),
    "switched links from 0.17": (0.5, 2.3),
    "switched links, over 4 GPUs": (0.5, 4.5),
    "PCIe up to 0.26": (-0.1, 0.7),
    "PCIe from 0.27": (0.0, 2.0),
    "pipeline": (-0.5, 2.0),
    "unified memory": (0.0, 7.0),
    "sparse attention": (0.0, 3.2),
}
"""
Assumed ranges for parts that too few starts show: a judgement, not a measurement.

process: the CUDA context (counted before 0.9.1 only, vllm/v1/worker/gpu_worker.py), libraries,
block tables, cuBLAS workspaces, from 0.20 what compiling and FlashInfer's sampler leave. images:
the encoder's own run over as many tokens as `_is_long_encoder_run` says. links: NCCL's buffers, and
NVLS's and custom all-reduce's over NVLink. pipeline: what a stage holds of its neighbours'
activations. unified memory: the node's processes use it too, and their allocations during the start
count as the server's. sparse attention: its index and its kernels' working memory.
"""

RANGES: Ranges = {
    "process before 0.9.1": (0.3, 1),
    "process up to 0.16": (-0.34, 0.22),
    "process up to 0.19": (-0.08, 0.62),
    "process from 0.20": (-0.53, 1.26),
    "images": (-0.67, 0.66),
    "images, many tokens": (0.36, 2.84),
    "switched links up to 0.16": (0.38, 1.49),
    "switched links from 0.17": (0.5, 2.3),
    "switched links, over 4 GPUs": (0.5, 4.5),
    "PCIe up to 0.26": (-0.09, 0.39),
    "PCIe from 0.27": (-1.28, 0.58),
    "pipeline": (-0.27, 1.34),
    "unified memory": (-1.01, 5.78),
    "sparse attention": (0, 3.2),
}
"""
Ranges that are fitted to the 127 starts of docs/measured/sizing-accuracy.md with all required
values, from 41 laboratories. `python -m tests.support.start_up_fit` prints the ranges and explains
the method.
"""

AT_ONCE = 0.73
"""
The largest distance of a start's memory from the middle of the summed ranges, as a share of the
ranges. The same program measured it on starts of laboratories that were left out of the fit.
"""

_ENCODER = 2.5 * GIB
"""
Maximum bytes of an encoder's run over 16,384 tokens if it is the largest part: 1.7 to 2.6 GiB for
Qwen3.5 and Qwen3.6. The run is over when the dummy run begins, but its result remains.
"""

_UNIFIED = {(8, 7), (11, 0), (12, 1)}
"""Capabilities of Jetson Orin, Jetson Thor and GB10, whose GPU has no memory of its own."""


def parts(
    architecture: Architecture, config: Mapping[str, Any] | None, run: DummyRun
) -> tuple[str, ...]:
    """Return the names of a start's PARTS, in their order."""
    major, minor = run.compute_capability or (9, 0)
    found = [_process(run.vllm)]
    if architecture.multimodal:
        many = _is_long_encoder_run(config, run) and not _is_long(architecture, config, run)
        found.append("images, many tokens" if many else "images")
    if run.tensor * run.data > 1:
        found.append(_links(run, switched=major in (9, 10)))
    if run.pipeline > 1:
        found.append("pipeline")
    if (major, minor) in _UNIFIED:
        found.append("unified memory")
    if is_sparse(architecture):
        found.append("sparse attention")
    return tuple(found)


def _process(vllm: tuple[int, ...]) -> str:
    for before, name in (((0, 9, 1), "before 0.9.1"), ((0, 17), "up to 0.16")):
        if vllm < before:
            return f"process {name}"
    return "process up to 0.19" if vllm < (0, 20) else "process from 0.20"


def _links(run: DummyRun, *, switched: bool) -> str:
    if switched and run.tensor * run.data > 4:
        return "switched links, over 4 GPUs"
    if switched:
        return f"switched links {'up to 0.16' if run.vllm < (0, 17) else 'from 0.17'}"
    return f"PCIe {'up to 0.26' if run.vllm < (0, 27) else 'from 0.27'}"


def _is_long_encoder_run(config: Mapping[str, Any] | None, run: DummyRun) -> bool:
    """Return whether the encoder runs over more than 8,192 tokens; a video has up to 16,384."""
    vision = (config or {}).get("vision_config") or {}
    return "temporal_patch_size" in vision or run.max_num_batched_tokens > 8192


def _is_long(architecture: Architecture, config: Mapping[str, Any] | None, run: DummyRun) -> bool:
    """
    Return whether the dummy run needs more memory than the encoder's run.

    The encoder's run is then not the peak.
    """
    return peak_bytes(architecture, config, run)[0] > _ENCODER


def is_sparse(architecture: Architecture) -> bool:
    return any(
        isinstance(cache, CompressedCache) or (isinstance(cache, LatentCache) and cache.indexer_dim)
        for layer in architecture.layers
        for cache in layer.caches
    )
