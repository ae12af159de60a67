"""Compute the current speed of replicas from two readings of their /metrics. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.engines.engine import Measure
from gpufleet.engines.metrics_page import expected_name, read_page
from gpufleet.errors import FleetError
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.serving.rank_status import reason

MEASURES = (
    Measure.ITL,
    Measure.TTFT,
    Measure.PROMPT_TOKENS,
    Measure.E2E,
    Measure.PREEMPTED,
    Measure.RUNNING,
    Measure.WAITING,
    Measure.KV_USE,
)

APART_SECONDS = 3
"""
The seconds between the two readings. In this time, a saturated server generates hundreds of tokens.
"""


@dataclass(frozen=True)
class Histogram:
    """
    The observations between two readings, as {bound: number of observations up to this bound}. The
    last bound is infinite.
    """

    counts: Mapping[float, float]

    @property
    def total(self) -> float:
        """Return the number of observations."""
        return max(self.counts.values(), default=0.0)

    def quantile(self, share: float) -> float:
        """
        Return the upper bound of the bucket that contains the quantile. It is infinite if the
        quantile is above all finite bounds.
        """
        return next(at for at, count in self.counts.items() if count >= share * self.total)

    def share_above(self, value: float) -> float:
        """Return the share of the observations that are above the bucket which contains a value."""
        if not self.total:
            return 0.0
        below = next(count for at, count in self.counts.items() if at >= value)
        return 1 - below / self.total

    @property
    def mean(self) -> float:
        """Return the mean. Each observation counts with the middle of its bucket."""
        sums, before, low = 0.0, 0.0, 0.0
        for at, count in self.counts.items():
            middle = low if math.isinf(at) else (low + at) / 2
            sums, before, low = sums + middle * (count - before), count, at
        return sums / self.total


@dataclass(frozen=True)
class ReplicaSpeed:
    """The requests, latencies and load of one replica in the time between two readings."""

    itl: Histogram
    ttft: Histogram
    prompts: Histogram
    """The numbers of prompt tokens of finished requests."""
    preempted: float
    """The number of preemptions, which happen when the KV cache is full."""
    running: float
    waiting: float
    kv_use: float
    """The share of the KV cache that is used, from 0 to 1, on the engine with the highest share."""
    missing: tuple[str, ...] = field(default=())
    """The metrics that the server's release does not have."""
    e2e: Histogram = field(default_factory=lambda: Histogram({}))
    """The times of whole requests. For a model that generates no text, this is the only latency."""


def replica_speeds(answers: Mapping[str, Mapping[str, Any] | str]) -> dict[str, ReplicaSpeed | str]:
    """Return the speed of each replica by its id, or a sentence if the speed could not be read."""
    servers: dict[str, list[Any]] = defaultdict(list)
    found: dict[str, ReplicaSpeed | str] = {}
    for node, answer in answers.items():
        # If the node did not answer, its replicas are unknown. The status contains the node.
        if isinstance(answer, str):
            continue
        try:
            with refuse_malformed(node):
                if "missing" in answer["replicas"]:
                    continue
                for replica, said in answer["replicas"].items():
                    if "missing" in said:
                        found[replica] = f"{node}: {reason(said)}"
                    else:
                        servers[replica] += said["servers"].values()
        except FleetError as error:
            found.update(dict.fromkeys(answer.get("replicas", ()), str(error)))
    for replica, pairs in servers.items():
        if pairs and replica not in found:
            try:
                found[replica] = _speed(pairs)
            except (KeyError, TypeError, ValueError) as error:
                found[replica] = f"its /metrics is invalid: {error}"
    return found


def _speed(pairs: list[Any]) -> ReplicaSpeed | str:
    looks = []
    for first, last in pairs:
        for each in (first, last):
            if "error" in each:
                return f"/metrics: {each['error']}"
        looks.append((_series(first["text"]), _series(last["text"])))
    measured = {measure for _, last in looks for measure, series in last.items() if series}

    def grown(name: Measure) -> Histogram:
        counts: dict[float, float] = defaultdict(float)
        for first, last in looks:
            for labels, value in last[name].items():
                # If the server restarted between the two readings, it counts from 0 again.
                before = first[name].get(labels, 0.0)
                counts[float(dict(labels)["le"])] += value - (before if before <= value else 0)
        return Histogram(dict(sorted(counts.items())))

    def now(name: Measure) -> list[float]:
        return [value for _, last in looks for value in last[name].values()]

    preempted = sum(
        max(0.0, value - first[Measure.PREEMPTED].get(labels, 0.0))
        for first, last in looks
        for labels, value in last[Measure.PREEMPTED].items()
    )
    page = read_page(pairs[-1][-1]["text"])
    return ReplicaSpeed(
        grown(Measure.ITL),
        grown(Measure.TTFT),
        grown(Measure.PROMPT_TOKENS),
        preempted,
        sum(now(Measure.RUNNING)),
        sum(now(Measure.WAITING)),
        max(now(Measure.KV_USE), default=0.0),
        tuple(expected_name(each, page) for each in MEASURES if each not in measured),
        grown(Measure.E2E),
    )


def _series(text: str) -> dict[Measure, dict[tuple[tuple[str, str], ...], float]]:
    """
    Return the samples of each measure by their labels. Raises `ValueError` if the page is invalid.
    """
    page = read_page(text)
    for name, rows in page.samples.items():
        for _, value in rows:
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}")
    return {
        measure: {tuple(sorted(labels.items())): value for labels, value in page.measured(measure)}
        for measure in MEASURES
    }
