"""Define the type of a metric. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

Release: TypeAlias = tuple[int, int]


class Job(StrEnum):
    """
    The server of a metric, which is the label `job` of its series and the group of its targets.
    """

    NODE = "node"  # node_exporter, with our own facts from its textfile collector
    DCGM = "dcgm"
    VLLM = "vllm"
    GATEWAY = "gateway"
    PROMETHEUS = "prometheus"
    ALERTMANAGER = "alertmanager"


@dataclass(frozen=True)
class Metric:
    """
    One metric, in its server's form.

    Attributes:
        name: the name with its exported suffix (`_total`); for a histogram, without `_bucket`.
        job: its server.
        type: the exported type.
        help: its meaning and unit, in one sentence without a full stop.
        labels: its series' own labels; `instance` and `job` come from the scrape.
        only: the targets with it, such as "H100 and newer" or "nodes with NVLink". Empty:
            every healthy target serves it, which a test checks.
        since, before: the server's releases that have it, [since, before); None for all known.
        source: the source of this entry: a document, a version, a measurement.
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
        """The names of the metric's series."""
        if self.type != "histogram":
            return (self.name,)
        return tuple(self.name + suffix for suffix in ("_bucket", "_count", "_sum"))
