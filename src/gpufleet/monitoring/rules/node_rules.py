"""Define recording rules and alerts on machines. Pure.

File systems are identified by instance and mount point, network interfaces by instance and device.
"""

from __future__ import annotations

from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording

# Leave out file systems of other machines, which report them themselves, and images, which are
# always full. An overlay may be the root of a node that boots from an image; a full /dev/shm ends
# vLLM's ranks.
_LOCAL = (
    'fstype!~"nfs.*|lustre|gpfs|beegfs.*|ceph.*|wekafs|cifs|smb.*|9p|virtiofs|fuse.*'
    '|squashfs|erofs|iso9660"'
)
# What is mounted to be written.
_WRITTEN = 'fstype=~"ext[234]|xfs|btrfs|f2fs|zfs"'
_PLACE = "by (instance, mountpoint)"
# Loopback and what containers and bridges bring along: no wire, no errors of one.
_WIRED = 'device!~"lo|veth.*|docker.*|br-.*|virbr.*|cni.*|flannel.*|cali.*|tun.*|tap.*"'
_DAY = 86400
# Collectors that every node has something for. Those of hardware say 0 where it is not there, as
# they do when they fail: on a machine without any, fifteen of Debian's 1.5.0 did.
_EVERYWHERE = (
    "cpu|diskstats|filefd|filesystem|loadavg|meminfo|netclass|netdev|netstat|pressure|stat|systemd"
    "|textfile|timex|uname|vmstat"
)
# A busy node misses a scrape now and then, and what is read from one alone is gone for that minute:
# the alert would end, wait again, and come back as another one (measured: two of these did, for an
# hour). A node that stays away is NodeDown's within this time.
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
        # Six hours: long enough that a download of a model does not look like a trend of its own.
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
        # `timestamp` is when Prometheus read it: its own clock.
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
        # Only where it is not far any more: a disk that has just got a model looks like filling.
        expr=(
            "node:filesystem_available_bytes:in_a_day < 0\n"
            "  and node:filesystem_available:ratio < 0.2"
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=3600,  # the trend of 6 hours has to hold for another
        summary=f"{_MOUNT} will be full within a day at the current rate",
        action="Find what grows with `du -xh --max-depth=2`. Old models and releases can be removed.",
    ),
    Alert(
        name="DiskFull",
        expr="node:filesystem_available:ratio < 0.03",
        severity=AlertSeverity.PAGE,
        for_seconds=300,  # what is written and deleted again within minutes
        summary=f"{_MOUNT} has {{{{ $value | humanizePercentage }}}} of its space left",
        action="Free space now: servers fail when they cannot write caches or logs.",
    ),
    Alert(
        name="InodesLow",
        expr="node:filesystem_inodes_free:ratio < 0.05",
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # as a disk's, but inodes go in smaller steps
        summary=f"{_MOUNT} has {{{{ $value | humanizePercentage }}}} of its inodes left",
        action="Find the directory with many small files. Most often it is a cache of compiled kernels.",
    ),
    Alert(
        name="FilesystemReadOnly",
        expr=f"max {_PLACE} (node_filesystem_readonly{{{_WRITTEN}}}) == 1",
        severity=AlertSeverity.PAGE,
        for_seconds=120,  # a remount by hand, for a moment
        summary=f"{_MOUNT} is read-only",
        action="Read the kernel log. The kernel makes a file system read-only when the disk has errors.",
        keep_seconds=_MISSED_SECONDS,
    ),
    Alert(
        name="HostMemoryLow",
        expr="node:memory_available:ratio < 0.05",
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # loading a model takes much memory for some minutes, and gives it back
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
        # The kernel's own word, and a bound that only grows while the clock is not set.
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
        # A slow scrape looks like skew; certificates and logs suffer from minutes, not from a
        # spike.
        for_seconds=600,
        summary=f"{_ON}: the clock is off by {{{{ $value | humanizeDuration }}}}",
        action="Compare the output of `date` with a different node's. Restart chrony, which then sets the clock.",
    ),
    Alert(
        name="NetworkErrors",
        expr="node:network_errors:ratio_rate15m > 0.001",
        severity=AlertSeverity.TICKET,
        # One packet of a thousand is what slows TCP down visibly; with a rate over 15 minutes.
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
        for_seconds=0,  # a count of an hour; a reboot or a replaced cable is two changes
        summary=f"{_ON}: the link of {{{{ $labels.device }}}} goes down and up again",
        action="Check the cable, the transceiver and the switch's port. Replicas that span nodes lose connections over this link.",
    ),
    Alert(
        name="InfinibandFlapping",
        expr="max by (instance, device, port) "
        "(increase(node_infiniband_link_downed_total[1h])) > 1.5",
        severity=AlertSeverity.TICKET,
        for_seconds=0,  # a count of an hour; once is a switch that was restarted
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
        for_seconds=300,  # systemd's own restarts come within seconds
        summary=f"{_ON}: {{{{ $labels.name }}}} has failed",
        action="`systemctl status` and `journalctl -u` show the reason. Repair the cause, then run `systemctl restart`.",
        keep_seconds=_MISSED_SECONDS,
    ),
    Alert(
        name="CollectorFailed",
        expr=f'max by (instance, collector) (node_scrape_collector_success{{collector=~"{_EVERYWHERE}"}}) == 0',
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # a collector that times out under load, now and then
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
        for_seconds=900,  # a disk that is just being replaced
        summary=f"{_ON}: {{{{ $labels.device }}}} is degraded, missing disks: {{{{ $value }}}}",
        action="`cat /proc/mdstat` shows the failed disk. Replace it before the next disk fails.",
        keep_seconds=_MISSED_SECONDS,
    ),
)
