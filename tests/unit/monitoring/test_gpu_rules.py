"""Alerts on GPUs: each fires where it must, and stays silent where public rules do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpufleet.checks.xid_table import CONTAINED, GSP, KINDS, NVLINK, OFF_THE_BUS
from gpufleet.monitoring.rules import gpu_rules
from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from tests.unit.monitoring.promtool import Case, Firing, run, too_early

# As exporters before May 2026 write them, and since.
OLD = 'instance="gpu-01",job="dcgm",gpu="3",UUID="GPU-3",Hostname="gpu-01",modelName="NVIDIA H100"'
NEW = 'instance="gpu-01",job="dcgm",gpu="3",UUID="GPU-3",hostname="gpu-01",modelName="NVIDIA H100"'
OTHER = 'instance="gpu-01",job="dcgm",gpu="4",UUID="GPU-4",Hostname="gpu-01"'
OWN = 'instance="gpu-02",job="node",gpu="3",UUID="GPU-3"'
GPU = {"instance": "gpu-01", "gpu": "3", "UUID": "GPU-3"}
OWN_GPU = {"instance": "gpu-02", "gpu": "3", "UUID": "GPU-3"}
BLANK = "9223372036854775794"


def dcgm(field: str, labels: str = OLD) -> str:
    """Write a series of DCGM's."""
    return f"DCGM_FI_DEV_{field}{{{labels}}}"


def counted(xid: str, labels: str = OLD) -> str:
    """Write the exporter's count of one Xid in its window of 5 minutes."""
    return f'DCGM_EXP_XID_ERRORS_COUNT{{{labels},xid="{xid}",window_size_in_ms="300000"}}'


def gone(values: Mapping[str, str]) -> dict[str, str]:
    """Write series of a node that should have two GPUs, beside what is given."""
    return {
        'gpufleet_gpus{instance="gpu-01",job="node",state="expected"}': "2x60",
        'gpufleet_gpus{instance="gpu-01",job="node",state="present"}': "2x60",
        **values,
    }


def xid_cases(alert: str, xid: str, other: str, said: str) -> tuple[Case, ...]:
    """An Xid of this class, one of another class, and the gauge that keeps the last one."""
    firing = Firing({**GPU, "xid": xid}, f"gpu-01: GPU 3 {said} (Xid {xid})")
    return (
        Case(
            alert,
            "one Xid, in the exporter's window for 5 minutes",
            {counted(xid): "_x5 1x4 _x20", counted("0"): "0x30"},
            at=7 * 60,
            fires=(firing,),
        ),
        Case(
            alert,
            "the same where the exporter has renamed a label",
            {counted(xid, NEW): "_x5 1x4 _x20"},
            at=7 * 60,
            fires=(firing,),
        ),
        Case(
            alert,
            "the sticky gauge still says so, an hour after it was over",
            {counted(xid): "_x5 1x4 _x60", dcgm("XID_ERRORS"): f"0x4 {xid}x60"},
            at=60 * 60,
        ),
        Case(alert, "an Xid of another class", {counted(other): "1x10"}, at=5 * 60),
    )


XIDS = (
    *xid_cases("XidOffTheBus", "79", "13", "has fallen off the bus"),
    *xid_cases("XidGsp", "119", "79", "does not answer because its system processor (GSP) failed"),
    *xid_cases("XidNvlink", "145", "48", "has an NVLink error"),
    *xid_cases("XidCritical", "95", "94", "needs a reset"),
    *xid_cases(
        "XidContained",
        "94",
        "95",
        "had a memory error that ended only the program that used this memory",
    ),
    *xid_cases("XidWatch", "63", "31", "reported an error that should be investigated"),
    Case(
        "XidWatch",
        "a number that nobody has heard of",
        {counted("999"): "1x10"},
        at=60,
        fires=(
            Firing(
                {**GPU, "xid": "999"},
                "gpu-01: GPU 3 reported an error that should be investigated (Xid 999)",
            ),
        ),
    ),
    Case("XidWatch", "DCGM's blank value as a number", {counted(BLANK): "1x10"}, at=60),
    Case(
        "XidApplication",
        "a program that crashes every few minutes",
        {counted("31"): "1x40"},
        at=31 * 60,
        fires=(
            Firing(
                {**GPU, "xid": "31"},
                "gpu-01: GPU 3 keeps reporting the same kind of program error (Xid 31)",
            ),
        ),
    ),
    Case("XidApplication", "one crash", {counted("31"): "1x4 _x40"}, at=31 * 60),
    Case(
        "XidOffTheBus",
        "our own facts, without DCGM: a counter whose first series is its first error",
        {
            f'gpufleet_gpu_xid_errors_total{{{OWN},xid="79"}}': "_x9 1x30",
            'gpufleet_facts_timestamp_seconds{instance="gpu-02",job="node"}': "0+60x40",
        },
        at=11 * 60,
        fires=(Firing({**OWN_GPU, "xid": "79"}, "gpu-02: GPU 3 has fallen off the bus (Xid 79)"),),
    ),
    Case(
        "XidOffTheBus",
        "a Prometheus that meets the node, and its old Xids, for the first time",
        {
            f'gpufleet_gpu_xid_errors_total{{{OWN},xid="79"}}': "_x9 1x30",
            'gpufleet_facts_timestamp_seconds{instance="gpu-02",job="node"}': "_x9 0+60x30",
        },
        at=11 * 60,
    ),
    Case(
        "XidOffTheBus",
        "old Xids that leave the kernel log as it is rotated",
        {
            f'gpufleet_gpu_xid_errors_total{{{OWN},xid="79"}}': "3x9 1x30",
            'gpufleet_facts_timestamp_seconds{instance="gpu-02",job="node"}': "0+60x40",
        },
        at=11 * 60,
    ),
)

LOST = (
    Case(
        "GpuLost",
        "one of two GPUs has no values any more",
        gone({dcgm("GPU_TEMP"): "40x9 _x30", dcgm("GPU_TEMP", OTHER): "40x60"}),
        at=20 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 (GPU-3) is missing"),),
    ),
    Case(
        "GpuLost",
        "a GPU that NVML does not list, of which nothing was ever seen",
        {
            'gpufleet_gpus{instance="gpu-01",job="node",state="expected"}': "2x60",
            'gpufleet_gpus{instance="gpu-01",job="node",state="present"}': "1x60",
        },
        at=20 * 60,
        fires=(Firing({"instance": "gpu-01"}, "gpu-01: a GPU is missing"),),
    ),
    Case(
        "GpuLost",
        "the exporter is down: nothing is known of any GPU, which is another alert",
        gone({dcgm("GPU_TEMP"): "40x9 _x30", dcgm("GPU_TEMP", OTHER): "40x9 _x30"}),
        at=20 * 60,
    ),
    Case(
        "GpuLost",
        "the exporter came back and calls its labels otherwise: the same GPUs",
        gone(
            {
                dcgm("GPU_TEMP"): "40x9 _x30",
                dcgm("GPU_TEMP", NEW): "_x11 40x30",
                dcgm("GPU_TEMP", OTHER): "40x60",
            }
        ),
        at=20 * 60,
    ),
    Case(
        "GpuUnwatched",
        "a node without DCGM whose own facts have no GPU values",
        {'gpufleet_gpus{instance="gpu-02",job="node",state="expected"}': "2x60"},
        at=15 * 60,
        fires=(
            Firing(
                {"instance": "gpu-02"},
                "gpu-02: Prometheus gets no values for its GPUs, and the node has no DCGM",
            ),
        ),
    ),
    Case(
        "GpuUnwatched",
        "a node that is to have no GPUs",
        {'gpufleet_gpus{instance="monitor-01",job="node",state="expected"}': "0x60"},
        at=15 * 60,
    ),
    Case(
        "GpuUnwatched",
        "a node without DCGM, with our own values",
        {
            'gpufleet_gpus{instance="gpu-02",job="node",state="expected"}': "1x60",
            f"gpufleet_gpu_temperature_celsius{{{OWN}}}": "40x60",
        },
        at=15 * 60,
    ),
    Case(
        "GpuUnwatched",
        "a node with DCGM that does not answer: ExporterDown says so",
        {
            'gpufleet_gpus{instance="gpu-01",job="node",state="expected"}': "1x60",
            'up{instance="gpu-01",job="dcgm"}': "0x60",
        },
        at=15 * 60,
    ),
)

MEMORY = (
    Case(
        "EccUncorrected",
        "two errors",
        {dcgm("ECC_DBE_VOL_TOTAL"): "0x9 2x60"},
        at=12 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 had memory errors that could not be corrected"),),
    ),
    Case(
        "EccUncorrected",
        "the same from our own facts",
        {f"gpufleet_gpu_ecc_uncorrected_total{{{OWN}}}": "1x9 2x60"},
        at=12 * 60,
        fires=(Firing(OWN_GPU, "gpu-02: GPU 3 had memory errors that could not be corrected"),),
    ),
    Case(
        "EccUncorrected",
        "errors of weeks ago, and the exporter started again",
        {dcgm("ECC_DBE_VOL_TOTAL"): "2x9 _x9 2x60"},
        at=25 * 60,
    ),
    Case("EccUncorrected", "a reset: down to 0", {dcgm("ECC_DBE_VOL_TOTAL"): "2x9 0x60"}, at=720),
    Case(
        "EccUncorrected",
        "a blank value that passes",
        {dcgm("ECC_DBE_VOL_TOTAL"): f"0x9 {BLANK}x3 0x60"},
        at=12 * 60,
    ),
    Case(
        "RowRemapPending",
        "it is pending until a reset",
        {dcgm("ROW_REMAP_PENDING"): "1x30"},
        at=10 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 will remap rows of its memory at its next reset"),),
    ),
    Case("RowRemapPending", "the reset was done", {dcgm("ROW_REMAP_PENDING"): "1x9 0x9"}, at=1080),
    Case("RowRemapPending", "a blank value", {dcgm("ROW_REMAP_PENDING"): f"{BLANK}x30"}, at=600),
    Case(
        "RowRemapFailed",
        "a board for the vendor",
        {dcgm("ROW_REMAP_FAILURE"): "1x30"},
        at=10 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 could not remap a row of its memory"),),
    ),
    Case("RowRemapFailed", "a blank value", {dcgm("ROW_REMAP_FAILURE"): f"{BLANK}x30"}, at=600),
    Case("RowRemapFailed", "rows were remapped: 0", {dcgm("ROW_REMAP_FAILURE"): "0x30"}, at=600),
)

LINKS = (
    Case(
        "NvlinkDown",
        "a link of NVLink 5 went down for good",
        {dcgm("NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS"): "0x9 1x30"},
        at=11 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 lost an NVLink, which did not recover"),),
    ),
    Case(
        "NvlinkDown",
        "the same number, hours later",
        {dcgm("NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS"): "0x9 1x120"},
        at=120 * 60,
    ),
    Case(
        "NvlinkDown",
        "a blank value that passes",
        {dcgm("NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS"): f"0x9 {BLANK}x2 0x30"},
        at=11 * 60,
    ),
    Case(
        "NvlinkFlapping",
        "NVLink 4: two recoveries",
        {dcgm("NVLINK_RECOVERY_ERROR_COUNT_TOTAL"): "0x9 1x9 2x40"},
        at=40 * 60,
        fires=(
            Firing(
                GPU,
                "gpu-01: GPU 3 lost an NVLink 2 times in 6 hours, and the link recovered each time",
            ),
        ),
    ),
    Case(
        "NvlinkFlapping",
        "NVLink 5: three",
        {dcgm("NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS"): "0x9 3x40"},
        at=40 * 60,
        fires=(
            Firing(
                GPU,
                "gpu-01: GPU 3 lost an NVLink 3 times in 6 hours, and the link recovered each time",
            ),
        ),
    ),
    Case(
        "NvlinkFlapping",
        "one recovery, on a GPU that has had many",
        {dcgm("NVLINK_RECOVERY_ERROR_COUNT_TOTAL"): "7x19 8x40"},
        at=40 * 60,
    ),
    Case(
        "NvlinkFlapping",
        "NVLink 5: one",
        {dcgm("NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS"): "4x19 5x40"},
        at=40 * 60,
    ),
    Case(
        "NvlinkErrors",
        "200 replays a second",
        {dcgm("NVLINK_REPLAY_ERROR_COUNT_TOTAL"): "0+12000x30"},
        at=20 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 has 200 NVLink errors per second"),),
    ),
    Case(
        "NvlinkErrors",
        "a burst while links are trained at a start",
        {dcgm("NVLINK_REPLAY_ERROR_COUNT_TOTAL"): "0x5 90000x40"},
        at=12 * 60,
    ),
    Case(
        "NvlinkErrors",
        "large numbers of a year, and an exporter that starts again",
        {dcgm("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"): "900000x9 _x5 900001x30"},
        at=30 * 60,
    ),
    Case(
        "FabricNotReady",
        "the fabric manager failed",
        {dcgm("FABRIC_MANAGER_STATUS"): "4x30"},
        at=15 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 is not registered with the NVLink fabric"),),
    ),
    Case(
        "FabricNotReady",
        "never started, then in progress without an end",
        {dcgm("FABRIC_MANAGER_STATUS"): "1x5 2x30"},
        at=15 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 is not registered with the NVLink fabric"),),
    ),
    Case("FabricNotReady", "no fabric: 0", {dcgm("FABRIC_MANAGER_STATUS"): "0x30"}, at=900),
    Case(
        "FabricNotReady", "a boot: 1, 2, 3", {dcgm("FABRIC_MANAGER_STATUS"): "1 2x4 3x30"}, at=900
    ),
    Case("FabricNotReady", "blank", {dcgm("FABRIC_MANAGER_STATUS"): f"{BLANK}x30"}, at=900),
)

SPEED = (
    Case(
        "GpuHardwareSlowdown",
        "power brake and slowdown (0x88), with two minutes of pause",
        {dcgm("CLOCKS_EVENT_REASONS"): "136x9 0x2 136x30"},
        at=25 * 60,
        fires=(
            Firing(
                GPU,
                "gpu-01: GPU 3 runs at half its clock or less because the hardware slows it down",
            ),
        ),
    ),
    Case(
        "GpuHardwareSlowdown",
        "software's power cap (0x4) under full load, for hours",
        {dcgm("CLOCKS_EVENT_REASONS"): "4x60"},
        at=50 * 60,
    ),
    Case(
        "GpuHardwareSlowdown",
        "0x8 for a moment, as a change of clocks shows it",
        {dcgm("CLOCKS_EVENT_REASONS"): "1x9 8 1x30"},
        at=17 * 60,
    ),
    Case(
        "GpuHardwareSlowdown",
        "a blank value: as a number it would have every bit",
        {dcgm("CLOCKS_EVENT_REASONS"): f"{BLANK}x60"},
        at=50 * 60,
    ),
    Case(
        "GpuThermalThrottling",
        "a fifth of the time, in nanoseconds",
        {dcgm("THERMAL_VIOLATION"): "0+12000000000x60"},
        at=30 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 was throttled by heat 20% of the time"),),
    ),
    Case(
        "GpuThermalThrottling",
        "a burst of 5 minutes",
        {dcgm("THERMAL_VIOLATION"): "0x9 0+12000000000x5 72000000000x60"},
        at=22 * 60,
    ),
    Case(
        "GpuThermalThrottling",
        "the driver was loaded again: the counter begins at 0",
        {dcgm("THERMAL_VIOLATION"): "9000000000000x9 0x60"},
        at=25 * 60,
    ),
    Case(
        "GpuPowerThrottling",
        "held back at 400 of 700 watts",
        {
            dcgm("POWER_VIOLATION"): "0+54000000000x90",
            dcgm("POWER_USAGE"): "400x90",
            dcgm("ENFORCED_POWER_LIMIT"): "700x90",
        },
        at=50 * 60,
        fires=(
            Firing(
                GPU,
                (
                    "gpu-01: GPU 3 is throttled for power, although it draws "
                    "less than 90 % of its power limit"
                ),
            ),
        ),
    ),
    Case(
        "GpuPowerThrottling",
        "a busy GPU at its own limit: that is what limits are for",
        {
            dcgm("POWER_VIOLATION"): "0+54000000000x90",
            dcgm("POWER_USAGE"): "698x90",
            dcgm("ENFORCED_POWER_LIMIT"): "700x90",
        },
        at=50 * 60,
    ),
    Case(
        "GpuHot",
        "3 degrees below a board's own limit of 87",
        {dcgm("GPU_TEMP"): "84x30", dcgm("SLOWDOWN_TEMP"): "87x30"},
        at=15 * 60,
        fires=(
            Firing(GPU, "gpu-01: GPU 3 is 3 degrees below the temperature at which it throttles"),
        ),
    ),
    Case(
        "GpuHot",
        "a board that gives the margin, and a blank in place of the limit",
        {
            dcgm("GPU_TEMP"): "84x30",
            dcgm("SLOWDOWN_TEMP"): f"{BLANK}x30",
            dcgm("GPU_TEMP_LIMIT"): "2x30",
        },
        at=15 * 60,
        fires=(
            Firing(GPU, "gpu-01: GPU 3 is 2 degrees below the temperature at which it throttles"),
        ),
    ),
    Case(
        "GpuHot",
        "88 degrees on a board that may have 100: a constant would ring",
        {dcgm("GPU_TEMP"): "88x30", dcgm("SLOWDOWN_TEMP"): "100x30"},
        at=15 * 60,
    ),
    Case(
        "GpuHot",
        "a cool board that says it has no margin",
        {dcgm("GPU_TEMP"): "35x30", dcgm("GPU_TEMP_LIMIT"): "0x30"},
        at=15 * 60,
    ),
    Case(
        "GpuHot",
        "blank values",
        {dcgm("GPU_TEMP"): f"{BLANK}x30", dcgm("SLOWDOWN_TEMP"): "87x30"},
        at=15 * 60,
    ),
    Case(
        "GpuMemoryHot",
        "96 degrees where DCGM does not say how many it may have",
        {dcgm("MEMORY_TEMP"): "96x30"},
        at=15 * 60,
        fires=(
            Firing(GPU, "gpu-01: GPU 3 has memory at 96 degrees, which is at or above its limit"),
        ),
    ),
    Case(
        "GpuMemoryHot",
        "96 degrees on a board whose memory may have 105",
        {dcgm("MEMORY_TEMP"): "96x30", dcgm("MEM_MAX_OP_TEMP"): "105x30"},
        at=15 * 60,
    ),
    Case("GpuMemoryHot", "no sensor: blank", {dcgm("MEMORY_TEMP"): f"{BLANK}x30"}, at=15 * 60),
    Case(
        "PcieReplays",
        "two a second",
        {dcgm("PCIE_REPLAY_COUNTER"): "0+120x60"},
        at=40 * 60,
        fires=(Firing(GPU, "gpu-01: GPU 3 has to resend 120 PCIe packets per minute"),),
    ),
    Case(
        "PcieReplays",
        "some hundreds while the driver starts, then none",
        {dcgm("PCIE_REPLAY_COUNTER"): "0x5 400x60"},
        at=40 * 60,
    ),
    Case(
        "PcieReplays",
        "a blank value that passes",
        {dcgm("PCIE_REPLAY_COUNTER"): f"0x9 {BLANK}x3 0x60"},
        at=40 * 60,
    ),
)

# The last minute in which the first firing case of each is still silent.
EARLY = {
    "XidApplication": 29,
    "GpuLost": 16,
    "GpuUnwatched": 9,
    "RowRemapPending": 4,
    "RowRemapFailed": 4,
    "NvlinkErrors": 12,
    "FabricNotReady": 9,
    "GpuHardwareSlowdown": 4,
    "GpuThermalThrottling": 17,
    "GpuPowerThrottling": 32,
    "GpuHot": 9,
    "GpuMemoryHot": 9,
    "PcieReplays": 22,
}

_ALL = (*XIDS, *LOST, *MEMORY, *LINKS, *SPEED)
CASES = (*_ALL, *too_early(_ALL, EARLY))


def test_alerts_on_gpus_fire_where_they_must_and_nowhere_else(tmp_path: Path) -> None:
    files = rule_files(RuleSettings())
    run(CASES, {"gpu.rules.yml": files["gpu.rules.yml"]}, gpu_rules.ALERTS, tmp_path)


def test_every_xid_of_the_catalogue_is_in_one_class_of_alert() -> None:
    """By number, as facts on Xids have them: no class is empty, and none takes another's."""
    classes = {
        "off the bus": OFF_THE_BUS,
        "GSP": GSP,
        "NVLink": NVLINK,
        "contained": CONTAINED,
        "critical": gpu_rules.CRITICAL,
        "application": gpu_rules.APPLICATION,
    }
    numbers = [number for members in classes.values() for number in members]

    assert len(numbers) == len(set(numbers))
    assert set(numbers) < set(KINDS)
    assert {48, 64, 95, 110, 140, 143} <= classes["critical"]
    assert {13, 31, 43, 45, 68} <= classes["application"]
    assert {74, 144, 145, 149} <= classes["NVLink"]
