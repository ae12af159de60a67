"""Compute the desired state of Prometheus' node exporter on a node: its unit and flags. Pure.

The program is from the distribution's package or from its publisher. The unit has the package's
name in both cases, so there is never a second exporter. gpufleet writes the whole unit, because a
package's unit has no hardening.
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

# Debian's and Ubuntu's package makes that account; an archive's program gets one of its own.
PACKAGED_USER = "prometheus"

ARCHIVED_USER = "node-exporter"

CREDENTIALS = node_paths.NODE_EXPORTER

TEXTFILES = node_paths.TEXTFILES

# Beside those that are on by default (README of prometheus/node_exporter): textfile, pressure,
# infiniband and filesystem among them.
ON = ("ethtool", "systemd")

# A series or more for every CPU, of which a GPU node has hundreds, and nothing here asks for them.
OFF = ("cpufreq", "schedstat", "softnet")

# Every one of these flags is known from 1.3.1 (Ubuntu 22.04) to 1.12.1, and the binary itself is
# asked on the node before its unit is touched. Regular expressions are Go's; the exporter anchors
# none of them by itself but that of units.
_UNITS = (
    "(vllm|gpufleet|nvidia|dcgm|prometheus|alertmanager|grafana|haproxy|chrony|ntp|systemd-timesyncd"
    "|ssh|openibd|opensm|nvlsm|nfs|lustre|docker|containerd|kubelet).*[.](service|timer|socket)"
)

# File systems without a disk. Overlays stay: one may be the root of a node that boots from an
# image; overlays of containers are left out by their paths. /dev/shm stays: vLLM's ranks use it.
_FILE_SYSTEMS = (
    "^(autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|devtmpfs|efivarfs|fuse[.].+|fusectl|"
    "hugetlbfs|iso9660|mqueue|nsfs|proc|procfs|pstore|ramfs|rpc_pipefs|securityfs|selinuxfs|"
    "squashfs|sysfs|tracefs)$"
)

_MOUNTS = (
    "^/(dev$|(dev/(hugepages|mqueue|pts)|proc|run|snap|sys"
    "|var/lib/(containerd|containers|docker|kubelet))($|/))"
)

# Devices that come and go with containers and virtual machines, each with dozens of series.
_DEVICES = "^(br-|cali|cni|docker|flannel|lxc|podman|tap|tun|veth|virbr).*$"

# Adapters have a thousand counters each; these say that packets were lost, or why: RoCE's pause
# frames and congestion marks.
_COUNTERS = (
    "^.*(buffer|cnp|crc|discard|drop|ecn|err|link_down|nack|out_of_|pause|retrans|symbol"
    "|timeout).*$"
)

FACTS_FAMILIES = ("gpufleet_facts_failed", "gpufleet_facts_timestamp_seconds")
"""Metrics of gpufleet's facts that exist even if no fact could be read."""
# A family of each collector that alerts rest on.
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
    """Return the publisher's program; None for the distribution's package."""
    return ProgramArchive(PROGRAM, wanted.archive, (PROGRAM,)) if wanted.archive else None


def program(wanted: NodeExporter) -> str:
    """Return the program's path on the node."""
    found = archive(wanted)
    return found.program(PROGRAM) if found else f"/usr/bin/{PACKAGE}"


def required_state(wanted: NodeExporter) -> tuple[Value, ...]:
    """Return the program's prerequisites."""
    # Who is not root asks systemd over D-Bus; a minimal system has none, and packages only
    # recommend it.
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
    """Return the unit with its credentials. An earlier release's drop-in is removed."""
    return (
        *access.files(CREDENTIALS),
        rendered.file,
        Absent(f"{UNIT_DIRECTORY}/{UNIT}.d/gpufleet.conf"),
        Unit(UNIT, fingerprint=rendered.fingerprint),
    )


def arguments(wanted: NodeExporter, access: Access) -> tuple[str, ...]:
    """
    Return the program's flags.

    systemd expands `$CREDENTIALS_DIRECTORY` in them.
    """
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
    """Return a flag as one word of a unit; systemd expands the credentials directory."""
    if word.endswith(_CREDENTIAL):
        return systemd_quote(word.removesuffix(_CREDENTIAL)) + _CREDENTIAL
    return systemd_quote(word)


def flag_check_script(wanted: NodeExporter, access: Access) -> str:
    """Return the shell script in which the program only parses its flags."""
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
    Return the required metrics of the exporter: one family from each collector that alerts need.

    With `facts`, gpufleet's own metrics are also required, unless the textfile collector is off.
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
