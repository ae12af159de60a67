"""
Define recording rules and alerts on GPUs. The values come from DCGM or from gpufleet's facts. Pure.

The recordings `gpu:*` have the labels instance, gpu and UUID, and some also reason, error or Xid.
So if an exporter renames a label, the rules do not change. DCGM's blank values are omitted, because
exporters before 4.8 write them as numbers. On a node without DCGM, the recordings use
`gpufleet_gpu_*`, if NVML has the same values.
"""

from __future__ import annotations

from collections.abc import Collection

from gpufleet.checks.finding import Severity
from gpufleet.checks.nvlink import CRC_PER_SECOND_MANY, RECOVERIES_PER_DAY_MAX
from gpufleet.checks.pcie import REPLAYS_A_LANE_AND_MINUTE
from gpufleet.checks.throttling import WARM_CELSIUS
from gpufleet.checks.xid_table import CONTAINED, GSP, KINDS, NVLINK, OFF_THE_BUS
from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording

GPU = ("instance", "gpu", "UUID")
BY_GPU = f"by ({', '.join(GPU)})"

# DCGM's blank values begin at 0x7ffffff0 (32 bits), at 2^47 (floating point) and at
# 0x7ffffffffffffff0 (64 bits) (dcgm_fields.h). All real values that are used here are far below the
# first of these numbers.
BLANK = 2147483632
# If a counter becomes blank, it seems to increase by 2^63. No real rate or increase is as large as
# this limit.
_JUMP = "1e12"
_MIB = 1024 * 1024

# nvmlClocksEventReasons, nvml.h: the bit of each reason.
REASONS = {
    "sw_power_cap": 4,
    "hw_slowdown": 8,
    "sw_thermal": 32,
    "hw_thermal": 64,
    "hw_power_brake": 128,
}
_HARDWARE = "hw_slowdown|hw_thermal|hw_power_brake"

# The first four counters are for NVLink 4 and older, and the others for NVLink 5 and newer. Every
# GPU has only one kind of counters.
NVLINK_ERRORS = {
    "crc_flit": "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "crc_data": "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "replay": "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "recovery": "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "received": "DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS",
    "malformed": "DCGM_FI_DEV_NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS",
    "integrity": "DCGM_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
    "recovered": "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
    "lost": "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
}
_TRANSFER = "crc_flit|crc_data|replay|received|malformed|integrity"

# The limit for the memory's temperature if DCGM reports none. No board has a higher limit.
_HBM_CELSIUS = 95
_WIDEST_LANES = 16
_REPLAYS_PER_MINUTE = round(max(REPLAYS_A_LANE_AND_MINUTE.values()) * _WIDEST_LANES)


def _dcgm(field: str, scale: str = "", blank: int = BLANK) -> str:
    return f"max {BY_GPU} (DCGM_FI_{field} < {blank}){scale}"


def _own(name: str) -> str:
    return f"max {BY_GPU} (gpufleet_gpu_{name})"


def _gpu(name: str, expr: str, help_text: str, *labels: str) -> Recording:
    return Recording(f"gpu:{name}", expr, help_text, (*GPU, *labels))


def _labelled(label: str, parts: dict[str, str]) -> str:
    """
    Return several expressions joined into one. The label of each result is the name of its
    expression.
    """
    return "\nor ".join(
        f'label_replace({expr}, "{label}", "{name}", "", "")' for name, expr in parts.items()
    )


def numbers(xids: Collection[int]) -> str:
    """Return Xid numbers as a regular expression that matches each of them."""
    return "|".join(str(xid) for xid in sorted(xids))


CRITICAL = {
    xid
    for xid, kind in KINDS.items()
    if kind.severity is Severity.BLOCK and xid not in (OFF_THE_BUS | GSP | NVLINK | CONTAINED)
}
APPLICATION = {xid for xid, kind in KINDS.items() if kind.severity is Severity.INFO}
# All other Xids should be investigated, including unknown numbers.
_CLASSIFIED = CRITICAL | APPLICATION | OFF_THE_BUS | GSP | NVLINK | CONTAINED

_XID = "gpu:xid_errors:count5m"
# The series of a counter begins with its first error, which `increase` does not count. Therefore a
# series counts as a new error if it did not exist 5 minutes ago, although the node's facts did. The
# second condition is needed for a Prometheus that scrapes the node for the first time. A count that
# decreases (because the kernel log was rotated) is not an error.
_OWN_XIDS = (
    f"max by ({', '.join(GPU)}, xid) (\n"
    "  (gpufleet_gpu_xid_errors_total - gpufleet_gpu_xid_errors_total offset 5m) > 0\n"
    "  or (gpufleet_gpu_xid_errors_total unless gpufleet_gpu_xid_errors_total offset 5m)\n"
    "     and on (instance) gpufleet_facts_timestamp_seconds offset 5m\n"
    ")"
)

RECORDINGS: tuple[Recording, ...] = (
    _gpu(
        "temperature_celsius",
        f"{_dcgm('DEV_GPU_TEMP')} or {_own('temperature_celsius')}",
        "A GPU's temperature, in degrees",
    ),
    _gpu(
        "temperature_margin_celsius",
        # The limit minus the temperature, if the board reports the limit (0: not reported). Newer
        # boards report the margin instead.
        f"({_dcgm('DEV_SLOWDOWN_TEMP')} > 0) - {_dcgm('DEV_GPU_TEMP')}\n"
        f"or {_dcgm('DEV_GPU_TEMP_LIMIT')}",
        "Degrees that are left until a GPU throttles itself",
    ),
    _gpu(
        "memory_temperature_celsius",
        # Boards without such a sensor report 0.
        f"{_dcgm('DEV_MEMORY_TEMP')} > 0",
        "Temperature of a GPU's memory (HBM), in degrees",
    ),
    _gpu(
        "memory_temperature_limit_celsius",
        f"{_dcgm('DEV_MEM_MAX_OP_TEMP')} > 0\n"
        f"or {_HBM_CELSIUS} + 0 * gpu:memory_temperature_celsius",
        "Highest allowed temperature of a GPU's memory, in degrees",
    ),
    _gpu(
        "memory_used_bytes",
        f"{_dcgm('DEV_FB_USED', f' * {_MIB}')} or {_own('memory_used_bytes')}",
        "GPU memory in use, in bytes",
    ),
    _gpu(
        "memory_free_bytes",
        f"{_dcgm('DEV_FB_FREE', f' * {_MIB}')} or {_own('memory_free_bytes')}",
        "GPU memory that is free, in bytes",
    ),
    _gpu(
        "memory_used_ratio",
        "gpu:memory_used_bytes / (gpu:memory_used_bytes + gpu:memory_free_bytes)",
        "Share of a GPU's memory that is in use, 0 to 1",
    ),
    _gpu(
        "power_watts",
        f"{_dcgm('DEV_POWER_USAGE')} or {_own('power_watts')}",
        "Power draw of a GPU, in watts",
    ),
    _gpu("power_limit_watts", _dcgm("DEV_ENFORCED_POWER_LIMIT"), "Power limit of a GPU, in watts"),
    _gpu(
        "utilization_ratio",
        f"{_dcgm('DEV_GPU_UTIL', ' / 100')} or {_own('utilization_ratio')}",
        "Share of the last sample period in which a kernel ran, 0 to 1",
    ),
    _gpu(
        "sm_clock_hertz",
        f"{_dcgm('DEV_SM_CLOCK', ' * 1e6')} or {_own('sm_clock_hertz')}",
        "Clock of the streaming multiprocessors, in hertz",
    ),
    _gpu(
        "throttled",
        _labelled(
            "reason",
            {
                reason: f"floor({_dcgm('DEV_CLOCKS_EVENT_REASONS')} / {bit}) % 2"
                for reason, bit in REASONS.items()
            },
        ),
        "1 if a GPU's clocks are reduced for this reason, by reason",
        "reason",
    ),
    _gpu(
        "violation_ratio:rate5m",
        _labelled(
            "reason",
            {
                reason: f"max {BY_GPU} (rate(DCGM_FI_DEV_{reason.upper()}_VIOLATION[5m]) < {_JUMP}) / 1e9"
                for reason in ("power", "thermal")
            },
        ),
        "Share of time in which a GPU was throttled for power or heat, 0 to 1",
        "reason",
    ),
    _gpu(
        "ecc_uncorrected_total",
        f"{_dcgm('DEV_ECC_DBE_VOL_TOTAL')} or {_own('ecc_uncorrected_total')}",
        "Number of memory errors that could not be corrected, since the last reset",
    ),
    _gpu(
        "row_remap_pending",
        f"{_dcgm('DEV_ROW_REMAP_PENDING')} or {_own('row_remap_pending')}",
        "1 if rows of memory will be remapped at the next reset",
    ),
    _gpu(
        "row_remap_failure",
        f"{_dcgm('DEV_ROW_REMAP_FAILURE')} or {_own('row_remap_failure')}",
        "1 if a row of memory could not be remapped",
    ),
    _gpu(
        "xid_errors:count5m",
        f"max by ({', '.join(GPU)}, xid) (\n"
        '  DCGM_EXP_XID_ERRORS_COUNT{xid=~"[1-9][0-9]{0,2}"} > 0\n'
        f")\nor {_OWN_XIDS}",
        "Xid errors of the last 5 minutes, by number",
        "xid",
    ),
    _gpu(
        "nvlink_errors:rate5m",
        _labelled(
            "error",
            {
                error: f"max {BY_GPU} (rate({field}[5m]) < {_JUMP})"
                for error, field in NVLINK_ERRORS.items()
            },
        ),
        "NVLink errors per second on all links of a GPU, by kind",
        "error",
    ),
    _gpu(
        "pcie_replays:rate15m",
        f"max {BY_GPU} (rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER[15m]) < {_JUMP})",
        "PCIe packets per second that a GPU had to resend",
    ),
    Recording(
        "node:gpus_missing:count",
        # The larger of the two numbers is right: facts count the GPUs that NVML lists, and DCGM
        # counts the GPUs that still answer.
        "max by (instance) (\n"
        '  label_replace(max by (instance) (gpufleet_gpus{state="expected"})\n'
        '    - max by (instance) (gpufleet_gpus{state="present"}), "by", "facts", "", "")\n'
        '  or label_replace(max by (instance) (gpufleet_gpus{state="expected"})\n'
        '    - count by (instance) (gpu:temperature_celsius), "by", "values", "", "")\n'
        ")",
        "Number of GPUs that a node should have but does not have",
        ("instance",),
    ),
)

_ON = "{{ $labels.instance }}: GPU {{ $labels.gpu }}"


def _xid(
    name: str,
    condition: str,
    severity: AlertSeverity,
    summary: str,
    action: str,
    *,
    for_seconds: int = 0,
) -> Alert:
    return Alert(
        name=name,
        expr=f"{_XID}{{{condition}}} > 0",
        severity=severity,
        # An Xid is an event, so a longer time would not make the alert more certain.
        for_seconds=for_seconds,
        summary=f"{_ON} {summary} (Xid {{{{ $labels.xid }}}})",
        action=action,
        # Xids are counted over 5 minutes. Xids that follow each other closely become one alert.
        keep_seconds=600,
    )


ALERTS: tuple[Alert, ...] = (
    _xid(
        "XidOffTheBus",
        f'xid=~"{numbers(OFF_THE_BUS)}"',
        AlertSeverity.PAGE,
        "has fallen off the bus",
        "Take the node out of service and reboot it. If the GPU is still missing, power the node off and on.",
    ),
    _xid(
        "XidGsp",
        f'xid=~"{numbers(GSP)}"',
        AlertSeverity.PAGE,
        "does not answer because its system processor (GSP) failed",
        "Take the node out of service and reset the GPU. If the reset is refused, reboot the node.",
    ),
    _xid(
        "XidNvlink",
        f'xid=~"{numbers(NVLINK)}"',
        AlertSeverity.PAGE,
        "has an NVLink error",
        "Restart the programs that use the GPU's links. If the error comes back, reset all GPUs of the NVLink island.",
    ),
    _xid(
        "XidCritical",
        f'xid=~"{numbers(CRITICAL)}"',
        AlertSeverity.PAGE,
        "needs a reset",
        "Take the node out of service and reset the GPU.",
    ),
    _xid(
        "XidContained",
        f'xid=~"{numbers(CONTAINED)}"',
        AlertSeverity.TICKET,
        "had a memory error that ended only the program that used this memory",
        "Check that the stage runs again. Reset the GPU when the node is next free.",
    ),
    _xid(
        "XidWatch",
        f'xid!~"{numbers(_CLASSIFIED)}"',
        AlertSeverity.TICKET,
        "reported an error that should be investigated",
        "Look up the Xid's number in docs/checks/xid.md, then check the node.",
    ),
    _xid(
        "XidApplication",
        f'xid=~"{numbers(APPLICATION)}"',
        AlertSeverity.TICKET,
        "keeps reporting the same kind of program error",
        "Read the log of the program on this GPU. Most likely the program itself is the cause.",
        # A single crash concerns only the program. If crashes continue for half an hour, with less
        # than 5 minutes between them, either no one maintains the program or the GPU is the cause.
        for_seconds=1800,
    ),
    Alert(
        name="GpuLost",
        # If the GPU had values in the last 6 hours, the alert has its labels. Otherwise it has only
        # the label of the node.
        expr=(
            f"(max {BY_GPU} (last_over_time(gpu:temperature_celsius[6h]))\n"
            "  unless gpu:temperature_celsius)\n"
            "  and on (instance) (node:gpus_missing:count > 0)\n"
            "or on (instance) (node:gpus_missing:count > 0)"
        ),
        severity=AlertSeverity.PAGE,
        # After its start, DCGM's engine takes up to a minute until it has values of all GPUs.
        for_seconds=120,
        summary=(
            "{{ $labels.instance }}: {{ if $labels.gpu }}GPU {{ $labels.gpu }} "
            "({{ $labels.UUID }}){{ else }}a GPU{{ end }} is missing"
        ),
        action="Take the node out of service, look for Xids in the kernel log, and reboot the node.",
    ),
    Alert(
        name="GpuUnwatched",
        expr=(
            'max by (instance) (gpufleet_gpus{state="expected"}) > 0\n'
            "  unless on (instance) gpu:temperature_celsius\n"
            '  unless on (instance) up{job="dcgm"}'
        ),
        severity=AlertSeverity.TICKET,
        # Facts are written every minute. A node that boots has no values of its GPUs at first.
        for_seconds=600,
        summary="{{ $labels.instance }}: Prometheus gets no values for its GPUs, and the node has no DCGM",
        action="Run deploys/node.py for the node, then run `systemctl status gpufleet-facts` on the node.",
    ),
    Alert(
        name="EccUncorrected",
        expr="increase(gpu:ecc_uncorrected_total[1h]) > 0",
        severity=AlertSeverity.PAGE,
        # The errors have happened, so there is nothing to wait for.
        for_seconds=0,
        summary=f"{_ON} had memory errors that could not be corrected",
        action="Read the log of the program on the GPU. Take the GPU out of service and reset it.",
    ),
    Alert(
        name="RowRemapPending",
        expr="gpu:row_remap_pending > 0",
        severity=AlertSeverity.TICKET,
        # The value stays until the reset. A reset that is in progress ends within 5 minutes.
        for_seconds=300,
        summary=f"{_ON} will remap rows of its memory at its next reset",
        action="Reset the GPU when the node is next free. Until then, the faulty memory rows stay in use.",
    ),
    Alert(
        name="RowRemapFailed",
        expr="gpu:row_remap_failure > 0",
        severity=AlertSeverity.PAGE,
        for_seconds=300,  # the value never goes away, but the host engine may still be starting
        summary=f"{_ON} could not remap a row of its memory",
        action="Take the GPU out of service permanently: the board must be replaced.",
    ),
    Alert(
        name="NvlinkDown",
        expr=f'max {BY_GPU} (gpu:nvlink_errors:rate5m{{error="lost"}}) > 0',
        severity=AlertSeverity.PAGE,
        for_seconds=0,  # the hardware has already tried to recover the link, and failed
        summary=f"{_ON} lost an NVLink, which did not recover",
        action="Take the replicas that use this GPU's links out of service, then reset all GPUs of its NVLink island.",
        keep_seconds=900,
    ),
    Alert(
        name="NvlinkFlapping",
        expr="\nor ".join(
            f"max {BY_GPU} (increase({NVLINK_ERRORS[error]}[6h]) < {_JUMP}) > "
            f"{RECOVERIES_PER_DAY_MAX + 0.5}"
            for error in ("recovery", "recovered")
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=0,  # counted over 6 hours; 0.5 is added because `increase` extrapolates
        summary=f'{_ON} lost an NVLink {{{{ $value | printf "%.0f" }}}} times in 6 hours, and the link recovered each time',
        action="Run `gpufleet check` for the node. If the link fails again and again, call a technician.",
    ),
    Alert(
        name="NvlinkErrors",
        expr=f'sum {BY_GPU} (gpu:nvlink_errors:rate5m{{error=~"{_TRANSFER}"}}) > {CRC_PER_SECOND_MANY}',
        severity=AlertSeverity.TICKET,
        # The link itself repeats packets after single errors. While links are trained at a start,
        # there are many errors, but only for one or two minutes.
        for_seconds=600,
        summary=f"{_ON} has {{{{ $value | humanize }}}} NVLink errors per second",
        action="Run `gpufleet check` for the node. Replicas that use these GPUs are slower than normal.",
    ),
    Alert(
        name="FabricNotReady",
        # 1: not started, 2: in progress, 4: failed. Other values mean not supported, ready or
        # unknown.
        expr=" or ".join(
            f"max {BY_GPU} (DCGM_FI_DEV_FABRIC_MANAGER_STATUS) == {state}" for state in (1, 2, 4)
        ),
        severity=AlertSeverity.PAGE,
        # After a boot, training the fabric of 8 GPUs takes one or two minutes, and at most 5.
        for_seconds=600,
        summary=f"{_ON} is not registered with the NVLink fabric",
        action="Restart nvidia-fabricmanager. Until the GPU is registered, no CUDA program can start on it.",
    ),
    Alert(
        name="GpuHardwareSlowdown",
        # The slowdown must be seen in more than half of 10 minutes, because it changes with the
        # load, and a change of clocks may also show it for a moment (nvml.h).
        expr=(
            f'max {BY_GPU} (\n  avg_over_time(gpu:throttled{{reason=~"{_HARDWARE}"}}[10m])\n) > 0.5'
        ),
        severity=AlertSeverity.PAGE,
        # When a series has just begun, its average is its first value.
        for_seconds=300,
        summary=f"{_ON} runs at half its clock or less because the hardware slows it down",
        action="Find out whether heat or the power supply is the cause, and take the GPU out of service.",
    ),
    Alert(
        name="GpuThermalThrottling",
        expr=f'max {BY_GPU} (gpu:violation_ratio:rate5m{{reason="thermal"}}) > 0.1',
        severity=AlertSeverity.TICKET,
        # Fans need some minutes to follow the load. If the GPU is throttled for a tenth of the time
        # over 15 minutes, the cooling is not sufficient.
        for_seconds=900,
        summary=f"{_ON} was throttled by heat {{{{ $value | humanizePercentage }}}} of the time",
        action="Check the fans, the temperature of the inlet air and the neighbouring machines in the rack.",
    ),
    Alert(
        name="GpuPowerThrottling",
        # A busy GPU is always slowed down at its power limit, which is not a fault. If it is slowed
        # down far below its limit, something other than the limit is the cause.
        expr=(
            f'max {BY_GPU} (gpu:violation_ratio:rate5m{{reason="power"}}) > 0.5\n'
            "  and gpu:power_watts / gpu:power_limit_watts < 0.9"
        ),
        severity=AlertSeverity.TICKET,
        # Half an hour, because the two values are measured at different times and the load changes.
        for_seconds=1800,
        summary=(
            f"{_ON} is throttled for power, although it draws less than 90 % of its power limit"
        ),
        action="Check the node's power supplies and the rack's power limits.",
    ),
    Alert(
        name="GpuHot",
        # Cool H100s have been seen to report that no margin is left.
        expr=(
            f"gpu:temperature_margin_celsius < 5\n  and gpu:temperature_celsius >= {WARM_CELSIUS}"
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=600,  # fans need some minutes to follow a burst of load
        summary=f"{_ON} is {{{{ $value }}}} degrees below the temperature at which it throttles",
        action="Check the fans, the temperature of the inlet air and the neighbouring machines in the rack.",
    ),
    Alert(
        name="GpuMemoryHot",
        expr="gpu:memory_temperature_celsius >= gpu:memory_temperature_limit_celsius",
        severity=AlertSeverity.TICKET,
        for_seconds=600,  # as for GpuHot
        summary=f"{_ON} has memory at {{{{ $value }}}} degrees, which is at or above its limit",
        action="Check the fans and the temperature of the inlet air. Hot memory causes memory errors.",
    ),
    Alert(
        name="PcieReplays",
        expr=f"gpu:pcie_replays:rate15m * 60 > {_REPLAYS_PER_MINUTE}",
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # the rate is over 15 minutes too; the start of a driver is shorter
        summary=f"{_ON} has to resend {{{{ $value | humanize }}}} PCIe packets per minute",
        action="Run `gpufleet check` for the node. The board, its riser or the slot has a bad contact.",
    ),
)
