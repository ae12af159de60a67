"""Which Prometheus metrics vLLM of one release has.  Pure.

Contract: names are those that /metrics shows. A metric that is not here, the release's code does
not name; names that it puts together while it runs (those of some KV connectors) are not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from gpufleet.flags.schema import packaged_text


@dataclass(frozen=True, slots=True)
class Metric:
    """
    One metric; `type` is counter, gauge, histogram, summary or info.

    `hidden`: /metrics has it only with --show-hidden-metrics-for-version.
    """

    name: str
    type: str
    help: str
    deprecated: bool
    hidden: bool


@cache
def load(version: str) -> Mapping[str, Metric]:
    """
    Return the metrics of one packaged release by name.

    Raises `FleetError` for a release that is not in the package, as `schema.load` does.
    """
    return from_document(json.loads(packaged_text("metrics", version)))


def from_document(document: Mapping[str, Any]) -> Mapping[str, Metric]:
    """Return the metrics in the part "metrics" of a document that `extract` wrote."""
    return {
        name: Metric(name, entry["type"], entry["help"], entry["deprecated"], entry["hidden"])
        for name, entry in document.items()
    }
