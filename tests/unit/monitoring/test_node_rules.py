"""Alerts on machines: each fires where it must, and stays silent at what only looks like it."""

from __future__ import annotations

from pathlib import Path

from gpufleet.monitoring.rules import node_rules
from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from tests.unit.monitoring.promtool import Case, Firing, run, too_early

NODE = 'instance="gpu-01",job="node"'
ROOT = f'{NODE},device="/dev/sda1",fstype="ext4",mountpoint="/"'
# As the node exporter writes it since 1.8.
ROOT_NEW = f'{ROOT},device_error=""'
STORE = f'{NODE},device="store:/models",fstype="nfs4",mountpoint="/models"'
ETH0 = f'{NODE},device="eth0"'
ON = {"instance": "gpu-01"}
ON_ROOT = {"instance": "gpu-01", "mountpoint": "/"}
ON_ETH0 = {"instance": "gpu-01", "device": "eth0"}
IB = f'{NODE},device="mlx5_0",port="1"'


def series(name: str, labels: str = NODE) -> str:
    """Write a series of the node exporter's."""
    return f"node_{name}{{{labels}}}"


def carried(packets: str, errors: str) -> dict[str, str]:
    """Write an interface's counters."""
    return {
        series("network_receive_packets_total", ETH0): packets,
        series("network_transmit_packets_total", ETH0): "0x120",
        series("network_receive_errs_total", ETH0): errors,
        series("network_transmit_errs_total", ETH0): "0x120",
    }


DISKS = (
    Case(
        "DiskFilling",
        "1 % of the disk every hour, at 15 %",
        {
            series("filesystem_avail_bytes", ROOT): "250-0.83x150",
            series("filesystem_size_bytes", ROOT): "1000x150",
        },
        step=300,
        at=9 * 3600,
        fires=(Firing(ON_ROOT, "gpu-01: / will be full within a day at the current rate"),),
    ),
    Case(
        "DiskFilling",
        "a model was downloaded: much at once, and plenty left",
        {
            series("filesystem_avail_bytes", ROOT): "900x36 900-50x12 300x48",
            series("filesystem_size_bytes", ROOT): "1000x150",
        },
        step=300,
        at=4 * 3600,
    ),
    Case(
        "DiskFilling",
        "the same trend, with three quarters left",
        {
            series("filesystem_avail_bytes", ROOT): "850-0.83x150",
            series("filesystem_size_bytes", ROOT): "1000x150",
        },
        step=300,
        at=8 * 3600,
    ),
    Case(
        "DiskFilling",
        "little left, and nothing that grows",
        {
            series("filesystem_avail_bytes", ROOT): "100x150",
            series("filesystem_size_bytes", ROOT): "1000x150",
        },
        step=300,
        at=8 * 3600,
    ),
    Case(
        "DiskFull",
        "2 % left",
        {
            series("filesystem_avail_bytes", ROOT_NEW): "20x30",
            series("filesystem_size_bytes", ROOT_NEW): "1000x30",
        },
        at=600,
        fires=(Firing(ON_ROOT, "gpu-01: / has 2% of its space left"),),
    ),
    Case(
        "DiskFull",
        "full for two minutes",
        {
            series("filesystem_avail_bytes", ROOT): "200x5 20x2 200x30",
            series("filesystem_size_bytes", ROOT): "1000x60",
        },
        at=720,
    ),
    Case(
        "DiskFull",
        "a full file server, which is one machine and not all of its clients",
        {
            series("filesystem_avail_bytes", STORE): "0x30",
            series("filesystem_size_bytes", STORE): "1000x30",
        },
        at=600,
    ),
    Case(
        "InodesLow",
        "4 % left",
        {
            series("filesystem_files_free", ROOT): "40x30",
            series("filesystem_files", ROOT): "1000x30",
        },
        at=1200,
        fires=(Firing(ON_ROOT, "gpu-01: / has 4% of its inodes left"),),
    ),
    Case(
        "InodesLow",
        "btrfs, which counts no inodes: 0 of 0",
        {series("filesystem_files_free", ROOT): "0x30", series("filesystem_files", ROOT): "0x30"},
        at=1200,
    ),
    Case(
        "InodesLow",
        "a third left",
        {
            series("filesystem_files_free", ROOT): "330x30",
            series("filesystem_files", ROOT): "1000x30",
        },
        at=1200,
    ),
    Case(
        "FilesystemReadOnly",
        "the kernel has mounted it read-only after errors",
        {series("filesystem_readonly", ROOT): "0x5 1x30"},
        at=720,
        fires=(Firing(ON_ROOT, "gpu-01: / is read-only"),),
    ),
    Case(
        "FilesystemReadOnly",
        "a mounted image, read-only by its nature",
        {
            series(
                "filesystem_readonly",
                f'{NODE},device="/dev/sr0",fstype="iso9660",mountpoint="/media"',
            ): "1x30"
        },
        at=720,
    ),
    Case(
        "RaidDegraded",
        "one disk of two",
        {
            series("md_disks_required", f'{NODE},device="md0"'): "2x30",
            series("md_disks", f'{NODE},device="md0",state="active"'): "1x30",
            series("md_disks", f'{NODE},device="md0",state="failed"'): "1x30",
        },
        at=1200,
        fires=(Firing({**ON, "device": "md0"}, "gpu-01: md0 is degraded, missing disks: 1"),),
    ),
    Case(
        "RaidDegraded",
        "a spare disk more than required",
        {
            series("md_disks_required", f'{NODE},device="md0"'): "2x30",
            series("md_disks", f'{NODE},device="md0",state="active"'): "2x30",
            series("md_disks", f'{NODE},device="md0",state="spare"'): "1x30",
        },
        at=1200,
    ),
)

MEMORY = (
    Case(
        "HostMemoryLow",
        "4 % left",
        {
            series("memory_MemAvailable_bytes"): "40x60",
            series("memory_MemTotal_bytes"): "1000x60",
        },
        at=1800,
        fires=(Firing(ON, "gpu-01 has 4% of its memory left"),),
    ),
    Case(
        "HostMemoryLow",
        "a model that loads for 10 minutes",
        {
            series("memory_MemAvailable_bytes"): "500x5 40x10 500x60",
            series("memory_MemTotal_bytes"): "1000x90",
        },
        at=15 * 60,
    ),
    Case(
        "HostMemoryLow",
        "a third left, all day",
        {
            series("memory_MemAvailable_bytes"): "330x60",
            series("memory_MemTotal_bytes"): "1000x60",
        },
        at=1800,
    ),
    Case(
        "OomKill",
        "one process",
        {series("vmstat_oom_kill"): "3x9 4x30"},
        at=12 * 60,
        fires=(Firing(ON, "gpu-01: the kernel killed a process for lack of memory"),),
    ),
    Case(
        "OomKill",
        "a reboot: the counter begins at 0, and the exporter was away for 5 minutes",
        {series("vmstat_oom_kill"): "3x9 _x5 0x30"},
        at=20 * 60,
    ),
    Case(
        "HostMemoryErrors",
        "one error",
        {series("edac_uncorrectable_errors_total", f'{NODE},controller="0"'): "0x9 1x90"},
        at=12 * 60,
        fires=(Firing(ON, "gpu-01 had errors in its main memory that could not be corrected"),),
    ),
    Case(
        "HostMemoryErrors",
        "the same number two hours later",
        {series("edac_uncorrectable_errors_total", f'{NODE},controller="0"'): "0x9 1x180"},
        at=150 * 60,
    ),
)

CLOCK = (
    Case(
        "ClockNotSynchronised",
        "no time server",
        {series("timex_sync_status"): "0x60", series("timex_maxerror_seconds"): "16x60"},
        at=1800,
        fires=(Firing(ON, "gpu-01: the clock is not synchronised"),),
    ),
    Case(
        "ClockNotSynchronised",
        "not said to be synchronised, but set: chrony without rtcsync",
        {series("timex_sync_status"): "0x60", series("timex_maxerror_seconds"): "5x60"},
        at=1800,
    ),
    Case(
        "ClockSkew",
        "ten seconds ahead, and said to be synchronised",
        {series("time_seconds"): "10+60x60", series("timex_sync_status"): "1x60"},
        at=1800,
        fires=(Firing(ON, "gpu-01: the clock is off by 10s"),),
    ),
    Case(
        "ClockSkew",
        "two seconds, as slow scrapes look",
        {series("time_seconds"): "2+60x60"},
        at=1800,
    ),
    Case("ClockSkew", "one slow scrape", {series("time_seconds"): "0+60x9 548 660+60x60"}, at=720),
)

NETWORK = (
    Case(
        "NetworkErrors",
        "one packet of a hundred",
        carried("0+6000x120", "0+60x120"),
        at=90 * 60,
        fires=(Firing(ON_ETH0, "gpu-01: eth0 has errors in 1% of its packets"),),
    ),
    Case(
        "NetworkErrors",
        "errors of years, and a driver that was loaded again",
        carried("90000000x30 0+6000x90", "90000x30 0x90"),
        at=90 * 60,
    ),
    Case(
        "NetworkErrors",
        "one packet of two thousand",
        carried("0+6000x120", "0+3x120"),
        at=90 * 60,
    ),
    Case("NetworkErrors", "an interface without traffic", carried("0x120", "0x120"), at=90 * 60),
    Case(
        "LinkFlapping",
        "ten changes",
        {series("network_carrier_changes_total", ETH0): "2x9 2+1x10 12x60"},
        at=25 * 60,
        fires=(Firing(ON_ETH0, "gpu-01: the link of eth0 goes down and up again"),),
    ),
    Case(
        "LinkFlapping",
        "a cable that was replaced",
        {series("network_carrier_changes_total", ETH0): "2x9 3x2 4x60"},
        at=25 * 60,
    ),
    Case(
        "InfinibandFlapping",
        "twice",
        {series("infiniband_link_downed_total", IB): "0x9 1x9 2x60"},
        at=30 * 60,
        fires=(
            Firing(
                {**ON, "device": "mlx5_0", "port": "1"},
                "gpu-01: port 1 of mlx5_0 lost its link again",
            ),
        ),
    ),
    Case(
        "InfinibandFlapping",
        "once: a switch that was restarted",
        {series("infiniband_link_downed_total", IB): "5x9 6x60"},
        at=30 * 60,
    ),
)

UNIT = f'{NODE},name="nvidia-persistenced.service",type="forking"'
SERVICES = (
    Case(
        "UnitFailed",
        "a service of ours",
        {
            f'node_systemd_unit_state{{{UNIT},state="failed"}}': "1x30",
            f'node_systemd_unit_state{{{UNIT},state="active"}}': "0x30",
        },
        at=600,
        fires=(
            Firing(
                {**ON, "name": "nvidia-persistenced.service"},
                "gpu-01: nvidia-persistenced.service has failed",
            ),
        ),
    ),
    Case(
        "UnitFailed",
        "a scrape that was missed while it had failed",
        {f'node_systemd_unit_state{{{UNIT},state="failed"}}': "1x20 stale 1x9"},
        at=660,
        fires=(
            Firing(
                {**ON, "name": "nvidia-persistenced.service"},
                "gpu-01: nvidia-persistenced.service has failed",
            ),
        ),
        step=30,
    ),
    Case(
        "UnitFailed",
        "a failed vLLM unit, which has its own alert, and one that is inactive",
        {
            f'node_systemd_unit_state{{{NODE},name="vllm-tiny-0.service",state="failed"}}': "1x30",
            f'node_systemd_unit_state{{{UNIT},state="inactive"}}': "1x30",
        },
        at=600,
    ),
    Case(
        "CollectorFailed",
        "one of them",
        {
            series("scrape_collector_success", f'{NODE},collector="systemd"'): "0x30",
            series("scrape_collector_success", f'{NODE},collector="cpu"'): "1x30",
        },
        at=1200,
        fires=(
            Firing(
                {**ON, "collector": "systemd"},
                "gpu-01: the node exporter's collector systemd fails",
            ),
        ),
    ),
    Case(
        "CollectorFailed",
        "no such hardware: the exporter says 0 as well",
        {
            series("scrape_collector_success", f'{NODE},collector="bonding"'): "0x30",
            series("scrape_collector_success", f'{NODE},collector="infiniband"'): "0x30",
        },
        at=1200,
    ),
    Case(
        "CollectorFailed",
        "now and then",
        {series("scrape_collector_success", f'{NODE},collector="systemd"'): "0x3 1 0x3 1 0x9"},
        at=12 * 60,
    ),
)

# The last minute in which the first firing case of each is still silent.
EARLY = {
    "DiskFilling": 360,
    "DiskFull": 4,
    "InodesLow": 14,
    "FilesystemReadOnly": 7,
    "HostMemoryLow": 14,
    "ClockNotSynchronised": 14,
    "ClockSkew": 9,
    "NetworkErrors": 30,
    "UnitFailed": 4,
    "CollectorFailed": 14,
    "RaidDegraded": 14,
}

_ALL = (*DISKS, *MEMORY, *CLOCK, *NETWORK, *SERVICES)
CASES = (*_ALL, *too_early(_ALL, EARLY))


def test_alerts_on_machines_fire_where_they_must_and_nowhere_else(tmp_path: Path) -> None:
    files = rule_files(RuleSettings())
    run(CASES, {"node.rules.yml": files["node.rules.yml"]}, node_rules.ALERTS, tmp_path)
