"""Rules over vLLM's metrics, some of them from what each model's clients were promised. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpufleet.monitoring.rule import Alert, Recording
from gpufleet.monitoring_settings import Objectives


def rules(objectives: Mapping[str, Objectives]) -> tuple[tuple[Recording, ...], tuple[Alert, ...]]:
    """Return recordings and alerts for the declared `{model: its objectives}`."""
    del objectives
    return (), ()
