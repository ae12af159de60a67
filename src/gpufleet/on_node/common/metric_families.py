"""RUNS ON THE NODE: define the metrics of gpufleet's programs on nodes, with their help texts.

No other list defines these metrics. For rules and dashboards,
`gpufleet.monitoring.metrics.gpufleet_metrics` adds the labels of each metric and where the metric
is served. docs/reference/node-metrics.md describes the source of each value.
"""

from __future__ import annotations

from typing import Dict, Tuple

GAUGE, COUNTER = "gauge", "counter"

# {name without prefix: (type, help text with the unit)}
_FAMILIES = {
    # on_node/monitoring/node_facts.py: facts.prom
    "facts_timestamp_seconds": (
        GAUGE, "When these facts were read, in seconds since 1970"),
    "facts_failed": (
        GAUGE, "1 if this part of the facts could not be read, so its series are missing"),
    "deploy_timestamp_seconds": (
        GAUGE, "When a deploy last ended on the node, in seconds since 1970"),
    "node_info": (
        GAUGE, "Always 1. The labels say what the node runs; an empty label means none"),
    "driver_mismatch": (
        GAUGE, "1 if this part of the driver has a different version than the loaded module"),
    "reboot_pending": (
        GAUGE, "1 if the node must be rebooted, by reason"),
    "node_unchecked": (
        GAUGE, "1 if no check has passed since the driver changed, so no stage can start"),
    "gpus": (
        GAUGE, "How many GPUs the node should have (expected) and has (present)"),
    "stage_info": (
        GAUGE, "Always 1. The labels describe a stage"),
    "stage_active": (
        GAUGE, "1 if a stage's unit is active, else 0"),
    "stage_restarts_total": (
        COUNTER, "Number of restarts of a stage's unit that systemd did by itself"),
    # These metrics are for nodes without DCGM.
    "gpu_temperature_celsius": (
        GAUGE, "Temperature of a GPU, in degrees Celsius"),
    "gpu_memory_used_bytes": (
        GAUGE, "GPU memory in use, in bytes"),
    "gpu_memory_free_bytes": (
        GAUGE, "GPU memory that is free, in bytes"),
    "gpu_power_watts": (
        GAUGE, "Power draw of a GPU, in watts"),
    "gpu_utilization_ratio": (
        GAUGE, "Share of the last sample period in which a GPU kernel ran, from 0 to 1"),
    "gpu_sm_clock_hertz": (
        GAUGE, "Clock of the streaming multiprocessors, in hertz"),
    "gpu_ecc_uncorrected_total": (
        COUNTER, "Memory errors that could not be corrected, since the driver was loaded"),
    "gpu_row_remap_pending": (
        GAUGE, "1 if rows of GPU memory will be remapped at the next reset"),
    "gpu_row_remap_failure": (
        GAUGE, "1 if a row of GPU memory could not be remapped, so the board must be replaced"),
    "gpu_xid_errors_total": (
        COUNTER, "Xid errors since boot, by number, as far as the kernel log still has them"),
    # on_node/monitoring/record.py: check.prom and drift.prom
    "check_findings": (
        GAUGE, "Number of findings of the last recorded check, by severity"),
    "check_timestamp_seconds": (
        GAUGE, "When the node was last checked, in seconds since 1970"),
    "drift_differences": (
        GAUGE, "Number of differences from the declaration, by when they take effect"),
    "drift_unknown": (
        GAUGE, "1 if a part of the node could not be compared with the declaration"),
    "drift_timestamp_seconds": (
        GAUGE, "When the node was last compared with the declaration, in seconds since 1970"),
    # the watchdog: watchdog.prom
    "watchdog_mode_info": (
        GAUGE, "Always 1. The labels say what the watchdog does about a stalled stage"),
    "watchdog_stalled": (
        GAUGE, "1 if a stage has work and makes no progress"),
    "watchdog_idle_seconds": (
        GAUGE, "Seconds since a stage with work last made progress"),
    "watchdog_stalls_total": (
        COUNTER, "Number of times that a stage was found stalled"),
    "watchdog_restarts_total": (
        COUNTER, "Number of times that the watchdog restarted a stage"),
    "watchdog_timestamp_seconds": (
        GAUGE, "When the watchdog last checked the stages, in seconds since 1970"),
}  # fmt: skip

FAMILIES: Dict[str, Tuple[str, str]] = {
    "gpufleet_" + name: about for name, about in _FAMILIES.items()
}
