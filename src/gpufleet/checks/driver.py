"""The driver's own state and versions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpufleet.checks.finding import Problem
from gpufleet.checks.reading import GpuReading, Reading

WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {}

OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {}

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {}
