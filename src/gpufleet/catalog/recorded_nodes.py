"""
Recorded probes of healthy hardware, by the names for `--as`.

`data/nodes/*.json` are documents that the probe printed on the lab's machines, whose profiles
(`lab/profiles/*.conf`) state what of the hardware is documented and what is assumed. `python -m
tests.support.record_node` rewrites them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion

_DATA = Path(__file__).with_name("data") / "nodes"


@cache
def names() -> tuple[str, ...]:
    """Return the hardware that is known by name."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.json")))


def document(name: str) -> dict[str, Any]:
    """
    Return the probe's document of one kind of node; the caller may change it.

    Raises `FleetError` for an unknown name, with the known ones.
    """
    if name not in names():
        raise FleetError(
            f"no hardware is named {name!r}{suggestion(name, names())}; known are "
            f"{', '.join(names())}"
        )
    found: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found
