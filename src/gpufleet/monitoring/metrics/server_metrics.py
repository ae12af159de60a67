"""What the fleet's server metrics are. Pure."""

from __future__ import annotations

from gpufleet.monitoring.metric import Metric

METRICS: tuple[Metric, ...] = ()
