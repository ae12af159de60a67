"""
Compute the desired state of Prometheus' node exporter on a node: its unit and its flags. Pure.

The program comes from the distribution's package or from the publisher's archive. The unit has the
name of the package's unit in both cases, so a node never runs two exporters. gpufleet writes the
whole unit, because the unit in the package has no hardening.
"""

from __future__ import annotations

from shlex import quote

from gpufleet import node_paths
from gpufleet.artifacts import program_archive
from gpufleet.artifacts.program_archive import ProgramArchive
from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    Directory,
    Group,
    Package,
    Unit,
    User,
    Value,
)
from gpufleet.converge.quoting import systemd_quote
from gpufleet.monitoring.exporters import WEB_CONFIG, Access, Metrics
from gpufleet.serving.unit import UnitFile, whole_unit
from gpufleet.settings.monitoring_settings import NodeExporter

PACKAGE = "prometheus-node-exporter"

UNIT = f"{PACKAGE}.service"

PROGRAM = "node_exporter"

# The package of Debian and Ubuntu creates this account. A program from an archive gets an account
# that gpufleet creates.
PACKAGED_USER = "prometheus"

ARCHIVED_USER = "node-exporter"

CREDENTIALS = node_paths.NODE_EXPORTER

TEXTFILES = node_paths.TEXTFILES

# The collectors that are switched on in addition to the default ones (README of
# prometheus/node_exporter), such as textfile, pressure, infiniband and filesystem.
ON = ("ethtool", "systemd")

# These collectors have one or more series for every CPU. A GPU node has hundreds of CPUs, and
# nothing in gpufleet uses the series.
OFF = ("cpufreq", "schedstat", "softnet")

# All of these flags exist from 1.3.1 (Ubuntu 22.04) to 1.12.1. Before gpufleet changes the unit, it
# also runs the program on the node with the flags. Regular expressions have Go's syntax. The
# exporter anchors only the expression for units.
_UNITS = (
    "(vllm|gpufleet|nvidia|dcgm|prometheus|alertmanager|grafana|haproxy|chrony|ntp|systemd-timesyncd"
    "|ssh|openibd|opensm|nvlsm|nfs|lustre|docker|containerd|kubelet).*[.](service|timer|socket)"
)

# The types of file systems without a disk. Overlays are not among them, because the root of a node
# that boots from an image may be an overlay. Overlays of containers are excluded by their paths.
# /dev/shm is not excluded, because vLLM's ranks use it.
_FILE_SYSTEMS = (
    "^(autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|devtmpfs|efivarfs|fuse[.].+|fusectl|"
    "hugetlbfs|iso9660|mqueue|nsfs|proc|procfs|pstore|ramfs|rpc_pipefs|securityfs|selinuxfs|"
    "squashfs|sysfs|tracefs)$"
)

_MOUNTS = (
    "^/(dev$|(dev/(hugepages|mqueue|pts)|proc|run|snap|sys"
    "|var/lib/(containerd|containers|docker|kubelet))($|/))"
)

# Devices that containers and virtual machines create and remove. Each has dozens of series.
_DEVICES = "^(br-|cali|cni|docker|flannel|lxc|podman|tap|tun|veth|virbr).*$"

# An adapter has about a thousand counters. The counters with these names show that packets were
# lost, or why: RoCE's pause frames and congestion marks.
_COUNTERS = (
    "^.*(buffer|cnp|crc|discard|drop|ecn|err|link_down|nack|out_of_|pause|retrans|symbol"
    "|timeout).*$"
)

FACTS_FAMILIES = ("gpufleet_facts_failed", "gpufleet_facts_timestamp_seconds")
"""The metrics about gpufleet's facts that exist even if no fact could be read."""
# For each collector that alerts need, one of its metrics.
_FAMILIES = {
    "cpu": "node_cpu_seconds_total",
    "filesystem": "node_filesystem_avail_bytes",
    "loadavg": "node_load1",
    "meminfo": "node_memory_MemAvailable_bytes",
    "netdev": "node_network_receive_bytes_total",
    "stat": "node_boot_time_seconds",
    "systemd": "node_systemd_unit_state",
    "textfile": "node_textfile_scrape_error",
}


def archive(wanted: NodeExporter) -> ProgramArchive | None:
    """Return the publisher's program, or None if the distribution's package is used."""
    return ProgramArchive(PROGRAM, wanted.archive, (PROGRAM,)) if wanted.archive else None


def program(wanted: NodeExporter) -> str:
    """Return the path of the program on the node."""
    found = archive(wanted)
    return found.program(PROGRAM) if found else f"/usr/bin/{PACKAGE}"


def required_state(wanted: NodeExporter) -> tuple[Value, ...]:
    """
    Return the desired state that must exist before the program runs: packages, account, directory.
    """
    # A program without root permissions queries systemd over D-Bus. A minimal system has no D-Bus,
    # and packages only recommend it.
    asking = () if "systemd" in wanted.without else (Package("dbus"),)
    textfiles = Directory(TEXTFILES)
    if wanted.archive is None:
        return (Package(PACKAGE), *asking, textfiles)
    return (
        *map(Package, program_archive.PACKAGES),
        *asking,
        Group(ARCHIVED_USER),
        User(ARCHIVED_USER, group=ARCHIVED_USER, home="/nonexistent"),
        textfiles,
    )


def unit(wanted: NodeExporter, access: Access) -> UnitFile:
    """Return the exporter's unit."""
    return whole_unit(
        "node_exporter/node_exporter.service.j2",
        UNIT,
        program=program(wanted),
        arguments=[_quoted(word) for word in arguments(wanted, access)],
        user=ARCHIVED_USER if wanted.archive else PACKAGED_USER,
        credentials=list(access.credentials),
        directory=CREDENTIALS,
        started_with={"package": PACKAGE, **access.started_with()},
    )


def services(rendered: UnitFile, access: Access) -> tuple[Value, ...]:
    """
    Return the unit and its credentials. The drop-in that an earlier release of gpufleet wrote is
    removed.
    """
    return (
        *access.files(CREDENTIALS),
        rendered.file,
        Absent(f"{UNIT_DIRECTORY}/{UNIT}.d/gpufleet.conf"),
        Unit(UNIT, fingerprint=rendered.fingerprint),
    )


def arguments(wanted: NodeExporter, access: Access) -> tuple[str, ...]:
    """Return the flags of the program. systemd expands `$CREDENTIALS_DIRECTORY` in them."""
    on = [name for name in dict.fromkeys((*ON, *wanted.collectors)) if name not in wanted.without]
    off = [name for name in dict.fromkeys((*OFF, *wanted.without)) if name not in wanted.collectors]
    detailed = {
        "systemd": (
            f"--collector.systemd.unit-include={_UNITS}",
            "--collector.systemd.enable-restarts-metrics",
        ),
        "ethtool": (
            f"--collector.ethtool.device-exclude={_DEVICES}",
            f"--collector.ethtool.metrics-include={_COUNTERS}",
        ),
    }
    return (
        f"--web.listen-address={access.address(wanted.port)}",
        *((f"--web.config.file={_CREDENTIAL}",) if access.credentials else ()),
        f"--collector.textfile.directory={TEXTFILES}",
        f"--collector.filesystem.fs-types-exclude={_FILE_SYSTEMS}",
        f"--collector.filesystem.mount-points-exclude={_MOUNTS}",
        f"--collector.netclass.ignored-devices={_DEVICES}",
        f"--collector.netdev.device-exclude={_DEVICES}",
        "--no-collector.cpu.guest",
        *(f"--collector.{name}" for name in sorted(on)),
        *(f"--no-collector.{name}" for name in sorted(off)),
        *(flag for name in sorted(on) for flag in detailed.get(name, ())),
    )


_CREDENTIAL = f"${{CREDENTIALS_DIRECTORY}}/{WEB_CONFIG}"


def _quoted(word: str) -> str:
    """
    Return a flag as one word for a unit file. systemd still expands the credentials directory in
    it.
    """
    if word.endswith(_CREDENTIAL):
        return systemd_quote(word.removesuffix(_CREDENTIAL)) + _CREDENTIAL
    return systemd_quote(word)


def flag_check_script(wanted: NodeExporter, access: Access) -> str:
    """
    Return a shell script that runs the program only to parse its flags, and fails if it rejects
    them.
    """
    words = [program(wanted), *arguments(wanted, access), "--version"]
    line = " ".join(map(quote, words))
    hint = (
        "the node exporter is too old for these flags, or does not have one of the collectors: "
        "set a newer node exporter in `node_exporter.archive`, or change "
        "`node_exporter.collectors` and `node_exporter.without`"
    )
    return (
        f'said=$({line} 2>&1) || {{ echo "$said" | head -n 3 >&2; echo {quote(hint)} >&2; '
        "exit 1; }"
    )


def metrics(wanted: NodeExporter, access: Access, *, facts: bool = False) -> Metrics:
    """
    Return the metrics that the exporter must serve: one for each collector that alerts need.

    If `facts` is True, gpufleet's own metrics are also required, unless the textfile collector is
    switched off.
    """
    ours = FACTS_FAMILIES if facts and "textfile" not in wanted.without else ()
    return Metrics(
        id="node_exporter",
        unit=UNIT,
        url=access.url(wanted.port),
        families=(
            *sorted(name for each, name in _FAMILIES.items() if each not in wanted.without),
            *ours,
        ),
        access=access,
    )
