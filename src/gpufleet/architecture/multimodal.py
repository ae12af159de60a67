"""Models that also see or hear: the text part and the tower beside it.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpufleet.architecture.parts import Architecture

BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {}
