"""Join the lists of all metrics that rules, dashboards and gates use. Pure."""

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
    Return {name: metric} of all metrics in the lists.

    Metrics that every target has, such as `up`, are only in the list of prometheus_metrics. Raises
    ValueError if a name is in the lists twice, because the two entries could contradict each other.
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
