"""
Define the dashboard of a node: hardware, versions, stages and resources that are running out. Pure.
"""

from __future__ import annotations

from gpufleet.engines.promql import JOBS
from gpufleet.monitoring.dashboards.common import (
    ANY_IS_BAD,
    ANY_IS_TO_LOOK_AT,
    DEPLOYS,
    NODE,
    UP,
    YES_IS_BAD,
    YES_IS_TO_LOOK_AT,
    YES_STANDS_OUT,
    lines,
    stat,
    timeline,
)
from gpufleet.monitoring.dashboards.panel import (
    Colour,
    Column,
    Dashboard,
    Kind,
    Panel,
    Query,
    Row,
    Step,
    Unit,
)

_ON = 'instance="$instance"'
_RATE = "[$__rate_interval]"
_NEARLY_FULL = (Step(None, Colour.GOOD), Step(0.85, Colour.LOOK), Step(0.95, Colour.BAD))
# The types of local file systems. Others are in memory or on a different machine.
_DISKS = f'{_ON},fstype=~"ext[234]|xfs|btrfs|zfs|f2fs|overlay"'
_CARDS = f'{_ON},device!~"lo|veth.*|docker.*|br-.*"'

NOW = Row(
    "May the node serve?",
    (
        stat(
            "Answers",
            f'min(up{{job="node",{_ON}}})',
            "DOWN: check whether the node is off or only its exporter is down.",
            unit=Unit.STATE,
            shown=UP,
        ),
        stat(
            "Findings that block",
            f'sum(gpufleet_check_findings{{severity=~"block|unknown",{_ON}}})',
            "Run `gpufleet check`, which shows how to fix each finding.",
            steps=ANY_IS_BAD,
            empty="no check was recorded",
        ),
        stat(
            "GPUs missing",
            f'max(gpufleet_gpus{{state="expected",{_ON}}}) - max(gpufleet_gpus{{state="present",{_ON}}})',
            "Run `gpufleet check`, then reboot the node. If the GPU is still missing, replace it.",
            steps=ANY_IS_BAD,
            empty="not a GPU node",
        ),
        stat(
            "Driver parts differ",
            f"max(gpufleet_driver_mismatch{{{_ON}}})",
            "The installed and the loaded driver versions differ, so new processes fail. Reload the driver or reboot the node.",
            unit=Unit.STATE,
            shown=YES_IS_BAD,
            empty="no driver is loaded",
        ),
        stat(
            "Not checked",
            f"max(gpufleet_node_unchecked{{{_ON}}})",
            "The driver was changed. vLLM's units do not start until a check has passed.",
            unit=Unit.STATE,
            shown=YES_IS_BAD,
        ),
        stat(
            "Drift",
            f'sum(gpufleet_drift_differences{{matters=~"now|next_boot",{_ON}}})',
            "Run `gpufleet drift`. Then deploy, or change the settings to match the node.",
            steps=ANY_IS_TO_LOOK_AT,
            empty="no drift was recorded",
        ),
        stat(
            "Reboot pending",
            f"max(gpufleet_reboot_pending{{{_ON}}})",
            "Plan a reboot, because the installed and the running versions differ.",
            unit=Unit.STATE,
            shown=YES_IS_TO_LOOK_AT,
        ),
        stat(
            "Up since",
            f"1000 * max(node_boot_time_seconds{{{_ON}}})",
            "An unplanned boot means that the node crashed. `journalctl -b -1 -e` shows the last messages before it.",
            unit=Unit.AGO,
        ),
    ),
)

RUNS = Row(
    "What the node runs",
    (
        Panel(
            Kind.TABLE,
            "Versions",
            Unit.COUNT,
            (
                Query(
                    "max by (instance, kernel, driver_loaded, driver_disk, library, "
                    "fabric_manager, "
                    f"release, lock) (gpufleet_node_info{{{_ON}}})"
                ),
            ),
            "The loaded module, the module on disk and the library must have the same version.",
            14,
            4,
            columns=(
                Column("Kernel", label="kernel"),
                Column("Driver, loaded", label="driver_loaded"),
                Column("on the disk", label="driver_disk"),
                Column("library", label="library"),
                Column("Fabric manager", label="fabric_manager"),
                Column("vLLM", label="release"),
                Column("Lock", label="lock"),
            ),
        ),
        Panel(
            Kind.TABLE,
            "Stages",
            Unit.COUNT,
            (Query(f"max by (stage, model, release) (gpufleet_stage_info{{{_ON}}})"),),
            "If a unit is active but its stage does not answer, the stage is still starting or hangs.",
            10,
            4,
            columns=(
                Column("Stage", label="stage"),
                Column("Model", label="model", link="gpufleet-model"),
                Column(
                    "Unit", f"max by (stage) (gpufleet_stage_active{{{_ON}}})", shown=UP, width=80
                ),
                Column("Answers", f"min by (stage) (up{{{JOBS},{_ON}}})", shown=UP, width=80),
                Column(
                    "Restarts, 1 h",
                    f"round(max by (stage) (increase(gpufleet_stage_restarts_total{{{_ON}}}[1h])))",
                    steps=ANY_IS_TO_LOOK_AT,
                    width=110,
                ),
            ),
            empty="the node has no stage",
        ),
    ),
)

LOAD = Row(
    "Which resources are short",
    (
        lines(
            "Processors",
            Unit.RATIO,
            (
                Query(
                    "sum by (mode) (rate(node_cpu_seconds_total"
                    f'{{{_ON},mode!="idle"}}{_RATE}))'
                    f' / scalar(count(node_cpu_seconds_total{{{_ON},mode="idle"}}))',
                    "{{mode}}",
                ),
            ),
            "iowait: time spent waiting for disks. If system time is high while GPUs are busy, look for "
            "an unnecessary copy of data.",
            maximum=1,
            stacked=True,
        ),
        lines(
            "Memory",
            Unit.BYTES,
            (
                Query(
                    f"max(node_memory_MemTotal_bytes{{{_ON}}}) - "
                    f"max(node_memory_MemAvailable_bytes{{{_ON}}})",
                    "used",
                ),
                Query(f"max(node_memory_MemTotal_bytes{{{_ON}}})", "total", limit=True),
            ),
            "Near the dashed line, the kernel kills processes. Check the `MemoryMax` of the stage's unit.",
        ),
        lines(
            "Time in which work waited, by resource",
            Unit.RATIO,
            (
                Query(
                    f"max(rate(node_pressure_cpu_waiting_seconds_total{{{_ON}}}{_RATE}))",
                    "processors",
                ),
                Query(
                    f"max(rate(node_pressure_memory_waiting_seconds_total{{{_ON}}}{_RATE}))",
                    "memory",
                ),
                Query(
                    f"max(rate(node_pressure_io_waiting_seconds_total{{{_ON}}}{_RATE}))", "disks"
                ),
            ),
            "Above 10 %, the node does not have enough of this resource.",
            maximum=1,
        ),
        lines(
            "Filesystems",
            Unit.RATIO,
            (
                Query(
                    f"1 - max by (mountpoint) (node_filesystem_avail_bytes{{{_DISKS}}})"
                    f" / max by (mountpoint) (node_filesystem_size_bytes{{{_DISKS}}})",
                    "{{mountpoint}}",
                ),
            ),
            "A full disk stops deploys and downloads. Remove old releases and model files first.",
            steps=_NEARLY_FULL,
            maximum=1,
        ),
        lines(
            "Disks",
            Unit.BYTES_PER_SECOND,
            (
                Query(
                    f"sum by (device) (rate(node_disk_read_bytes_total{{{_ON}}}{_RATE}))",
                    "{{device}} read",
                ),
                Query(
                    f"sum by (device) (rate(node_disk_written_bytes_total{{{_ON}}}{_RATE}))",
                    "{{device}} written",
                ),
            ),
            "Most reads happen while a model is loaded.",
        ),
        lines(
            "Network",
            Unit.BYTES_PER_SECOND,
            (
                Query(
                    f"sum by (device) (rate(node_network_receive_bytes_total{{{_CARDS}}}{_RATE}))",
                    "{{device}} in",
                ),
                Query(
                    f"sum by (device) (rate(node_network_transmit_bytes_total{{{_CARDS}}}{_RATE}))",
                    "{{device}} out",
                ),
            ),
            "For replicas that span nodes, compare the traffic with the network cards' speed.",
        ),
    ),
)

HEALTH = Row(
    "What may go wrong next",
    (
        lines(
            "Clock error",
            Unit.SECONDS,
            (Query(f"max(node_timex_offset_seconds{{{_ON}}})", "offset"),),
            "Above 50 ms, you cannot compare the logs of different nodes. Check whether chrony runs.",
            width=6,
            height=7,
            minimum=None,
        ),
        lines(
            "Killed for lack of memory",
            Unit.COUNT,
            (Query(f"max(increase(node_vmstat_oom_kill{{{_ON}}}[10m]))", "processes"),),
            "`journalctl -k` shows which process was killed, and which cgroup was full.",
            width=6,
            height=7,
        ),
        timeline(
            "Units that failed",
            (
                Query(
                    f'max by (name) (node_systemd_unit_state{{{_ON},state="failed"}})',
                    "{{name}}",
                ),
            ),
            "Run `systemctl status` and read the unit's journal.",
            shown=YES_STANDS_OUT,
            width=12,
            height=7,
            empty="the node exporter's collector systemd is off",
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="gpufleet-node",
    title="gpufleet: node",
    question="May this node serve, what does it run, and which resources are short?",
    variables=(NODE,),
    marks=(DEPLOYS,),
    rows=(NOW, RUNS, LOAD, HEALTH),
)
