"""Convert a machine to files in /proc, /sys, /etc, /lib/modules and /run. Pure but `write`.

The files have only the parts that are read, in the kernel's own form. programs.py has the answers
of programs, and `answers` has the results of system calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.machine.parts import Disk, Function, Machine, Process, Rdma
from lab.machine.pci import BRIDGE_CLASS
from lab.machine.programs import programs


@dataclass(frozen=True)
class Link:
    """A symbolic link to an absolute path below the same root, written as a relative link."""

    to: str


@dataclass(frozen=True)
class Folder:
    """An empty directory."""


Entry = str | bytes | Link | Folder

# Global variable GUID of the UEFI specification; the first four bytes are the attributes.
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_EFI_ATTRIBUTES = b"\x06\x00\x00\x00"

# PCI Express: an extended capability begins with its id, its version and the offset of the next
# capability. ACS has id 0x0d, its capability word is at offset 4 and its control word at offset 6
# (PCI_EXT_CAP_ID_ACS, linux/pci_regs.h). AER comes before ACS, so that a reader must follow the
# list.
_AER, _ACS = 0x0001, 0x000D
_AER_AT, _ACS_AT = 0x100, 0x148
_ACS_CAPABLE = 0x5F

# The lab's smaller machines are virtual, so they cannot see the host's memory controllers.
ECC_FROM_MIB = 100_000

_OS_NAMES = {"ubuntu": "Ubuntu", "debian": "Debian GNU/Linux", "rocky": "Rocky Linux"}


def files(machine: Machine) -> dict[str, Entry]:
    """Return every file, link and empty directory by its absolute path."""
    parts = (_etc, _library, _proc, _module, _pci, _iommu, _rdma, _net, _kernels, _boot)
    return {path: entry for part in parts for path, entry in part(machine)}


def write(machine: Machine, root: Path) -> Path:
    """Write the machine's files and programs below `root`, which need not exist; return it."""
    for path, entry in files(machine).items():
        _put(root, path, entry)
    for path, script in programs(machine).items():
        _put(root, path, script)
        (root / path.lstrip("/")).chmod(0o755)
    return root


def answers(machine: Machine) -> dict[str, Any]:
    """Return the results of system calls on the machine: the probe's parameter `answers`."""
    synchronised, error = machine.clock
    size, free = machine.shm
    return {
        "uid": machine.uid,
        "arch": machine.arch,
        "clock": {"synchronized": synchronised, "max_error_us": error},
        "shm": {"size_mib": size, "free_mib": free},
        "disks": {disk.mount: _disk(disk) for disk in machine.disks},
        "ipv4": {net.name: net.ipv4 for net in machine.net if net.ipv4},
        "library": {"missing": "absent"}
        if machine.library is None
        else {"file": machine.library.file, "version": machine.library.version},
    }


def profile_text(machine: Machine) -> str:
    """Return the simulated NVML's profile with the overriding lines of faults."""
    own = (f"{key} = {value}" for key, value in machine.profile.lines)
    return "\n".join([*own, *machine.nvml, ""])


def _put(root: Path, path: str, entry: Entry) -> None:
    at = root / path.lstrip("/")
    if isinstance(entry, Folder):
        at.mkdir(parents=True, exist_ok=True)
        return
    at.parent.mkdir(parents=True, exist_ok=True)
    at.unlink(missing_ok=True)
    if isinstance(entry, Link):
        # Relative links, as in sysfs, because the tree can be in any directory.
        at.symlink_to(os.path.relpath(root / entry.to.lstrip("/"), at.parent))
    elif isinstance(entry, bytes):
        at.write_bytes(entry)
    else:
        at.write_text(entry)


def _disk(disk: Disk) -> dict[str, Any]:
    return {"mount": disk.mount, "size_mib": disk.size, "free_mib": disk.free}


def _etc(machine: Machine) -> Iterator[tuple[str, Entry]]:
    name, _, version = machine.os.partition("-")
    yield "/etc/machine-id", f"{machine.machine_id}\n"
    yield (
        "/etc/os-release",
        f'NAME="{_OS_NAMES.get(name, name)}"\nID={name}\nVERSION_ID="{version}"\n',
    )
    yield ("/etc/apt" if machine.apt else "/etc/dnf"), Folder()


def _library(machine: Machine) -> Iterator[tuple[str, Entry]]:
    """Yield the link that programs open, and its target, of which only the name is read."""
    if machine.library is not None:
        folder = machine.library.file.rpartition("/")[0]
        yield machine.library.file, ""
        yield f"{folder}/libnvidia-ml.so.1", Link(machine.library.file)


def _proc(machine: Machine) -> Iterator[tuple[str, Entry]]:
    yield "/proc/cmdline", f"{machine.cmdline}\n"
    yield "/proc/uptime", f"{machine.uptime:.2f} {machine.uptime:.2f}\n"
    yield "/proc/sys/kernel/hostname", f"{machine.hostname}\n"
    yield "/proc/sys/kernel/osrelease", f"{machine.kernel}\n"
    yield "/proc/sys/kernel/dmesg_restrict", "1\n" if machine.apt else "0\n"
    yield "/proc/sys/kernel/random/boot_id", f"{machine.boot_id}\n"
    yield "/proc/meminfo", _meminfo(machine)
    yield (
        "/proc/modules",
        "".join(f"{name} 16384 0 - Live 0x0000000000000000\n" for name in machine.modules),
    )
    for process in machine.processes:
        yield from _process(process)
    total, free = machine.hugepages
    pages = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    yield f"{pages}/nr_hugepages", f"{total}\n"
    yield f"{pages}/free_hugepages", f"{free}\n"
    yield "/sys/devices/system/cpu/online", f"{machine.cpus}\n"
    if machine.profile.data_centre and machine.memory > ECC_FROM_MIB:
        for controller in ("mc0", "mc1"):
            yield f"/sys/devices/system/edac/mc/{controller}/ce_count", "0\n"
            yield f"/sys/devices/system/edac/mc/{controller}/ue_count", "0\n"


def _meminfo(machine: Machine) -> str:
    total, free = machine.hugepages
    rows = {
        "MemTotal": machine.memory * 1024,
        "MemFree": machine.memory_available * 1024,
        "MemAvailable": machine.memory_available * 1024,
        "Shmem": 10240,
    }
    lines = [f"{name + ':':<16}{kib:>12} kB\n" for name, kib in rows.items()]
    lines += [f"HugePages_Total: {total:>7}\n", f"HugePages_Free: {free:>8}\n"]
    return "".join([*lines, "Hugepagesize:       2048 kB\n"])


def _process(process: Process) -> Iterator[tuple[str, Entry]]:
    at = f"/proc/{process.pid}"
    yield f"{at}/comm", f"{Path(process.name).name[:15]}\n"
    yield f"{at}/cmdline", f"{process.name}\0"
    yield f"{at}/cgroup", f"0::/system.slice/{process.unit}\n"
    yield (
        f"{at}/status",
        f"Name:\t{Path(process.name).name[:15]}\nState:\tS (sleeping)\nPid:\t{process.pid}\n"
        f"Uid:\t{process.uid}\t{process.uid}\t{process.uid}\t{process.uid}\n",
    )


def device_files(machine: Machine) -> tuple[str, ...]:
    """Return the names below /dev of the device files that nvidia-modprobe creates."""
    uvm = ("nvidia-uvm", "nvidia-uvm-tools") if "nvidia_uvm" in machine.modules else ()
    return ("nvidiactl", *(f"nvidia{at}" for at in range(machine.profile.count)), *uvm)


def _module(machine: Machine) -> Iterator[tuple[str, Entry]]:
    """Yield the files of the loaded NVIDIA module."""
    if machine.loaded is None:
        return
    arch, version = machine.arch, machine.loaded
    kind = (
        f"Open Kernel Module for {arch}" if machine.flavour == "open" else f"{arch} Kernel Module"
    )
    for name in device_files(machine):
        yield f"/dev/{name}", ""
    yield "/sys/module/nvidia/version", f"{version}\n"
    yield "/sys/module/nvidia/taint", "OE\n" if machine.flavour == "open" else "POE\n"
    yield (
        "/proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX {kind}  {version}  Release Build\n"
        "GCC version:  gcc version 13.3.0\n",
    )
    yield "/proc/driver/nvidia/gpus", Folder()
    for index in range(machine.profile.count):
        bus_id = machine.gpu_bus_id(index)
        function = [each for each in machine.functions if each.bus_id == bus_id]
        if function and function[0].driver == "nvidia":
            yield f"/proc/driver/nvidia/gpus/{bus_id}/information", _information(machine, index)


def _information(machine: Machine, index: int) -> str:
    gpu = machine.profile.gpu
    # The firmware belongs to the loaded driver. A board without firmware has "N/A".
    firmware = machine.loaded if gpu(index, "gsp") else "N/A"
    return (
        f"Model: \t\t {gpu(index, 'name')}\nGPU UUID: \t {gpu(index, 'uuid')}\n"
        f"Video BIOS: \t {gpu(index, 'vbios')}\nBus Type: \t PCIe\n"
        f"Bus Location: \t {machine.gpu_bus_id(index)}\nDevice Minor: \t {index}\n"
        f"GPU Firmware: \t {firmware}\nGPU Excluded:\t No\n"
    )


def device_path(function: Function) -> str:
    """Return a PCI function's directory in /sys/devices."""
    return "/".join(["/sys/devices", function.root, *function.above, function.bus_id])


def _pci(machine: Machine) -> Iterator[tuple[str, Entry]]:
    yield "/sys/bus/pci/devices", Folder()
    for function in machine.functions:
        at = device_path(function)
        yield f"/sys/bus/pci/devices/{function.bus_id}", Link(at)
        yield f"{at}/vendor", f"0x{function.vendor:04x}\n"
        yield f"{at}/device", f"0x{function.device:04x}\n"
        yield f"{at}/class", f"0x{function.class_code:06x}\n"
        yield f"{at}/numa_node", f"{function.numa}\n"
        yield f"{at}/config", _config(function, whole=machine.uid == 0)
        if function.driver:
            driver = f"/sys/bus/pci/drivers/{function.driver}"
            yield driver, Folder()
            yield f"{at}/driver", Link(driver)
    for rdma in machine.rdma:
        if rdma.vpd:
            yield f"{device_path(machine.function(rdma.bus_id))}/vpd", rdma.vpd


def _config(function: Function, *, whole: bool) -> bytes:
    """Return a function's configuration space; users other than root get the first 64 bytes."""
    space = bytearray(4096)
    space[0:2] = function.vendor.to_bytes(2, "little")
    space[2:4] = function.device.to_bytes(2, "little")
    space[9:12] = function.class_code.to_bytes(3, "little")
    space[14] = 1 if function.class_code == BRIDGE_CLASS else 0
    after_aer = _ACS_AT if function.acs is not None else 0
    space[_AER_AT : _AER_AT + 4] = (after_aer << 20 | 2 << 16 | _AER).to_bytes(4, "little")
    if function.acs is not None:
        space[_ACS_AT : _ACS_AT + 4] = (1 << 16 | _ACS).to_bytes(4, "little")
        space[_ACS_AT + 4 : _ACS_AT + 6] = _ACS_CAPABLE.to_bytes(2, "little")
        space[_ACS_AT + 6 : _ACS_AT + 8] = function.acs.to_bytes(2, "little")
    return bytes(space if whole else space[:64])


def _iommu(machine: Machine) -> Iterator[tuple[str, Entry]]:
    yield "/sys/kernel/iommu_groups", Folder()
    if machine.iommu is None:
        return
    for number, function in enumerate(machine.functions):
        group = f"/sys/kernel/iommu_groups/{number}"
        yield f"{group}/type", f"{machine.iommu}\n"
        yield f"{group}/devices/{function.bus_id}", Link(device_path(function))
        yield f"{device_path(function)}/iommu_group", Link(group)


def _rdma(machine: Machine) -> Iterator[tuple[str, Entry]]:
    for rdma in machine.rdma:
        function = machine.function(rdma.bus_id)
        at = f"{device_path(function)}/infiniband/{rdma.name}"
        yield f"/sys/class/infiniband/{rdma.name}", Link(at)
        yield f"{at}/device", Link(device_path(function))
        yield from _port(f"{at}/ports/1", rdma)


def _port(at: str, rdma: Rdma) -> Iterator[tuple[str, Entry]]:
    yield f"{at}/state", f"{rdma.state}\n"
    yield f"{at}/phys_state", f"{rdma.physical}\n"
    yield f"{at}/rate", f"{rdma.rate}\n"
    yield f"{at}/link_layer", f"{rdma.layer}\n"


def _net(machine: Machine) -> Iterator[tuple[str, Entry]]:
    yield "/proc/net/if_inet6", ""
    header = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    first = machine.net[0].name if machine.net else None
    route = f"{first}\t00000000\t01000A0A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n" if first else ""
    yield "/proc/net/route", header + route
    yield "/sys/devices/virtual/net/lo/address", "00:00:00:00:00:00\n"
    yield "/sys/class/net/lo", Link("/sys/devices/virtual/net/lo")
    for net in machine.net:
        parent = device_path(machine.function(net.bus_id)) if net.bus_id else "/sys/devices/virtual"
        at = f"{parent}/net/{net.name}"
        yield f"/sys/class/net/{net.name}", Link(at)
        yield f"{at}/address", f"{net.mac}\n"
        yield f"{at}/operstate", f"{net.state}\n"
        yield f"{at}/mtu", f"{net.mtu}\n"
        yield f"{at}/speed", f"{net.speed}\n"
        if net.bus_id:
            yield f"{at}/device", Link(parent)


def _kernels(machine: Machine) -> Iterator[tuple[str, Entry]]:
    for kernel in machine.kernels:
        at = f"/lib/modules/{kernel.release}"
        yield f"{at}/modules.builtin", "kernel/fs/ext4/ext4.ko\n"
        yield f"{at}/modules.dep", "kernel/drivers/nvme/host/nvme.ko:\n"
        if kernel.nvidia:
            yield f"{at}/updates/dkms/nvidia.ko", b"\x7fELF"


def _boot(machine: Machine) -> Iterator[tuple[str, Entry]]:
    if machine.secure_boot is not None:
        yield _SECURE_BOOT, _EFI_ATTRIBUTES + bytes([machine.secure_boot])
    if machine.reboot_required:
        yield "/run/reboot-required", "*** System restart required ***\n"
        yield "/run/reboot-required.pkgs", "linux-base\n"
