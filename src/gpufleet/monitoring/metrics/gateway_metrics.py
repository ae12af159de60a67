"""What the fleet's gateway metrics are. Pure."""

from __future__ import annotations

from gpufleet.monitoring.metric import Metric

METRICS: tuple[Metric, ...] = ()
