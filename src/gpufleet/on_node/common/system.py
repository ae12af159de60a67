"""RUNS ON THE NODE: read facts of the operating system that GPUs depend on.

Every path is read below the probe's root. Results of system calls may come from a recording
(`ANSWERS` in linux_facts.py).
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections import Counter
from typing import Any, Callable, Iterator

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.answers import CannotRead, read
from gpufleet.on_node.common.commands import path_of, refusal_of, run
from gpufleet.on_node.common.linux_facts import directory_names, line
from gpufleet.on_node.common.systemctl import show_each

UNITS_SECONDS = 10
# Units that GPUs need beside the driver, and units that upgrade Red Hat's machines automatically.
UNITS = (
    "nvidia-fabricmanager.service",
    "nvidia-persistenced.service",
    "nvidia-imex.service",
    "nvidia-dcgm.service",
    "nvidia-dcgm-exporter.service",
    "nvidia-cdi-refresh.service",
    "nvlsm.service",
    "dnf-automatic.timer",
    "dnf-automatic-install.timer",
)
# systemctl's properties, by the keys of the answer.
UNIT_PROPERTIES = {
    "load": "LoadState",
    "active": "ActiveState",
    "sub": "SubState",
    "enabled": "UnitFileState",
    "result": "Result",
}

# Directory of the releases. The same as gpufleet.artifacts.release.RELEASES, but that module is not
# sent to nodes.
RELEASES = "/opt/vllm/releases"

# A variable of the global namespace (UEFI specification 2.10, section 3.3). Its value is one byte.
# Linux' efivarfs puts four bytes of attributes before the value.
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

# Error detection and correction (EDAC) of the machine's memory, with a folder for each controller.
EDAC = "/sys/devices/system/edac/mc"

# linux/timex.h: the kernel's clock is not synchronised.
STA_UNSYNC = 0x0040

# PCI Express base specification 6.0, section 7.7.11: the extended capability ACS has its control
# register at offset 6. Three of its bits redirect traffic between GPUs through the root complex:
# P2P request redirect, P2P completion redirect and P2P egress control.
ACS_CAPABILITY = 0x000D
ACS_REDIRECT = 0x04 | 0x08 | 0x20
CONFIG_HEADER = 64  # the bytes of the configuration space that every user can read
EXTENDED_FIRST, EXTENDED_END = 0x100, 0x1000


def uptime() -> float:
    """Return the seconds since boot."""
    return float(line("/proc/uptime").split()[0])


def modules() -> list[str]:
    """Return the names of the loaded kernel modules, sorted."""
    return sorted(row.split()[0] for row in line("/proc/modules").splitlines() if row.strip())


def secure_boot() -> bool:
    """
    Return whether secure boot is on. Raises `OSError` if the machine did not boot with EFI.
    """
    with open(linux_facts.ROOT + SECURE_BOOT, "rb") as file:
        return file.read()[4:5] == b"\x01"


def iommu() -> dict[str, Any]:
    """Return the number of IOMMU groups, in total and of each type."""
    groups = directory_names("/sys/kernel/iommu_groups")
    types = Counter(str(read_type(group)) for group in groups)
    return {"groups": len(groups), "types": dict(sorted(types.items()))}


def read_type(group: str) -> str:
    """Return an IOMMU group's type. On kernels before 5.11 the type is "unknown"."""
    try:
        return line("/sys/kernel/iommu_groups/%s/type" % group)
    except OSError:
        return "unknown"


def clock() -> dict[str, Any]:
    """Return whether the clock is synchronized, and its maximum error in microseconds."""
    import ctypes

    asked = (ctypes.c_byte * 512)()  # struct timex has 208 bytes; if all are 0, nothing changes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(asked)) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    # int modes, long offset, long freq, long maxerror, long esterror, int status
    _, _, _, max_error, _, status = struct.unpack_from("@illlli", bytes(asked))
    return {"synchronized": not status & STA_UNSYNC, "max_error_us": max_error}


def space(path: str) -> dict[str, int]:
    """Return a file system's size, and the space that users can still write, in MiB."""
    about = os.statvfs(linux_facts.ROOT + path)
    return {
        "size_mib": about.f_blocks * about.f_frsize >> 20,
        "free_mib": about.f_bavail * about.f_frsize >> 20,
    }


def disk(path: str) -> dict[str, Any]:
    """
    Return the facts about a path's file system, or about that of its nearest existing parent.
    """
    there = os.path.normpath("/" + path.lstrip("/"))
    if "disks" in linux_facts.ANSWERS:
        return dict(disk_entry(linux_facts.ANSWERS["disks"], there))
    root = os.path.realpath(linux_facts.ROOT or "/")
    while not os.path.exists(linux_facts.ROOT + there) and there != "/":
        there = os.path.dirname(there)
    within = os.path.realpath(linux_facts.ROOT + there)
    mount = within if within.startswith(root) else root
    while mount != root and not os.path.ismount(mount):
        mount = os.path.dirname(mount)
    return {"mount": mount[len(root.rstrip("/")) :] or "/", **space(there)}


def disk_entry(disks: dict[str, Any], path: str) -> Any:
    """Return the entry of the longest path in `disks` that contains this path."""
    while path not in disks and path != "/":
        path = os.path.dirname(path)
    return disks[path]


def memory_info(name: str) -> int:
    """Return one value of /proc/meminfo in the file's own unit (kB or pages)."""
    found = re.search(r"^%s:\s+(\d+)" % re.escape(name), line("/proc/meminfo"), re.MULTILINE)
    if not found:
        raise FileNotFoundError(errno.ENOENT, name)
    return int(found.group(1))


def hugepages() -> dict[str, int]:
    """
    Return the total number, the free number and the size of reserved huge pages.

    Only huge pages of the default size are counted.
    """
    return {
        "total": memory_info("HugePages_Total"),
        "free": memory_info("HugePages_Free"),
        "size_kib": memory_info("Hugepagesize"),
    }


def memory_errors() -> dict[str, int]:
    """
    Return the memory controllers' error counts since boot.

    Raises `FileNotFoundError` if the kernel monitors no memory controller. In Linux'
    Documentation/admin-guide/ras.rst, ce_count is the number of corrected errors, and ue_count the
    number of uncorrected errors.
    """
    controllers = [name for name in directory_names(EDAC) if re.fullmatch(r"mc\d+", name)]
    if not controllers:
        raise FileNotFoundError(errno.ENOENT, "the kernel monitors no memory controller")
    return {
        key: sum(linux_facts.number("%s/%s/%s" % (EDAC, each, file)) for each in controllers)
        for key, file in (("corrected", "ce_count"), ("uncorrected", "ue_count"))
    }


def reboot_required() -> bool:
    """
    Return whether a package requires a reboot. Only distributions of Debian's family record this.
    """
    try:
        path_of("dpkg-query")
    except CannotRead as error:
        raise CannotRead("not_supported", detail="no dpkg") from error
    return any(
        os.path.exists(linux_facts.ROOT + path)
        for path in ("/run/reboot-required", "/var/run/reboot-required")
    )


def releases() -> list[str]:
    """Return the names of the complete vLLM releases."""
    return [
        name
        for name in linux_facts.directory_names(RELEASES)
        if os.path.exists("%s%s/%s/.complete" % (linux_facts.ROOT, RELEASES, name))
    ]


SYSTEM_FACTS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("uptime_seconds", uptime),
    ("cmdline", lambda: line("/proc/cmdline")),
    ("modules", modules),
    ("secure_boot", secure_boot),
    ("iommu", iommu),
    ("clock", lambda: linux_facts.recorded_or_call("clock", clock)),
    ("shm", lambda: linux_facts.recorded_or_call("shm", lambda: space("/dev/shm"))),
    ("memory_available_mib", lambda: memory_info("MemAvailable") // 1024),
    ("hugepages", hugepages),
    ("memory_errors", memory_errors),
    ("reboot_required", reboot_required),
    ("releases", releases),
)


def system_facts() -> dict[str, Any]:
    """Return all facts of this module."""
    return {name: read(function) for name, function in SYSTEM_FACTS}


# --- units


def units() -> dict[str, Any]:
    """
    Return the state of every unit of `UNITS`. A unit that does not exist is "not-found".
    """
    wanted = ",".join(["Id", *UNIT_PROPERTIES.values()])
    output = run(
        "systemctl", "show", "--no-pager", "--property=" + wanted, *UNITS,
        seconds=UNITS_SECONDS,
    )  # fmt: skip
    blocks = show_each(output.out)
    if "not been booted with systemd" in output.err:
        raise CannotRead("absent", detail="systemd does not run here")
    if not blocks:
        raise refusal_of("systemctl", output)
    by_id = {block.get("Id", ""): block for block in blocks}
    in_order = dict(zip(UNITS, blocks)) if len(blocks) == len(UNITS) else {}
    found = {unit: by_id.get(unit) or in_order.get(unit) for unit in UNITS}
    return {unit: read(lambda unit=unit: state(unit, found[unit])) for unit in UNITS}


def state(unit: str, block: Any) -> dict[str, Any]:
    """
    Return one unit's state with gpufleet's keys. For an alias, return the state of its unit.
    """
    if block is None:
        raise CannotRead("absent", detail="systemctl did not show %s" % unit)
    return {name: read(unit_state, block, key) for name, key in UNIT_PROPERTIES.items()}


def unit_state(block: dict[str, str], key: str) -> str:
    """
    Return one value of systemctl's output. Raises `FileNotFoundError` if the value is empty.

    The values of a unit that does not exist are empty.
    """
    if not block.get(key):
        raise FileNotFoundError(errno.ENOENT, key)
    return block[key]


# --- access control services of the PCI bridges


def acs() -> list[dict[str, Any]]:
    """
    Return for each bridge above an NVIDIA GPU whether it redirects peer-to-peer traffic.

    Raises `CannotRead` (`no_permission`) if the user may not read the configuration space.
    """
    bridges = sorted(
        {
            bridge
            for function in linux_facts.pci_functions()
            if str(function["class"]).startswith("0x03")
            for bridge in bridges_above(str(function["path"]))
        }
    )
    return [
        {"bus_id": bridge.rpartition("/")[2], "redirect": redirects(bridge)} for bridge in bridges
    ]


def bridges_above(path: str) -> Iterator[str]:
    """Yield the sysfs paths of the PCI functions between a function and the root complex."""
    parent = os.path.dirname(path)
    while re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", os.path.basename(parent)):
        yield parent
        parent = os.path.dirname(parent)


def redirects(bridge: str) -> Any:
    """Return whether a bridge redirects traffic between GPUs to the root complex."""
    with open(linux_facts.ROOT + bridge + "/config", "rb") as file:
        config = file.read(EXTENDED_END)
    if len(config) <= CONFIG_HEADER:
        raise CannotRead("no_permission", detail="PCI configuration space needs root")
    if config[:4] == b"\xff\xff\xff\xff":
        return read(raise_lost, bridge)
    control = acs_control(config)
    return bool(control & ACS_REDIRECT)


def raise_lost(bridge: str) -> None:
    """Raise `CannotRead` for a PCI function that does not answer."""
    raise CannotRead("lost", detail=bridge.rpartition("/")[2])


def acs_control(config: bytes) -> int:
    """Return a function's ACS control register, or 0 if it has no ACS."""
    at, seen = EXTENDED_FIRST, 0
    while EXTENDED_FIRST <= at <= len(config) - 8 and seen < (EXTENDED_END - EXTENDED_FIRST) // 8:
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == ACS_CAPABILITY:
            return int(struct.unpack_from("<H", config, at + 6)[0])
        at, seen = header >> 20 & 0xFFC, seen + 1
    return 0
