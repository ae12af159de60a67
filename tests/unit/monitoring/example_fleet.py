"""A fleet that exists as numbers only: what its exporters would have served, at any second.

Every metric of the catalogue is there, with values of the right size that move as a day of load
does. `gpu-03` has no DCGM, so its GPUs are in its own facts. Something is wrong on purpose, as it
is on any fleet: a reboot is pending on gpu-02, a stage of gpu-03 is down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from gpufleet.monitoring.metrics import catalogue
from gpufleet.monitoring.metrics.metric import Job, Metric

Labels = Mapping[str, str]

SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS_BUCKETS = (1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
GIB = 1024**3

NODES = ("gpu-01", "gpu-02", "gpu-03")
WITHOUT_DCGM = ("gpu-03",)
GPUS = 4
# Each with its node and its model.
STAGES = (
    ("gpu-01", "chat-0", "chat"),
    ("gpu-01", "code-0", "code"),
    ("gpu-02", "chat-1", "chat"),
    ("gpu-03", "code-1", "code"),
)
DOWN = ("gpu-03", "code-1")

# What labels there are beyond those of a target, by metric or by label.
_VALUES: dict[str, tuple[str, ...]] = {
    "cpu": ("0", "1"),
    "mode": ("idle", "iowait", "system", "user"),
    "state": ("active", "failed"),
    "name": ("nvidia-persistenced.service", "vllm-chat-0.service"),
    "type": ("simple",),
    "mountpoint": ("/", "/var/lib/gpufleet"),
    "fstype": ("ext4",),
    "engine": ("0",),
    "reason": ("capacity", "deferred"),
    "sleep_state": ("awake",),
    "finished_reason": ("stop", "length", "abort"),
    "handler": ("/v1/chat/completions",),
    "method": ("POST",),
    "status": ("2xx", "4xx", "5xx"),
    "severity": ("block", "unknown", "warn", "info"),
    "matters": ("now", "next_boot", "next_upgrade"),
    "deploy": ("node", "vllm"),
    "part": ("disk", "library", "fabric_manager"),
    "xid": ("31",),
    "clock_event": ("sw_power_cap", "hw_thermal_slowdown"),
    "code": ("2xx", "5xx"),
    "collector": ("cpu", "textfile"),
    "file": ("facts.prom",),
    "integration": ("webhook",),
    "backend": ("chat",),
    "proxy": ("chat",),
    "server": ("gpu-01",),
    "kernel": ("6.1.0-32-amd64",),
    "driver_loaded": ("580.95.05",),
    "driver_disk": ("580.95.05",),
    "library": ("580.95.05",),
    "fabric_manager": ("580.95.05",),
    "lock": ("3f9ac1d2",),
    "release": ("0.32.0",),
    "mode_info": ("act",),
    "path": ("/etc/gpufleet/node-exporter/certificate.pem",),
    "use": ("exporter",),
}
_OF_METRIC: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpufleet_gpus", "state"): ("expected", "present"),
    ("gpufleet_reboot_pending", "reason"): ("packages", "kernel", "driver"),
    ("gpufleet_watchdog_mode_info", "mode"): ("act",),
    ("node_md_disks", "state"): ("active", "failed", "spare"),
    ("alertmanager_silences", "state"): ("active", "pending", "expired"),
    ("haproxy_server_status", "state"): ("UP", "DOWN"),
    ("vllm:admission_rejections_total", "reason"): ("max_num_queued_reqs",),
    ("node_uname_info", "release"): ("6.1.0-32-amd64",),
}
_DEVICES = {"disk": ("nvme0n1",), "network": ("eth0", "lo"), "filesystem": ("/dev/nvme0n1p1",)}


@dataclass(frozen=True)
class Target:
    """Something that is scraped: its job and the labels that its series have of it."""

    job: Job
    labels: Labels


def targets() -> Iterator[Target]:
    """Yield all that would be scraped."""
    for node in NODES:
        yield Target(Job.NODE, {"instance": node, "job": "node"})
        if node not in WITHOUT_DCGM:
            yield Target(Job.DCGM, {"instance": node, "job": "dcgm"})
    for node, stage, model in STAGES:
        labels = {"instance": node, "job": "vllm", "stage": stage, "model": model}
        yield Target(Job.VLLM, labels)
    for job in (Job.GATEWAY, Job.PROMETHEUS, Job.ALERTMANAGER):
        yield Target(job, {"instance": "mon-01", "job": job.value})


def exposition(target: Target, time: float) -> str:
    """Return what a target serves at a moment, without the labels that the scrape adds."""
    return "".join(
        f"{name}{_braces(labels)} {value:.10g}\n" for name, labels, value in samples(target, time)
    )


def samples(target: Target, time: float) -> Iterator[tuple[str, Labels, float]]:
    """Yield (name, labels of its own, value) of a target at a moment."""
    if _down(target):
        return
    for metric in catalogue.METRICS.values():
        if metric.job is not target.job or metric.name in _MADE:
            continue
        fallback = metric.name.startswith("gpufleet_gpu_")
        if fallback and target.labels["instance"] not in WITHOUT_DCGM:
            continue
        for labels in _combinations(metric, target):
            yield from _series(metric, labels, target, time)


def open_metrics(start: float, end: float, step: float) -> Iterator[str]:
    """Yield lines for `promtool tsdb create-blocks-from openmetrics`, with those of the scrape."""
    found: dict[tuple[str, str], list[str]] = {}
    moments = [start + index * step for index in range(int((end - start) / step) + 1)]
    for target in targets():
        for time in moments:
            at_target = [
                ("up", {}, float(not _down(target))),
                ("scrape_duration_seconds", {}, 0.02),
                ("scrape_samples_scraped", {}, 900.0),
                *samples(target, time),
            ]
            for name, labels, value in at_target:
                braces = _braces({**labels, **target.labels})
                found.setdefault((name, braces), []).append(f"{value:.10g} {time:.3f}")
    for name, labels in alerts():
        rows = [f"1 {time:.3f}" for time in moments]
        found[name, _braces(labels)] = rows
    # One family after another, as the format wants it; none has a type: they are only numbers.
    for name, braces in sorted(found):
        for row in found[name, braces]:
            yield f"{name}{braces} {row}\n"
    yield "# EOF\n"


def alerts() -> Iterator[tuple[str, Labels]]:
    """Yield alerts that fire all the time."""
    gpu = {"gpu": "1", "UUID": "GPU-01-1"}
    for name, severity, labels in (
        ("RebootPending", "ticket", {"instance": "gpu-02"}),
        ("GpuXid", "ticket", {"instance": "gpu-01", **gpu}),
        ("VllmDown", "page", {"instance": DOWN[0], "stage": DOWN[1], "model": "code"}),
    ):
        firing = {"alertname": name, "alertstate": "firing", "severity": severity}
        yield "ALERTS", {**firing, **labels}


_MADE = {"up", "scrape_duration_seconds", "scrape_samples_scraped", "ALERTS"}


def _down(target: Target) -> bool:
    return (target.labels["instance"], target.labels.get("stage")) == DOWN and (
        "alive" not in target.labels
    )


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{key}="{labels[key]}"' for key in sorted(labels)) + "}"


def _combinations(metric: Metric, target: Target) -> Iterator[dict[str, str]]:
    """Yield the labels of a metric's series on one target."""
    node = target.labels["instance"]
    if "gpu" in metric.labels:
        fixed: list[dict[str, str]] = [
            {"gpu": str(gpu), "UUID": f"GPU-{node[-2:]}-{gpu}"} for gpu in range(GPUS)
        ]
    elif "stage" in metric.labels:
        fixed = [
            {"stage": stage, "model": model, "unit": f"vllm-{stage}.service"}
            for where, stage, model in STAGES
            if where == node
        ]
    else:
        fixed = [{}]
    if target.job is Job.VLLM:
        fixed = [{**labels, "model_name": target.labels["model"]} for labels in fixed]
    free = [name for name in metric.labels if name not in {"gpu", "UUID", "stage", "model_name"}]
    for base in fixed:
        choices = [
            (base[name],) if name in base else _choices(metric.name, name, node) for name in free
        ]
        for chosen in product(*choices):
            known = {name: base[name] for name in metric.labels if name in base}
            yield {**known, **dict(zip(free, chosen, strict=True))}


def _choices(metric: str, label: str, node: str) -> tuple[str, ...]:
    if label == "device":
        kind = next((kind for kind in _DEVICES if f"_{kind}_" in metric), "disk")
        return _DEVICES[kind]
    if node == "gpu-02" and label == "driver_disk":
        return ("580.105.08",)
    return _OF_METRIC.get((metric, label)) or _VALUES.get(label) or ("x",)


def _series(
    metric: Metric, labels: dict[str, str], target: Target, time: float
) -> Iterator[tuple[str, Labels, float]]:
    phase = phase_of({**target.labels, **labels})
    if metric.type == "histogram":
        yield from _histogram(metric, labels, time, phase)
        return
    value = _special(metric.name, labels, target, time)
    if value is None:
        base = _SIZE.get(metric.name, 1.0 if metric.type == "counter" else 0.0)
        value = grown(base, time, phase) if metric.type == "counter" else _moved(base, time, phase)
        if "num_requests" in metric.name:
            value = float(round(value))
    yield metric.name, labels, value


def load(time: float, phase: float) -> float:
    """Return how busy something is, 0 to 1: waves of 11 and 3 minutes."""
    slow = math.sin(2 * math.pi * (time / 660 + phase))
    return 0.6 + 0.3 * slow + 0.1 * math.sin(2 * math.pi * (time / 180 + 3 * phase))


def phase_of(labels: Labels) -> float:
    """Return where in its waves something with these labels is, 0 to 1."""
    return sum(map(ord, "".join(labels.values()))) % 97 / 97


def _moved(base: float, time: float, phase: float) -> float:
    return base * load(time, phase)


def grown(rate: float, time: float, phase: float) -> float:
    """Return the integral of `rate * load` since a day ago's noon: a counter that never falls."""
    since = time % 1e6
    waves = -0.3 * 660 * math.cos(2 * math.pi * (time / 660 + phase))
    waves -= 0.1 * 180 * math.cos(2 * math.pi * (time / 180 + 3 * phase))
    return rate * (0.6 * since + waves / (2 * math.pi) + 300)


def _histogram(
    metric: Metric, labels: dict[str, str], time: float, phase: float
) -> Iterator[tuple[str, Labels, float]]:
    seconds = metric.name.endswith("_seconds")
    middle, per_second = MIDDLE.get(metric.name, (0.3 if seconds else 300.0, 2.0))
    count = grown(per_second, time, phase)
    for le in (*(SECONDS_BUCKETS if seconds else TOKENS_BUCKETS), math.inf):
        share = 1.0 if le == math.inf else 0.5 * (1 + math.erf(math.log(le / middle) / 1.1))
        bound = "+Inf" if le == math.inf else f"{float(le)}"
        yield f"{metric.name}_bucket", {**labels, "le": bound}, count * share
    yield f"{metric.name}_count", labels, count
    yield f"{metric.name}_sum", labels, count * middle * 1.2


MIDDLE = {
    "vllm:time_to_first_token_seconds": (0.35, 2.5),
    "vllm:inter_token_latency_seconds": (0.028, 600.0),
    "vllm:e2e_request_latency_seconds": (7.0, 2.5),
    "vllm:request_queue_time_seconds": (0.04, 2.5),
    "vllm:request_prompt_tokens": (900.0, 2.5),
    "vllm:request_generation_tokens": (260.0, 2.5),
}

# A gauge's height, a counter's growth each second; both at full load.
_SIZE = {
    "DCGM_FI_DEV_GPU_TEMP": 72,
    "DCGM_FI_DEV_MEMORY_TEMP": 84,
    "DCGM_FI_DEV_POWER_USAGE": 640,
    "DCGM_FI_DEV_GPU_UTIL": 97,
    "DCGM_FI_DEV_SM_CLOCK": 1900,
    "DCGM_FI_DEV_MEM_CLOCK": 2600,
    "DCGM_FI_DEV_MEM_COPY_UTIL": 60,
    "DCGM_FI_DEV_GPU_TEMP_LIMIT": 30,
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 40000,
    "DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES": 4e10,
    "DCGM_FI_DEV_NVLINK_COUNT_RX_BYTES": 4e10,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 640000,
    "DCGM_FI_DEV_POWER_VIOLATION": 2e7,
    "DCGM_FI_DEV_THERMAL_VIOLATION": 0,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.95,
    "DCGM_FI_PROF_SM_ACTIVE": 0.8,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.45,
    "DCGM_FI_PROF_DRAM_ACTIVE": 0.6,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 2e9,
    "DCGM_FI_PROF_PCIE_RX_BYTES": 2e9,
    "gpufleet_gpu_temperature_celsius": 66,
    "gpufleet_gpu_power_watts": 300,
    "gpufleet_gpu_utilization_ratio": 0.9,
    "gpufleet_gpu_sm_clock_hertz": 1.7e9,
    "node_disk_read_bytes_total": 4e7,
    "node_disk_written_bytes_total": 6e6,
    "node_network_receive_bytes_total": 3e7,
    "node_network_transmit_bytes_total": 5e7,
    "node_network_speed_bytes": 1.25e10,
    "node_pressure_cpu_waiting_seconds_total": 0.04,
    "node_pressure_io_waiting_seconds_total": 0.02,
    "node_pressure_memory_waiting_seconds_total": 0.001,
    "node_timex_offset_seconds": 0.0006,
    "node_load1": 9,
    "vllm:num_requests_running": 40,
    "vllm:num_requests_waiting": 3,
    "vllm:num_requests_waiting_by_reason": 2,
    "vllm:kv_cache_usage_perc": 0.8,
    "vllm:prompt_tokens_total": 4000,
    "vllm:generation_tokens_total": 900,
    "vllm:num_preemptions_total": 0.02,
    "vllm:prefix_cache_queries_total": 4000,
    "vllm:prefix_cache_hits_total": 1500,
    "vllm:request_success_total": 1.0,
    "vllm:prompt_tokens_cached_total": 1500,
    "vllm:admission_rejections_total": 0.001,
    "haproxy_backend_current_sessions": 80,
}
# Counters of what should not happen.
_NONE = (
    "error",
    "errs",
    "drop",
    "ecc",
    "oom_kill",
    "remapped",
    "restarts_total",
    "stalls_total",
    "failures",
    "rejections",
    "failed",
    "missed",
    "replay",
    "carrier_changes",
    "recovery",
    "downed",
)


_CONSTANT: dict[str, float] = {
    "DCGM_FI_DEV_FB_RESERVED": 600,
    "DCGM_FI_DEV_FABRIC_MANAGER_STATUS": 3,
    "DCGM_FI_DEV_XID_ERRORS": 0,
    "DCGM_EXP_CLOCK_EVENTS_COUNT": 0,
    "DCGM_FI_DEV_SLOWDOWN_TEMP": 90,
    "DCGM_FI_DEV_SHUTDOWN_TEMP": 95,
    "DCGM_FI_DEV_MEM_MAX_OP_TEMP": 95,
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": 700,
    "gpufleet_gpu_memory_used_bytes": 70 * GIB,
    "gpufleet_gpu_memory_free_bytes": 9 * GIB,
    "gpufleet_gpus": GPUS,
    "node_memory_MemTotal_bytes": 512 * GIB,
    "node_memory_MemFree_bytes": 300 * GIB,
    "node_filesystem_size_bytes": 3500 * GIB,
    "node_filesystem_avail_bytes": 1900 * GIB,
    "node_filesystem_free_bytes": 2000 * GIB,
    "node_filesystem_files": 2e8,
    "node_filesystem_files_free": 1.9e8,
    "node_timex_sync_status": 1,
    "node_network_up": 1,
    "node_network_carrier": 1,
    "node_infiniband_state_id": 4,
    "node_infiniband_physical_state_id": 5,
    "node_systemd_system_running": 1,
    "node_scrape_collector_success": 1,
    "prometheus_config_last_reload_successful": 1,
    "alertmanager_config_last_reload_successful": 1,
    "prometheus_notifications_alertmanagers_discovered": 1,
}
# The one series of a metric that is 1; its others are 0.
_ONE_OF: dict[str, tuple[str, dict[str, str]]] = {
    "DCGM_EXP_XID_ERRORS_COUNT": ("gpu-01", {"gpu": "1", "xid": "31"}),
    "gpufleet_reboot_pending": ("gpu-02", {"reason": "driver"}),
    "gpufleet_driver_mismatch": ("gpu-02", {"part": "disk"}),
    "gpufleet_check_findings": ("gpu-02", {"severity": "warn"}),
    "gpufleet_drift_differences": ("gpu-02", {"matters": "next_boot"}),
    "node_systemd_unit_state": ("", {"state": "active"}),
    "alertmanager_silences": ("", {"state": "active"}),
    "haproxy_server_status": ("", {"state": "UP"}),
}


def _special(name: str, labels: Labels, target: Target, time: float) -> float | None:
    """Return a value that does not follow the load; None: it does."""
    node = target.labels["instance"]
    if name in _CONSTANT:
        return _CONSTANT[name]
    if name in _ONE_OF:
        where, which = _ONE_OF[name]
        return float(where in {"", node} and which.items() <= labels.items())
    if name in _MOVING:
        return _MOVING[name](labels, time)
    if name == "gpufleet_stage_active":
        return float((node, labels["stage"]) != DOWN)
    if "_certificate_" in name:
        return (time // 86400 + 60) * 86400
    if name.endswith("_timestamp_seconds"):
        return time - 20 if "facts" in name or "watchdog" in name else time // 1800 * 1800
    if name.endswith("_info"):
        return 1.0
    return 0.0 if any(part in name.lower() for part in _NONE) else None


_MOVING: dict[str, Callable[[Labels, float], float]] = {
    "DCGM_FI_DEV_FB_USED": lambda labels, _: 70000 + 500 * int(labels["gpu"]),
    "DCGM_FI_DEV_FB_FREE": lambda labels, _: 10000 - 500 * int(labels["gpu"]),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": lambda labels, _: 4.0 * (labels["gpu"] == "2"),
    "node_boot_time_seconds": lambda _, time: time // 1e6 * 1e6,
    "node_time_seconds": lambda _, time: time,
    "node_cpu_seconds_total": lambda labels, time: grown(
        {"idle": 1.4, "iowait": 0.02, "system": 0.1, "user": 0.3}[labels["mode"]], time, 0
    ),
    "node_memory_MemAvailable_bytes": lambda _, time: (400 - 60 * load(time, 0)) * GIB,
}
