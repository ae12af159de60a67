"""One metric that something in the fleet serves. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

Release: TypeAlias = tuple[int, int]


class Job(StrEnum):
    """The server of a metric: the label `job` of its series, and the group of its targets."""

    NODE = "node"  # node_exporter, with our own facts from its textfile collector
    DCGM = "dcgm"
    VLLM = "vllm"
    GATEWAY = "gateway"
    PROMETHEUS = "prometheus"
    ALERTMANAGER = "alertmanager"


@dataclass(frozen=True)
class Metric:
    """
    One metric, as its server writes it.

    Attributes:
        name: with the suffix that is on the wire (`_total`); of a histogram without `_bucket`.
        job: who serves it.
        type: as the exposition says it.
        help: what it is, with its unit, in one sentence without a final point.
        labels: those that its series have of their own; `instance` and `job` come from the scrape.
        only: where it is served, if not everywhere: "H100 and newer", "nodes with NVLink". Empty:
            every healthy target serves it, and a test holds that.
        since, before: the releases of its server that have it, [since, before); None: all known.
        source: where this was read: a document, a version, a measurement.
    """

    name: str
    job: Job
    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    only: str = ""
    since: Release | None = None
    before: Release | None = None
    source: str = ""

    @property
    def series(self) -> tuple[str, ...]:
        """The names that its series have."""
        if self.type != "histogram":
            return (self.name,)
        return tuple(self.name + suffix for suffix in ("_bucket", "_count", "_sum"))
