"""
List the fields of DCGM's exporter that the counters file contains. Pure.

The exporter does not start if the file has an unknown name. The names here are DCGM's older names.
Each name was found in the field tables of NVIDIA's Go binding, at the commits that exporters 4.1.0,
4.4.0, 4.5.0 and 4.8.2 were built from (DCGM 4.2, 4.3, 4.4, 4.5). DCGM 4.6.1 has them as aliases of
its new names. A metric has the name that is in the counters file, so rules continue to work after
an upgrade of DCGM. The following fields are omitted, because DCGM 4.2 does not have them:
NVLINK_COUNT_EFFECTIVE_ERRORS, FABRIC_HEALTH_MASK, GET_GPU_RECOVERY_ACTION.

Help texts contain no comma, because the counters file is read as CSV.
"""

from __future__ import annotations

from typing import Literal

from gpufleet.monitoring.metrics.metric import Job, Metric

# The two labels whose names never changed. `Hostname` became `hostname` in May 2026. `modelName`,
# `device` and `pci_bus_id` are not needed, because `UUID` identifies the GPU.
GPU = ("gpu", "UUID")

ECC = "boards with ECC"
REMAPPING = "Ampere and newer data centre boards"
NVLINK_4 = "boards with NVLink 4 and older (H100 and older)"
NVLINK_5 = "boards with NVLink 5 and newer (B200 and newer)"
# Ampere and older need root or NVreg_RestrictProfilingToAdminUsers=0, and DCGM's proprietary
# package.
PROFILING = "where profiling is allowed: Hopper and newer"

_SOURCE = "DCGM field identifiers, go-dcgm 7c92211 to b7fa315"
_EXPORTER = "dcgm-exporter 4.5.3-4.8.2, internal/pkg/collector"


def _gauge(name: str, help_text: str, only: str = "") -> Metric:
    return _field("gauge", name, help_text, only)


def _counter(name: str, help_text: str, only: str = "") -> Metric:
    return _field("counter", name, help_text, only)


def _field(kind: Literal["counter", "gauge"], name: str, help_text: str, only: str) -> Metric:
    return Metric(f"DCGM_FI_{name}", Job.DCGM, kind, help_text, GPU, only=only, source=_SOURCE)


STATE = (
    _gauge("DEV_GPU_TEMP", "GPU temperature in degrees Celsius"),
    _gauge("DEV_MEMORY_TEMP", "Memory temperature in degrees Celsius", "boards with HBM"),
    _gauge(
        "DEV_MEM_MAX_OP_TEMP",
        "Memory temperature in degrees Celsius up to which the board may be used",
        "boards with HBM",
    ),
    _gauge(
        "DEV_GPU_TEMP_LIMIT",
        "Degrees Celsius that are left until the board slows itself down",
        "Hopper and newer",
    ),
    # From Hopper on, NVML may not report this value. It reports the margin above instead.
    _gauge(
        "DEV_SLOWDOWN_TEMP",
        "Temperature in degrees Celsius at which it slows down",
        "Ada and older",
    ),
    _gauge(
        "DEV_SHUTDOWN_TEMP", "Temperature in degrees Celsius at which it stops", "Ada and older"
    ),
    _gauge("DEV_POWER_USAGE", "Power draw of the board in watts"),
    _gauge("DEV_ENFORCED_POWER_LIMIT", "Power limit of the board in watts"),
    _counter("DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded in millijoules"),
    _gauge("DEV_SM_CLOCK", "Clock of the streaming multiprocessors in MHz"),
    _gauge("DEV_MEM_CLOCK", "Clock of the memory in MHz"),
    _gauge("DEV_CLOCKS_EVENT_REASONS", "Why clocks are lower than they could be: NVML's bits"),
    _gauge("DEV_GPU_UTIL", "Percent of the last sample period in which a kernel ran"),
    _gauge("DEV_MEM_COPY_UTIL", "Percent of the last sample period in which memory was used"),
    _gauge("DEV_FB_USED", "GPU memory in use in MiB"),
    _gauge("DEV_FB_FREE", "GPU memory that is free in MiB"),
    _gauge("DEV_FB_RESERVED", "GPU memory that the driver keeps for itself in MiB"),
)

ERRORS = (
    # The value is the number of the last Xid, and it stays until the exporter is restarted. Rules
    # must therefore not check whether it is above 0.
    _gauge("DEV_XID_ERRORS", "Number of the last Xid error since the exporter's start"),
    Metric(
        "DCGM_EXP_XID_ERRORS_COUNT",
        Job.DCGM,
        "gauge",
        "Xid errors of the last 5 minutes by number; one series of 0 without number if there were none",
        (*GPU, "xid"),
        source=_EXPORTER,
    ),
    Metric(
        "DCGM_EXP_CLOCK_EVENTS_COUNT",
        Job.DCGM,
        "gauge",
        "How often each reason for low clocks was seen in the last 5 minutes",
        (*GPU, "clock_event"),
        source=_EXPORTER,
    ),
    _counter("DEV_ECC_SBE_VOL_TOTAL", "Corrected memory errors since the last reset", ECC),
    _counter("DEV_ECC_DBE_VOL_TOTAL", "Uncorrectable memory errors since the last reset", ECC),
    _counter("DEV_ECC_SBE_AGG_TOTAL", "Corrected memory errors of the board's whole life", ECC),
    _counter("DEV_ECC_DBE_AGG_TOTAL", "Uncorrectable memory errors of the board's whole life", ECC),
    _counter(
        "DEV_CORRECTABLE_REMAPPED_ROWS", "Rows remapped for corrected memory errors", REMAPPING
    ),
    _counter(
        "DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Rows remapped for uncorrectable memory errors",
        REMAPPING,
    ),
    _gauge("DEV_ROW_REMAP_PENDING", "Whether rows are remapped at the next reset", REMAPPING),
    _gauge("DEV_ROW_REMAP_FAILURE", "Whether a row could not be remapped", REMAPPING),
    _counter("DEV_PCIE_REPLAY_COUNTER", "PCIe packets that had to be sent again"),
    _counter("DEV_POWER_VIOLATION", "Time below the wanted clock for power in nanoseconds"),
    _counter("DEV_THERMAL_VIOLATION", "Time below the wanted clock for heat in nanoseconds"),
)

NVLINK = (
    _counter(
        "DEV_NVLINK_BANDWIDTH_TOTAL", "NVLink traffic of all links as DCGM counts it", NVLINK_4
    ),
    _counter(
        "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "NVLink flow control CRC errors of all links",
        NVLINK_4,
    ),
    _counter(
        "DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "NVLink data CRC errors of all links", NVLINK_4
    ),
    _counter(
        "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVLink packets sent again on all links", NVLINK_4
    ),
    _counter("DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "NVLink recoveries of all links", NVLINK_4),
    _counter("DEV_NVLINK_COUNT_TX_BYTES", "Bytes sent over NVLink on all links", NVLINK_5),
    _counter("DEV_NVLINK_COUNT_RX_BYTES", "Bytes received over NVLink on all links", NVLINK_5),
    _counter("DEV_NVLINK_COUNT_RX_ERRORS", "NVLink packets received with errors", NVLINK_5),
    _counter(
        "DEV_NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS",
        "NVLink packets that were malformed",
        NVLINK_5,
    ),
    _counter(
        "DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
        "NVLink errors of the link's integrity",
        NVLINK_5,
    ),
    _counter(
        "DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
        "NVLinks that went down and came back",
        NVLINK_5,
    ),
    _counter(
        "DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
        "NVLinks that went down and did not come back",
        NVLINK_5,
    ),
    # The values are those of dcgmFabricManagerStatus_t: 0 not supported, 1 not started, 2 in
    # progress, 3 success, 4 failure, 5 unrecognized, 6 NVML too old.
    _gauge("DEV_FABRIC_MANAGER_STATUS", "State of the GPU's registration with the NVLink fabric"),
)

PROFILES = (
    _gauge("PROF_GR_ENGINE_ACTIVE", "Share of time in which anything ran from 0 to 1", PROFILING),
    _gauge(
        "PROF_SM_ACTIVE", "Share of cycles in which multiprocessors had work from 0 to 1", PROFILING
    ),
    _gauge(
        "PROF_PIPE_TENSOR_ACTIVE",
        "Share of cycles in which tensor cores worked from 0 to 1",
        PROFILING,
    ),
    _gauge("PROF_DRAM_ACTIVE", "Share of cycles in which memory moved data from 0 to 1", PROFILING),
    _gauge("PROF_PCIE_TX_BYTES", "Bytes that the GPU sends over PCIe each second", PROFILING),
    _gauge("PROF_PCIE_RX_BYTES", "Bytes that the GPU receives over PCIe each second", PROFILING),
)

METRICS: tuple[Metric, ...] = (*STATE, *ERRORS, *NVLINK, *PROFILES)
