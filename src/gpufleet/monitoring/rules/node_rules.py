"""
Define recording rules and alerts on machines. Pure.

The labels of a file system are instance and mountpoint, and those of a network interface are
instance and device.
"""

from __future__ import annotations

from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording

# These types of file systems are left out: those of other machines, which report them themselves,
# and images, which are always full. Overlays are included, because the root of a node that boots
# from an image may be an overlay. /dev/shm is included, because vLLM's ranks fail if it is full.
_LOCAL = (
    'fstype!~"nfs.*|lustre|gpfs|beegfs.*|ceph.*|wekafs|cifs|smb.*|9p|virtiofs|fuse.*'
    '|squashfs|erofs|iso9660"'
)
# The types of file systems that are usually mounted for writing.
_WRITTEN = 'fstype=~"ext[234]|xfs|btrfs|f2fs|zfs"'
_PLACE = "by (instance, mountpoint)"
# Loopback and the interfaces of containers and bridges are left out, because they have no cable.
_WIRED = 'device!~"lo|veth.*|docker.*|br-.*|virbr.*|cni.*|flannel.*|cali.*|tun.*|tap.*"'
_DAY = 86400
# The collectors that have values on every node. Collectors for hardware report 0 if the hardware
# does not exist, as they do if they fail. On a machine without such hardware, fifteen collectors of
# Debian's 1.5.0 reported 0.
_EVERYWHERE = (
    "cpu|diskstats|filefd|filesystem|loadavg|meminfo|netclass|netdev|netstat|pressure|stat|systemd"
    "|textfile|timex|uname|vmstat"
)
# Sometimes a scrape of a busy node fails, and a value that comes from a single scrape is missing for
# that minute. The alert would then end, wait again, and come back as a new alert. (Two of these
# alerts did so for an hour in a measurement.) If the node does not come back, NodeDown fires within
# this time.
_MISSED_SECONDS = 300

RECORDINGS: tuple[Recording, ...] = (
    Recording(
        "node:cpu_busy:ratio_rate5m",
        '1 - avg by (instance) (rate(node_cpu_seconds_total{mode="idle"}[5m]))',
        "Share of the node's CPU time that was used, 0 to 1",
        ("instance",),
    ),
    Recording(
        "node:memory_available:ratio",
        "max by (instance) (node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes)",
        "Share of the node's memory that is available to programs, 0 to 1",
        ("instance",),
    ),
    Recording(
        "node:filesystem_available:ratio",
        f"min {_PLACE} (node_filesystem_avail_bytes{{{_LOCAL}}}\n"
        f"  / (node_filesystem_size_bytes{{{_LOCAL}}} > 0))",
        "Share of a file system's space that is free for programs, 0 to 1",
        ("instance", "mountpoint"),
    ),
    Recording(
        "node:filesystem_available_bytes:in_a_day",
        # Six hours are long enough, so that the download of a model does not look like a trend.
        f"min {_PLACE} (predict_linear(node_filesystem_avail_bytes{{{_LOCAL}}}[6h], {_DAY}))",
        "Free space that a file system will have in one day, predicted from the last 6 hours, in bytes",
        ("instance", "mountpoint"),
    ),
    Recording(
        "node:filesystem_inodes_free:ratio",
        f"min {_PLACE} (node_filesystem_files_free{{{_WRITTEN}}}\n"
        f"  / (node_filesystem_files{{{_WRITTEN}}} > 0))",
        "Share of a file system's inodes that are free, 0 to 1",
        ("instance", "mountpoint"),
    ),
    Recording(
        "node:clock_skew_seconds",
        # `timestamp` is the time at which Prometheus read the value, by Prometheus' clock.
        "max by (instance) (node_time_seconds - timestamp(node_time_seconds))",
        "Seconds by which the node's clock is ahead of Prometheus' clock",
        ("instance",),
    ),
    Recording(
        "node:network_errors:ratio_rate15m",
        "max by (instance, device) (\n"
        f"  (rate(node_network_receive_errs_total{{{_WIRED}}}[15m])\n"
        f"    + rate(node_network_transmit_errs_total{{{_WIRED}}}[15m]))\n"
        f"  / (rate(node_network_receive_packets_total{{{_WIRED}}}[15m])\n"
        f"    + rate(node_network_transmit_packets_total{{{_WIRED}}}[15m]) > 0)\n"
        ")",
        "Share of an interface's packets that had errors, 0 to 1",
        ("instance", "device"),
    ),
)

_ON = "{{ $labels.instance }}"
_MOUNT = "{{ $labels.instance }}: {{ $labels.mountpoint }}"

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="DiskFilling",
        # Only if little space is left, because a disk to which a model was just downloaded also
        # seems to fill.
        expr=(
            "node:filesystem_available_bytes:in_a_day < 0\n"
            "  and node:filesystem_available:ratio < 0.2"
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=3600,  # the trend of 6 hours must continue for one more hour
        summary=f"{_MOUNT} will be full within a day at the current rate",
        action="Find what grows with `du -xh --max-depth=2`. Old models and releases can be removed.",
    ),
    Alert(
        name="DiskFull",
        expr="node:filesystem_available:ratio < 0.03",
        severity=AlertSeverity.PAGE,
        for_seconds=300,  # files may be written and deleted again within minutes
        summary=f"{_MOUNT} has {{{{ $value | humanizePercentage }}}} of its space left",
        action="Free space now: servers fail when they cannot write caches or logs.",
    ),
    Alert(
        name="InodesLow",
        expr="node:filesystem_inodes_free:ratio < 0.05",
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # as for DiskFull, but the number of inodes changes more slowly
        summary=f"{_MOUNT} has {{{{ $value | humanizePercentage }}}} of its inodes left",
        action="Find the directory with many small files. Most often it is a cache of compiled kernels.",
    ),
    Alert(
        name="FilesystemReadOnly",
        expr=f"max {_PLACE} (node_filesystem_readonly{{{_WRITTEN}}}) == 1",
        severity=AlertSeverity.PAGE,
        for_seconds=120,  # an operator may have remounted it for a moment
        summary=f"{_MOUNT} is read-only",
        action="Read the kernel log. The kernel makes a file system read-only when the disk has errors.",
        keep_seconds=_MISSED_SECONDS,
    ),
    Alert(
        name="HostMemoryLow",
        expr="node:memory_available:ratio < 0.05",
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # loading a model needs much memory, but only for some minutes
        summary=f"{_ON} has {{{{ $value | humanizePercentage }}}} of its memory left",
        action="Find the processes that use the memory with `systemd-cgtop -m`. If no memory is left, the kernel kills processes.",
    ),
    Alert(
        name="OomKill",
        expr="max by (instance) (increase(node_vmstat_oom_kill[15m])) > 0",
        severity=AlertSeverity.TICKET,
        for_seconds=0,  # it has happened
        summary=f"{_ON}: the kernel killed a process for lack of memory",
        action="`journalctl -k -g 'Out of memory'` shows which process was killed. Check that its unit runs again.",
    ),
    Alert(
        name="HostMemoryErrors",
        expr="max by (instance) (increase(node_edac_uncorrectable_errors_total[1h])) > 0",
        severity=AlertSeverity.PAGE,
        for_seconds=0,  # errors that happened do not go away
        summary=f"{_ON} had errors in its main memory that could not be corrected",
        action="Take the node out of service. The kernel log names the faulty memory module.",
    ),
    Alert(
        name="ClockNotSynchronised",
        # The kernel's own state, and an error bound that grows only while the clock is not set.
        expr=(
            "max by (instance) (node_timex_sync_status) == 0\n"
            "  and max by (instance) (node_timex_maxerror_seconds) >= 16"
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # chrony needs some minutes after a boot
        summary=f"{_ON}: the clock is not synchronised",
        action="Check with `chronyc tracking` or `timedatectl timesync-status` whether the node reaches a time server.",
    ),
    Alert(
        name="ClockSkew",
        expr="abs(node:clock_skew_seconds) > 5",
        severity=AlertSeverity.TICKET,
        # A slow scrape looks like a wrong clock for a moment. Only a difference that lasts is a
        # problem for certificates and logs.
        for_seconds=600,
        summary=f"{_ON}: the clock is off by {{{{ $value | humanizeDuration }}}}",
        action="Compare the output of `date` with a different node's. Restart chrony, which then sets the clock.",
    ),
    Alert(
        name="NetworkErrors",
        expr="node:network_errors:ratio_rate15m > 0.001",
        severity=AlertSeverity.TICKET,
        # An error in one of a thousand packets slows TCP down noticeably. The rate is over 15
        # minutes.
        for_seconds=1800,
        summary=(
            f"{_ON}: {{{{ $labels.device }}}} has errors in "
            "{{ $value | humanizePercentage }} of its packets"
        ),
        action="`ethtool -S` shows which error counter grows. Check the cable, the transceiver and the switch port.",
    ),
    Alert(
        name="LinkFlapping",
        expr=(
            "max by (instance, device) (\n"
            f"  increase(node_network_carrier_changes_total{{{_WIRED}}}[1h])\n"
            ") > 4"
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=0,  # counted over an hour; a reboot or a replaced cable causes two changes
        summary=f"{_ON}: the link of {{{{ $labels.device }}}} goes down and up again",
        action="Check the cable, the transceiver and the switch's port. Replicas that span nodes lose connections over this link.",
    ),
    Alert(
        name="InfinibandFlapping",
        expr="max by (instance, device, port) "
        "(increase(node_infiniband_link_downed_total[1h])) > 1.5",
        severity=AlertSeverity.TICKET,
        for_seconds=0,  # counted over an hour; a switch that restarts causes one event
        summary=f"{_ON}: port {{{{ $labels.port }}}} of {{{{ $labels.device }}}} lost its link again",
        action="Run `ibstat` and read the switch's log. Move replicas that span nodes away from this node.",
    ),
    Alert(
        name="UnitFailed",
        # vLLM's own units have alerts of their own.
        expr=(
            'max by (instance, name) (node_systemd_unit_state{state="failed", name!~"vllm-.*"}) == 1'
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=300,  # systemd restarts a unit within seconds
        summary=f"{_ON}: {{{{ $labels.name }}}} has failed",
        action="`systemctl status` and `journalctl -u` show the reason. Repair the cause, then run `systemctl restart`.",
        keep_seconds=_MISSED_SECONDS,
    ),
    Alert(
        name="CollectorFailed",
        expr=f'max by (instance, collector) (node_scrape_collector_success{{collector=~"{_EVERYWHERE}"}}) == 0',
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # under load, a collector may sometimes time out
        summary=f"{_ON}: the node exporter's collector {{{{ $labels.collector }}}} fails",
        action="The node exporter's journal shows the reason. Alerts on this collector's values cannot fire.",
        keep_seconds=_MISSED_SECONDS,
    ),
    Alert(
        name="RaidDegraded",
        expr=(
            "max by (instance, device) (node_md_disks_required)\n"
            '  - max by (instance, device) (node_md_disks{state="active"}) > 0'
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # a disk may be being replaced
        summary=f"{_ON}: {{{{ $labels.device }}}} is degraded, missing disks: {{{{ $value }}}}",
        action="`cat /proc/mdstat` shows the failed disk. Replace it before the next disk fails.",
        keep_seconds=_MISSED_SECONDS,
    ),
)
