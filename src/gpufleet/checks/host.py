"""The machine around the GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpufleet.checks.finding import Problem
from gpufleet.checks.reading import Reading

WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {}
