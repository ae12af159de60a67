"""What the fleet's node metrics are. Pure."""

from __future__ import annotations

from gpufleet.monitoring.metric import Metric

METRICS: tuple[Metric, ...] = ()
