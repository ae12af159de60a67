"""Each GPU: is it there, does it answer, may it work. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpufleet.checks.finding import Problem
from gpufleet.checks.reading import GpuReading, Reading

OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {}

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {}
