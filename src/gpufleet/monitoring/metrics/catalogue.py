"""Join the lists of all metrics for rules, dashboards and gates. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gpufleet.monitoring.metrics import (
    dcgm_metrics,
    gateway_metrics,
    gpufleet_metrics,
    node_metrics,
    prometheus_metrics,
    vllm_metrics,
)
from gpufleet.monitoring.metrics.metric import Metric

LISTS: tuple[tuple[Metric, ...], ...] = (
    node_metrics.METRICS,
    gpufleet_metrics.METRICS,
    dcgm_metrics.METRICS,
    vllm_metrics.METRICS,
    gateway_metrics.METRICS,
    prometheus_metrics.METRICS,
)


def join_lists(*lists: tuple[Metric, ...]) -> dict[str, Metric]:
    """
    Return {name: metric} of lists without common names.

    `up` and other metrics that every target has are only in the list of prometheus_metrics. Raises
    ValueError for a name in two lists, which could contradict each other.
    """
    found: dict[str, Metric] = {}
    for metric in (metric for metrics in lists for metric in metrics):
        if metric.name in found:
            raise ValueError(f"{metric.name} is listed twice in gpufleet/monitoring/metrics/")
        found[metric.name] = metric
    return found


METRICS: Mapping[str, Metric] = MappingProxyType(join_lists(*LISTS))
SERIES: Mapping[str, Metric] = MappingProxyType(
    {series: metric for metric in METRICS.values() for series in metric.series}
)
