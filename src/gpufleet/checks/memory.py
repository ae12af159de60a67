"""Each GPU's memory: ECC, row remapping, retired pages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpufleet.checks.finding import Problem
from gpufleet.checks.reading import GpuReading

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {}
