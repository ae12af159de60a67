"""What gpufleet's own programs on nodes write for the node exporter's textfile collector. Pure.

`on_node/node_facts.py` writes facts.prom, `on_node/record.py` check.prom and drift.prom,
`on_node/watchdog.py` watchdog.prom; docs/node-facts.md says where each value is from.
"""

from __future__ import annotations

from typing import Literal

from gpufleet.monitoring.metric import Job, Metric

SINCE_BOOT = "since the node's boot, as far as its kernel log reaches"
WITHOUT_DCGM = "GPU nodes without DCGM"
GPU = ("gpu", "UUID")


def _gauge(name: str, help_text: str, *labels: str, only: str = "") -> Metric:
    return _metric("gauge", name, help_text, labels, only)


def _counter(name: str, help_text: str, *labels: str, only: str = "") -> Metric:
    return _metric("counter", name, help_text, labels, only)


def _metric(
    kind: Literal["counter", "gauge"],
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    only: str,
) -> Metric:
    return Metric(
        name=f"gpufleet_{name}",
        job=Job.NODE,
        type=kind,
        help=help_text,
        labels=labels,
        only=only,
        source="docs/node-facts.md",
    )


FACTS = (
    _gauge(
        "facts_timestamp_seconds",
        "When these facts were read, in seconds since 1970",
    ),
    _gauge(
        "facts_failed",
        "Whether a part of the facts could not be read (1): its series are missing then",
        "part",
    ),
    _gauge(
        "deploy_timestamp_seconds",
        "When a deploy last came to its end on the node, in seconds since 1970",
        "deploy",
        only="nodes that were deployed to since they have node facts",
    ),
    _gauge(
        "node_info",
        "Always 1; its labels say what the node runs, an empty one that it has none",
        "kernel",
        "driver_loaded",
        "driver_disk",
        "library",
        "fabric_manager",
        "lock",
        "release",
    ),
    _gauge(
        "driver_mismatch",
        "Whether a part (disk, library, fabric_manager) has another version than the loaded driver",
        "part",
        only="nodes with a loaded driver",
    ),
    _gauge(
        "reboot_pending",
        "Whether the node waits for a reboot, by reason (packages, kernel, driver)",
        "reason",
    ),
    _gauge(
        "node_unchecked",
        "Whether the node's driver was touched and no check has passed since: nothing starts there",
    ),
    _gauge(
        "gpus",
        "How many GPUs the node is to have (expected) and has (present)",
        "state",
        only="GPU nodes",
    ),
    _gauge(
        "stage_info",
        "Always 1; its labels say what a stage is",
        "stage",
        "model",
        "release",
        "unit",
        only="nodes with stages",
    ),
    _gauge(
        "stage_active",
        "Whether systemd says that a stage's unit is active",
        "stage",
        only="nodes with stages",
    ),
    _counter(
        "stage_restarts_total",
        "How often systemd started a stage's unit again by itself (NRestarts)",
        "stage",
        only="nodes with stages",
    ),
)

# The same as DCGM says where it is; rules take either (monitoring/rules/gpu_rules.py).
GPU_FALLBACK = (
    _gauge("gpu_temperature_celsius", "A GPU's temperature, in degrees", *GPU, only=WITHOUT_DCGM),
    _gauge("gpu_memory_used_bytes", "GPU memory in use, in bytes", *GPU, only=WITHOUT_DCGM),
    _gauge("gpu_memory_free_bytes", "GPU memory that is free, in bytes", *GPU, only=WITHOUT_DCGM),
    _gauge(
        "gpu_power_watts",
        "What a GPU takes, in watts",
        *GPU,
        only=f"{WITHOUT_DCGM}, boards that measure it",
    ),
    _gauge(
        "gpu_utilization_ratio",
        "Share of the last sample period in which a kernel ran, 0 to 1",
        *GPU,
        only=WITHOUT_DCGM,
    ),
    _gauge(
        "gpu_sm_clock_hertz",
        "Clock of the streaming multiprocessors, in hertz",
        *GPU,
        only=WITHOUT_DCGM,
    ),
    _counter(
        "gpu_ecc_uncorrected_total",
        "Memory errors that could not be corrected, since the driver was loaded",
        *GPU,
        only=f"{WITHOUT_DCGM}, boards with ECC",
    ),
    _gauge(
        "gpu_row_remap_pending",
        "Whether rows of GPU memory are remapped at the next reset",
        *GPU,
        only=f"{WITHOUT_DCGM}, Ampere and newer data centre boards",
    ),
    _gauge(
        "gpu_row_remap_failure",
        "Whether a row of GPU memory could not be remapped: the board has to be replaced",
        *GPU,
        only=f"{WITHOUT_DCGM}, Ampere and newer data centre boards",
    ),
    _counter(
        "gpu_xid_errors_total",
        f"Xid errors by number, {SINCE_BOOT}",
        *GPU,
        "xid",
        only=f"{WITHOUT_DCGM}, GPUs that had an Xid",
    ),
)

FINDINGS = (
    _gauge(
        "check_findings",
        "Findings of the last check by severity (block, unknown, warn, info), those of its GPUs too",
        "severity",
        only="nodes whose check was recorded",
    ),
    _gauge(
        "check_timestamp_seconds",
        "When the node was last checked, in seconds since 1970",
        only="nodes whose check was recorded",
    ),
    _gauge(
        "drift_differences",
        "What is not as declared, by when it matters (now, next_boot, next_upgrade)",
        "matters",
        only="nodes whose drift was recorded",
    ),
    _gauge(
        "drift_unknown",
        "Whether a part of the node could not be compared with what is declared",
        only="nodes whose drift was recorded",
    ),
    _gauge(
        "drift_timestamp_seconds",
        "When the node was last compared with what is declared, in seconds since 1970",
        only="nodes whose drift was recorded",
    ),
)

WATCHED = "stages with a watchdog"
WATCHDOG = (
    _gauge(
        "watchdog_mode_info",
        "Always 1; its labels say what is done about a stalled stage (warn, act)",
        "stage",
        "mode",
        only=WATCHED,
    ),
    _gauge(
        "watchdog_stalled",
        "Whether a stage has work and makes no progress",
        "stage",
        only=WATCHED,
    ),
    _gauge(
        "watchdog_idle_seconds",
        "Since a stage last made progress while it has work, in seconds",
        "stage",
        only=WATCHED,
    ),
    _counter(
        "watchdog_stalls_total",
        "How often a stage was found stalled",
        "stage",
        only=WATCHED,
    ),
    _counter(
        "watchdog_restarts_total",
        "How often the watchdog started a stage again",
        "stage",
        only=WATCHED,
    ),
    _gauge(
        "watchdog_timestamp_seconds",
        "When the watchdog last looked, in seconds since 1970",
        only="nodes with a watchdog",
    ),
)

METRICS: tuple[Metric, ...] = (*FACTS, *GPU_FALLBACK, *FINDINGS, *WATCHDOG)
