"""
Estimate the start-up memory that cannot be computed from a config, from recorded starts. Pure.

The memory of a start consists of one or more of the `PARTS`. The range of a part goes from the
lowest to the highest measured value, with a margin. To get the sum of several parts, the low ends
are added, and the high ends are added, because a new release or a different host makes several
parts larger at once. The range of this sum is then narrowed to the share `AT_ONCE`, because in no
recorded start all parts were at their ends at once.
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
    """An estimated number of bytes, as a range from `low` to `high`."""

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
        Return the estimate whose ends are the sums of both low ends and of both high ends.

        The errors are added in full (not as a root of squares), because they are not independent.
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
Ranges by judgement, not by measurement. They apply to parts for which there are too few recorded
starts.

The parts are:
- process: the CUDA context (counted only before 0.9.1, vllm/v1/worker/gpu_worker.py), libraries,
  block tables, and cuBLAS workspaces. From 0.20, also memory that remains after compiling and after
  FlashInfer's sampler.
- images: the run of the encoder alone. `_is_long_encoder_run` decides whether it has many tokens.
- switched links and PCIe: the buffers of NCCL, and over NVLink also those of NVLS and of custom
  all-reduce.
- pipeline: activations of neighbouring stages that a stage holds.
- unified memory: the processes of the node use the same memory, so their allocations during the
  start are counted as the server's.
- sparse attention: its index, and the working memory of its kernels.
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
Ranges that are fitted to recorded starts: the 127 starts of docs/measured/sizing-accuracy.md that
have all required values. They are from 41 laboratories. `python -m tests.support.start_up_fit`
prints the ranges and explains the method.
"""

AT_ONCE = 0.73
"""
The largest measured distance between a start's memory and the middle of the summed ranges, as a
share of half the summed range. `start_up_fit` measured it on starts of laboratories that were not
used for the fit.
"""

_ENCODER = 2.5 * GIB
"""
Bytes of an encoder's run with 16,384 tokens. For Qwen3.5 and Qwen3.6, they are 1.7 to 2.6 GiB. If
the dummy run needs more, the encoder's run is not the peak. The encoder's run ends before the dummy
run begins, but its result stays in memory.
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
    """Return whether the encoder runs with more than 8,192 tokens; a video has up to 16,384."""
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
