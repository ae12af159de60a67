"""Rules over the fleet's gpu metrics. Pure."""

from __future__ import annotations

from gpufleet.monitoring.rule import Alert, Recording

RECORDINGS: tuple[Recording, ...] = ()
ALERTS: tuple[Alert, ...] = ()
