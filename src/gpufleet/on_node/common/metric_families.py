"""RUNS ON THE NODE: the metrics of gpufleet's programs on nodes, with their help texts.

This is the only list. `gpufleet.monitoring.metrics.gpufleet_metrics` adds labels and the place
where each metric is served, for rules and dashboards. docs/reference/node-metrics.md has the source
of each value.
"""

from __future__ import annotations

from typing import Dict, Tuple

GAUGE, COUNTER = "gauge", "counter"

# Name without prefix: type, and what it is, with its unit.
_FAMILIES = {
    # on_node/monitoring/node_facts.py: facts.prom
    "facts_timestamp_seconds": (
        GAUGE, "When these facts were read, in seconds since 1970"),
    "facts_failed": (
        GAUGE, "Whether a part of the facts could not be read: its series are missing then"),
    "deploy_timestamp_seconds": (
        GAUGE, "When a deploy last ended on the node, in seconds since 1970"),
    "node_info": (
        GAUGE, "Always 1; its labels say what the node runs; an empty label: none"),
    "driver_mismatch": (
        GAUGE, "Whether a part of the driver has another version than the loaded module"),
    "reboot_pending": (
        GAUGE, "Whether the node waits for a reboot, by reason"),
    "node_unchecked": (
        GAUGE, "Whether the driver was changed and no check has passed since: nothing starts"),
    "gpus": (
        GAUGE, "How many GPUs the node should have (expected) and has (present)"),
    "stage_info": (
        GAUGE, "Always 1; its labels say what a stage is"),
    "stage_active": (
        GAUGE, "Whether a stage's unit is active"),
    "stage_restarts_total": (
        COUNTER, "How often systemd restarted a stage's unit by itself"),
    # The same where there is no DCGM.
    "gpu_temperature_celsius": (
        GAUGE, "Temperature of a GPU, in degrees"),
    "gpu_memory_used_bytes": (
        GAUGE, "GPU memory in use, in bytes"),
    "gpu_memory_free_bytes": (
        GAUGE, "GPU memory that is free, in bytes"),
    "gpu_power_watts": (
        GAUGE, "Power draw of a GPU, in watts"),
    "gpu_utilization_ratio": (
        GAUGE, "Share of the last sample period in which a kernel ran, 0 to 1"),
    "gpu_sm_clock_hertz": (
        GAUGE, "Clock of the streaming multiprocessors, in hertz"),
    "gpu_ecc_uncorrected_total": (
        COUNTER, "Memory errors that could not be corrected, since the driver was loaded"),
    "gpu_row_remap_pending": (
        GAUGE, "Whether rows of GPU memory are remapped at the next reset"),
    "gpu_row_remap_failure": (
        GAUGE, "Whether a row of GPU memory could not be remapped: the board is to be replaced"),
    "gpu_xid_errors_total": (
        COUNTER, "Xid errors by number, since boot as far as the kernel log reaches"),
    # on_node/monitoring/record.py: check.prom and drift.prom
    "check_findings": (
        GAUGE, "Findings of the last check that was recorded, by severity"),
    "check_timestamp_seconds": (
        GAUGE, "When the node was last checked, in seconds since 1970"),
    "drift_differences": (
        GAUGE, "Differences from the declaration, by when they matter"),
    "drift_unknown": (
        GAUGE, "Whether something could not be compared with what is declared"),
    "drift_timestamp_seconds": (
        GAUGE, "When the node was last compared with what is declared, in seconds since 1970"),
    # the watchdog: watchdog.prom
    "watchdog_mode_info": (
        GAUGE, "Always 1; its labels say what the watchdog does about a stalled stage"),
    "watchdog_stalled": (
        GAUGE, "Whether a stage has work and makes no progress"),
    "watchdog_idle_seconds": (
        GAUGE, "Seconds since a stage with work last made progress"),
    "watchdog_stalls_total": (
        COUNTER, "How often a stage was found stalled"),
    "watchdog_restarts_total": (
        COUNTER, "How often the watchdog restarted a stage"),
    "watchdog_timestamp_seconds": (
        GAUGE, "When the watchdog last looked, in seconds since 1970"),
}  # fmt: skip

FAMILIES: Dict[str, Tuple[str, str]] = {
    "gpufleet_" + name: about for name, about in _FAMILIES.items()
}
