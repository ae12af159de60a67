"""Define the type of a metric. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

Release: TypeAlias = tuple[int, int]


class Job(StrEnum):
    """
    The server that exports a metric. It is the label `job` of the metric's series, and its targets
    form one group.
    """

    NODE = "node"  # node_exporter, including gpufleet's facts from its textfile collector
    DCGM = "dcgm"
    VLLM = "vllm"
    GATEWAY = "gateway"
    PROMETHEUS = "prometheus"
    ALERTMANAGER = "alertmanager"


@dataclass(frozen=True)
class Metric:
    """
    One metric, as its server exports it.

    Attributes:
        name: the name with its exported suffix (`_total`). For a histogram, without `_bucket`.
        job: the server that exports the metric.
        type: the exported type.
        help: the meaning and the unit, in one sentence without a full stop.
        labels: the labels of the series, without `instance` and `job`, which the scrape adds.
        only: the targets that have the metric, such as "H100 and newer" or "nodes with NVLink".
            If it is empty, every healthy target has the metric, which a test checks.
        since, before: the releases of the server that have the metric: from `since` up to, but not
            including, `before`. None: no limit among the known releases.
        source: where this entry comes from: a document, a version, a measurement.
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
