"""
List the metrics that gpufleet writes into textfiles for the node exporter. Pure.

On each node, `on_node/monitoring/node_facts.py` writes facts.prom, `on_node/monitoring/record.py`
writes check.prom and drift.prom, and the watchdog writes watchdog.prom. The definitions of these
metrics are in `on_node/common/metric_families.py`, which is sent to the nodes.

Roles that place a certificate write certificate-*.prom (`monitoring/certificate_ends.py`). The
metric in these files is not in metric_families, because a change of that list restarts the
watchdogs. docs/reference/node-metrics.md has the source of each value.
"""

from __future__ import annotations

from typing import Literal, cast

from gpufleet.monitoring.metrics.metric import Job, Metric
from gpufleet.on_node.common.metric_families import FAMILIES

GPU_NODES = "GPU nodes"
LOADED = "nodes with a loaded driver"
STAGES = "nodes with stages"
WITHOUT_DCGM = "GPU nodes without DCGM"
WATCHED = "stages with a watchdog"
GPU = ("gpu", "UUID")


def _own(name: str, *labels: str, only: str = "") -> Metric:
    name = f"gpufleet_{name}"
    kind, about = FAMILIES[name]
    return Metric(
        name=name,
        job=Job.NODE,
        type=cast("Literal['counter', 'gauge']", kind),
        help=about,
        labels=labels,
        only=only,
        source="docs/reference/node-metrics.md",
    )


FACTS = (
    _own("facts_timestamp_seconds"),
    _own("facts_failed", "part"),
    _own("deploy_timestamp_seconds", "deploy", only="nodes on which a deploy has finished"),
    _own(
        "node_info",
        "kernel",
        "driver_loaded",
        "driver_disk",
        "library",
        "fabric_manager",
        "lock",
        "release",
    ),
    _own("driver_mismatch", "part", only=LOADED),
    _own("reboot_pending", "reason"),
    _own("node_unchecked"),
    _own("gpus", "state", only=GPU_NODES),
    _own("stage_info", "stage", "model", "release", "unit", only=STAGES),
    _own("stage_active", "stage", only=STAGES),
    _own("stage_restarts_total", "stage", only=STAGES),
)

# The values that DCGM reports on nodes with DCGM. Rules use whichever exists
# (monitoring/rules/gpu_rules.py).
GPU_FALLBACK = (
    _own("gpu_temperature_celsius", *GPU, only=WITHOUT_DCGM),
    _own("gpu_memory_used_bytes", *GPU, only=WITHOUT_DCGM),
    _own("gpu_memory_free_bytes", *GPU, only=WITHOUT_DCGM),
    _own("gpu_power_watts", *GPU, only=f"{WITHOUT_DCGM}, boards that measure it"),
    _own("gpu_utilization_ratio", *GPU, only=WITHOUT_DCGM),
    _own("gpu_sm_clock_hertz", *GPU, only=WITHOUT_DCGM),
    _own("gpu_ecc_uncorrected_total", *GPU, only=f"{WITHOUT_DCGM}, boards with ECC"),
    _own("gpu_row_remap_pending", *GPU, only=f"{WITHOUT_DCGM}, data centre boards since Ampere"),
    _own("gpu_row_remap_failure", *GPU, only=f"{WITHOUT_DCGM}, data centre boards since Ampere"),
    _own("gpu_xid_errors_total", *GPU, "xid", only=f"{WITHOUT_DCGM}, GPUs that had an Xid"),
)

FINDINGS = (
    _own("check_findings", "severity", only="nodes whose check was recorded"),
    _own("check_timestamp_seconds", only="nodes whose check was recorded"),
    _own("drift_differences", "matters", only="nodes whose drift was recorded"),
    _own("drift_unknown", only="nodes whose drift was recorded"),
    _own("drift_timestamp_seconds", only="nodes whose drift was recorded"),
)

WATCHDOG = (
    _own("watchdog_mode_info", "stage", "mode", only=WATCHED),
    _own("watchdog_stalled", "stage", only=WATCHED),
    _own("watchdog_idle_seconds", "stage", only=WATCHED),
    _own("watchdog_stalls_total", "stage", only=WATCHED),
    _own("watchdog_restarts_total", "stage", only=WATCHED),
    _own("watchdog_timestamp_seconds", only="nodes with a watchdog"),
)

CERTIFICATE_END = Metric(
    name="gpufleet_certificate_end_timestamp_seconds",
    job=Job.NODE,
    type="gauge",
    help="When a certificate that a deploy placed ends, in seconds since 1970",
    labels=("path", "use"),
    only="nodes on which a deploy placed a certificate",
    source="docs/reference/node-metrics.md",
)

METRICS: tuple[Metric, ...] = (*FACTS, *GPU_FALLBACK, *FINDINGS, *WATCHDOG, CERTIFICATE_END)
