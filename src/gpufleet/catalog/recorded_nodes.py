"""
Return recorded probes of healthy hardware, by the names that `--as` accepts.

`data/nodes/*.json` are probe documents from the lab's machines. The profiles of these machines
(`lab/profiles/*.conf`) state which hardware facts are documented and which are assumed. `python -m
tests.support.record_node` writes the files again.
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
    """Return the names of the recorded hardware."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.json")))


def document(name: str) -> dict[str, Any]:
    """
    Return the probe document of one type of node. The caller may change the document.

    Raises `FleetError` with the known names if the name is unknown.
    """
    if name not in names():
        raise FleetError(
            f"there is no recorded hardware {name!r}{suggestion(name, names())}; recorded "
            "hardware: "
            f"{', '.join(names())}"
        )
    found: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found
