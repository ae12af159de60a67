"""
List the metrics of the node exporter that rules and dashboards use. Pure.

The names, types and labels were read from Debian's package 1.5.0 on a Debian 12 machine. They are
the same in the publisher's 1.12. If the exporter exports a metric as "untyped" (vmstat, netstat),
the type here is that of the kernel's value. `only` has the collector or the hardware that a metric
needs. The collectors for GPU nodes are in monitoring/node_exporter.py.
"""

from __future__ import annotations

from typing import Literal

from gpufleet.monitoring.metrics.metric import Job, Metric

_SOURCE = "prometheus-node-exporter 1.5.0-1+b6, its own /metrics"
_MIXIN = "node exporter 1.5 and 1.12, collector's source"

FILESYSTEM = ("device", "fstype", "mountpoint")
INFINIBAND = ("device", "port")
BONDS = "nodes with bonded network interfaces"
RAIDS = "nodes with Linux software RAID"
ADAPTERS = "nodes with InfiniBand or RoCE adapters"


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
    source = _MIXIN if only else _SOURCE
    return Metric(f"node_{name}", Job.NODE, kind, help_text, labels, only=only, source=source)


MACHINE = (
    _gauge("boot_time_seconds", "When the node's kernel started, in seconds since 1970"),
    _gauge("time_seconds", "The node's clock, in seconds since 1970"),
    _gauge(
        "uname_info",
        "Always 1; its labels say what kernel runs",
        *("domainname", "machine", "nodename", "release", "sysname", "version"),
    ),
    _gauge("timex_offset_seconds", "How far the clock is from its source, in seconds"),
    _gauge("timex_sync_status", "Whether the kernel considers the clock synchronised"),
    _gauge("timex_maxerror_seconds", "How far the clock may be off at most, in seconds"),
    _counter("cpu_seconds_total", "CPU time by what it was spent on, in seconds", "cpu", "mode"),
    _gauge("load1", "Processes that run or wait to, average of a minute"),
    _gauge("load5", "Processes that run or wait to, average of 5 minutes"),
    _gauge("procs_blocked", "Processes that wait for a disk or a driver, and cannot be killed"),
    _gauge("procs_running", "Processes that run or wait for a CPU"),
    _gauge("filefd_allocated", "Open files"),
    _gauge("filefd_maximum", "Open files that the kernel allows"),
)

MEMORY = (
    _gauge("memory_MemTotal_bytes", "Memory of the node, in bytes"),
    _gauge("memory_MemAvailable_bytes", "Memory that is available to programs, in bytes"),
    _gauge("memory_MemFree_bytes", "Memory that holds nothing, in bytes"),
    _gauge("memory_Shmem_bytes", "Memory in /dev/shm and shared between processes, in bytes"),
    _gauge("memory_SwapTotal_bytes", "Swap of the node, in bytes"),
    _gauge("memory_SwapFree_bytes", "Swap that is free, in bytes"),
    _counter("vmstat_oom_kill", "Processes that the kernel killed for lack of memory"),
    _counter("vmstat_pgmajfault", "Pages that had to be read from a disk"),
    _counter("pressure_cpu_waiting_seconds_total", "Time in which something waited for a CPU"),
    _counter("pressure_io_waiting_seconds_total", "Time in which something waited for a disk"),
    _counter("pressure_io_stalled_seconds_total", "Time in which everything waited for a disk"),
    _counter("pressure_memory_waiting_seconds_total", "Time in which something waited for memory"),
    _counter("pressure_memory_stalled_seconds_total", "Time in which all waited for memory"),
    _counter(
        "edac_uncorrectable_errors_total",
        "Memory errors of the host that could not be corrected",
        "controller",
        only="nodes whose memory controller reports errors",
    ),
)

DISKS = (
    _gauge("filesystem_size_bytes", "Size of a file system, in bytes", *FILESYSTEM),
    _gauge("filesystem_avail_bytes", "Free space for all users, in bytes", *FILESYSTEM),
    _gauge("filesystem_free_bytes", "Free space for root, in bytes", *FILESYSTEM),
    _gauge("filesystem_files", "Inodes of a file system", *FILESYSTEM),
    _gauge("filesystem_files_free", "Inodes that are free", *FILESYSTEM),
    _gauge("filesystem_readonly", "Whether a file system is read-only", *FILESYSTEM),
    _gauge("filesystem_device_error", "Whether its numbers could not be read", *FILESYSTEM),
    _counter("disk_read_bytes_total", "Bytes read", "device"),
    _counter("disk_written_bytes_total", "Bytes written", "device"),
    _counter("disk_io_time_seconds_total", "Time in which the device was busy", "device"),
    _counter("disk_io_time_weighted_seconds_total", "The same times what waited", "device"),
    _gauge("md_disks_required", "Disks that a RAID should have", "device", only=RAIDS),
    _gauge("md_disks", "Disks of a RAID by state", "device", "state", only=RAIDS),
)

NETWORK = (
    _gauge("network_up", "Whether an interface is up", "device"),
    _gauge("network_carrier", "Whether an interface has a link", "device"),
    _counter("network_carrier_changes_total", "Number of changes of the link's state", "device"),
    _gauge(
        "network_speed_bytes",
        "Speed of the link, in bytes per second",
        "device",
        only="nodes with interfaces whose driver knows it",
    ),
    _counter("network_receive_bytes_total", "Bytes received", "device"),
    _counter("network_receive_packets_total", "Packets received", "device"),
    _counter("network_receive_errs_total", "Packets received with errors", "device"),
    _counter("network_receive_drop_total", "Packets received and dropped", "device"),
    _counter("network_transmit_bytes_total", "Bytes sent", "device"),
    _counter("network_transmit_packets_total", "Packets sent", "device"),
    _counter("network_transmit_errs_total", "Packets that could not be sent", "device"),
    _counter("network_transmit_drop_total", "Packets dropped before they were sent", "device"),
    _counter("netstat_Tcp_RetransSegs", "TCP segments sent again"),
    _counter("netstat_Tcp_OutSegs", "TCP segments sent"),
    _gauge("netstat_Tcp_CurrEstab", "TCP connections"),
    _counter("netstat_TcpExt_ListenDrops", "Connections dropped because they were not accepted"),
    _gauge("bonding_slaves", "Interfaces of a bond", "master", only=BONDS),
    _gauge("bonding_active", "Interfaces of a bond that work", "master", only=BONDS),
    _gauge("infiniband_state_id", "State of a port; 4 is active", *INFINIBAND, only=ADAPTERS),
    _gauge(
        "infiniband_physical_state_id",
        "State of a port's link; 3 is disabled, 5 is up",
        *INFINIBAND,
        only=ADAPTERS,
    ),
    _gauge(
        "infiniband_rate_bytes_per_second",
        "Speed of a port, in bytes per second",
        *INFINIBAND,
        only=ADAPTERS,
    ),
    _counter(
        "infiniband_link_downed_total", "How often a port lost its link", *INFINIBAND, only=ADAPTERS
    ),
    _counter(
        "infiniband_port_data_received_bytes_total", "Bytes received", *INFINIBAND, only=ADAPTERS
    ),
    _counter(
        "infiniband_port_data_transmitted_bytes_total", "Bytes sent", *INFINIBAND, only=ADAPTERS
    ),
    _counter(
        "infiniband_port_receive_errors_total",
        "Packets received with errors",
        *INFINIBAND,
        only=ADAPTERS,
    ),
    _counter(
        "infiniband_symbol_error_total", "Symbols received with errors", *INFINIBAND, only=ADAPTERS
    ),
)

SERVICES = (
    _gauge(
        "systemd_unit_state",
        "1 for the state that a unit is in (active, activating, deactivating, failed, inactive)",
        *("name", "state", "type"),
        only="nodes with the systemd collector, for the units that it includes",
    ),
    _gauge(
        "systemd_system_running",
        "Whether systemd has no failed unit",
        only="nodes with the systemd collector",
    ),
)

EXPORTER = (
    _gauge(
        "exporter_build_info",
        "Always 1; its labels say what exporter this is",
        *("branch", "goversion", "revision", "version"),
    ),
    _gauge("scrape_collector_success", "Whether a collector could read", "collector"),
    _gauge("scrape_collector_duration_seconds", "How long a collector took", "collector"),
    _gauge("textfile_scrape_error", "Whether a file of the textfile collector could not be read"),
    _gauge(
        "textfile_mtime_seconds",
        "When a file of the textfile collector was written, in seconds since 1970",
        "file",
        only="nodes with such files",
    ),
)

METRICS: tuple[Metric, ...] = (*MACHINE, *MEMORY, *DISKS, *NETWORK, *SERVICES, *EXPORTER)
