"""Define the changes that faults make to a machine, in addition to its simulated NVML. Pure.

Each function takes the machine and the concerned GPU, and returns the faulty machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from lab.faults.hardware import nvlink5, tells_action
from lab.machine import Disk, Kernel, Machine, Package, Process, Upgrades, library
from lab.machine.healthy import ORIGINS
from lab.machine.parts import (
    FAILED,
    STOPPED,
    logged,
    with_function,
    with_kernel,
    with_nvml_lines,
    with_unit,
)
from lab.machine.pci import OTHER_BRIDGE_CLASS

Change = Callable[[Machine, int], Machine]

FABRIC_MANAGER = "nvidia-fabricmanager.service"

# Seconds since boot at which a fault occurs, well after the driver was loaded.
WHEN = 86400.25


def nothing(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Change nothing, because the fault is only in NVML."""
    return machine


# --- missing GPUs


def without_gpu(machine: Machine, gpu: int) -> Machine:
    """Return the machine without a GPU, with later GPUs renumbered like in NVML."""
    profile = machine.profile
    own = sorted({key.split(".", 2)[2] for key, _ in profile.lines if re.match(r"gpu\.\d+\.", key)})
    lines = [f"count = {profile.count - 1}"]
    for index in range(profile.count - 1):
        was = index + (index >= gpu)
        for key in own:
            value = profile.gpu(was, key)
            lines.append(
                f"gpu.{index}.{key} = {_renumbered(value, gpu) if key == 'nvlink.to' else value}"
            )
    return with_nvml_lines(machine, *lines)


def _renumbered(wiring: str, gone: int) -> str:
    """Return "FIRST-LAST:PEER,..." without one peer, and later peers one lower."""
    ends = [part.split(":") for part in wiring.split(",") if ":" in part]
    if not ends:
        return wiring
    left = [f"{links}:{int(p) - (int(p) > gone)}" for links, p in ends if int(p) != gone]
    return ",".join(left) or "nowhere"


def unprobed(machine: Machine, gpu: int) -> Machine:
    """Make the driver fail on one GPU at load, which leaves it on the bus without a driver."""
    function = machine.function(machine.gpu_bus_id(gpu))
    lost = with_function(without_gpu(machine, gpu), [replace(function, driver=None)])
    return logged(
        lost,
        (6.61, f"NVRM: GPU {function.bus_id}: RmInitAdapter failed! (0x62:0x40:1860)"),
        (6.62, f"nvidia: probe of {function.bus_id} failed with error -1"),
        (6.63, "NVRM: The NVIDIA probe routine failed for 1 device(s)."),
    )


def excluded(machine: Machine, gpu: int) -> Machine:
    """Hide one GPU with the module option NVreg_ExcludedGpus."""
    bus_id, uuid = machine.gpu_bus_id(gpu), machine.profile.gpu(gpu, "uuid")
    return with_nvml_lines(without_gpu(machine, gpu), f"excluded.0 = {bus_id},{uuid}")


# --- links


def link_down(machine: Machine, gpu: int) -> Machine:
    """Make link 7 dead, at both ends if both are GPUs."""
    return _links_down(machine, gpu, "7")


def all_links_down(machine: Machine, gpu: int) -> Machine:
    """Take down all links of the GPU, and other GPUs' links to it."""
    return _links_down(machine, gpu, "all")


def links_gone(machine: Machine, gpu: int) -> Machine:
    """
    Remove all links of the GPU, as if it were another board; other GPUs' links to it are down.
    """
    return with_nvml_lines(all_links_down(machine, gpu), f"gpu.{gpu}.nvlink.links = 0")


def _links_down(machine: Machine, gpu: int, links: str) -> Machine:
    peers = {int(peer) for peer in re.findall(r":(\d+)", machine.profile.gpu(gpu, "nvlink.to"))}
    return with_nvml_lines(
        machine, *(f"gpu.{end}.nvlink.down = {links}" for end in sorted({gpu, *peers}))
    )


def link_errors(machine: Machine, gpu: int) -> Machine:
    """Make a link repeat packets continuously, always with success."""
    # NVLink 5 counts in field values: 208 errors received, 211 errors of the local link's
    # integrity (NVML_FI_DEV_NVLINK_COUNT_*, nvml.h).
    counts = {208: "70000+200", 211: "20000+200"}
    return _link_3(machine, gpu, "replay", counts)


def link_errors_fatal(machine: Machine, gpu: int) -> Machine:
    """Make a link retrain repeatedly."""
    # 213 and 214: recoveries that succeeded and failed; 220: effective bit error rate, its mantissa
    # in bits 8 to 11, its negative exponent in bits 0 to 7, here 1e-9.
    return _link_3(machine, gpu, "recovery", {213: "50000+200", 214: "1", 220: "0x109"})


def _link_3(machine: Machine, gpu: int, kind: str, counts: Mapping[int, str]) -> Machine:
    if not nvlink5(machine.profile):
        return with_nvml_lines(machine, f"gpu.{gpu}.nvlink.err.{kind}.3 = 50000+200")
    return with_nvml_lines(
        machine, *(f"gpu.{gpu}.field.{number}.3 = {count}" for number, count in counts.items())
    )


# --- driver


def unloaded(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Unload the module, and remove the running kernel's one."""
    return _without_module(replace(machine, kernels=(Kernel(machine.kernel, None),)))


def without_uvm(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Leave CUDA's module unloaded since boot, as if no program had needed it."""
    return replace(machine, modules=tuple(each for each in machine.modules if each != "nvidia_uvm"))


def _without_module(machine: Machine) -> Machine:
    """Return the machine without NVIDIA's loaded module."""
    free = [
        replace(each, driver=None)
        for each in machine.functions
        if each.driver in {"nvidia", "nvidia-nvswitch"}
    ]
    return replace(
        with_function(_services_down(machine), free),
        nvml=(*machine.nvml, "error.nvmlInitWithFlags = 9"),
        loaded=None,
        modules=tuple(name for name in machine.modules if not name.startswith("nvidia")),
        log=tuple(line for line in machine.log if not re.match(r"nvidia|NVRM", line[1])),
    )


def _services_down(machine: Machine) -> Machine:
    """Return the machine, on which all services that need the driver have failed."""
    return replace(
        machine,
        units={
            name: replace(unit, active="failed", sub="failed", result="exit-code")
            if unit.active == "active" and name.startswith("nvidia-")
            else unit
            for name, unit in machine.units.items()
        },
    )


def upgraded_without_reboot(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Put a newer driver on disk than the running module."""
    newer = _next(machine.profile.driver)
    return replace(
        _on_disk(machine, newer),
        nvml=(*machine.nvml, "error.nvmlInitWithFlags = 18", f"system.library = {newer}"),
        library=library(machine, newer),
        packages=_packaged(machine.packages, machine.profile.driver, newer),
        reboot_required=True,
    )


def module_differs(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Make the next boot load a module other than the running one; the library is the old one."""
    return _on_disk(machine, _next(machine.profile.driver))


def _next(version: str) -> str:
    """Return a later release of a driver's branch: "570.124.06" to "570.211.01"."""
    return f"{version.partition('.')[0]}.211.01"


def _on_disk(machine: Machine, version: str) -> Machine:
    return with_kernel(
        machine, *(replace(each, nvidia=version) for each in machine.kernels if each.nvidia)
    )


def _packaged(packages: Mapping[str, Package], old: str, new: str) -> dict[str, Package]:
    return {
        name: replace(package, version=package.version.replace(old, new))
        for name, package in packages.items()
    }


def library_gone(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Remove libnvidia-ml."""
    kept = {
        name: package
        for name, package in machine.packages.items()
        if not name.startswith(("libnvidia-compute", "nvidia-utils", "nvidia-driver-cuda"))
    }
    return replace(machine, library=None, packages=kept)


# This branch is older than 525.60.13, so no vLLM with CUDA 12 or 13 runs on it.
OLD_DRIVER, OLD_CUDA = "515.105.01", 11070


def old_driver(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Install a driver of an old branch."""
    new = _on_disk(machine, OLD_DRIVER)
    return replace(
        new,
        nvml=(
            *new.nvml,
            f"system.driver = {OLD_DRIVER}",
            f"system.cuda = {OLD_CUDA}",
            f"gpu.*.gsp = {OLD_DRIVER}",
        ),
        loaded=OLD_DRIVER,
        library=library(machine, OLD_DRIVER),
        packages=_packaged(machine.packages, machine.profile.driver, OLD_DRIVER),
        log=tuple((at, text.replace(machine.profile.driver, OLD_DRIVER)) for at, text in new.log),
    )


def not_root(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Remove the SSH user's special rights."""
    return replace(machine, uid=1000, log_access="denied")


def new_kernel(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Install a newer kernel without building a module for it."""
    numbers = re.match(r"\d+\.\d+\.\d+(?:-\d+)?", machine.kernel)
    assert numbers is not None, machine.kernel
    release = re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), numbers[0])
    newer = release + machine.kernel[numbers.end() :]
    packages = dict(machine.packages)
    if machine.apt:
        packages[f"linux-image-{newer}"] = Package(newer.rpartition("-")[0] + ".92")
    return replace(
        with_kernel(machine, Kernel(newer, None)),
        packages=packages,
        reboot_required=machine.apt,
    )


def module_unsigned(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Turn on Secure Boot with a signed running module and an unsigned one on disk."""
    return replace(
        with_kernel(machine, *(replace(each, signer=None) for each in machine.kernels)),
        secure_boot=True,
    )


def upgrades_on(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Let unattended-upgrades install drivers: no package is held or blacklisted."""
    packages = {
        **{name: replace(each, held=False) for name, each in machine.packages.items()},
        "unattended-upgrades": Package("2.9.1+nmu4ubuntu1"),
    }
    return replace(machine, packages=packages, upgrades=Upgrades(True, ORIGINS, ()))


# --- fabric


def imex_failed(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Make IMEX fail because it did not find its nodes."""
    return with_unit(machine, "nvidia-imex.service", FAILED)


def manager_stopped(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """
    Stop the fabric manager, so that no GPU has joined.

    A rack's tray has no fabric manager of its own. GPUs before Hopper have no fabric state.
    """
    if machine.profile.registers:
        machine = with_nvml_lines(machine, "gpu.*.fabric.state = 1")
    if machine.profile.managed:
        machine = with_unit(machine, FABRIC_MANAGER, replace(STOPPED, enabled="enabled"))
    return machine


def manager_dead(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Kill the fabric manager after it has set up the fabric."""
    unit = replace(machine.units[FABRIC_MANAGER], active="failed", sub="failed", result="signal")
    return with_unit(machine, FABRIC_MANAGER, unit)


def manager_of_another_version(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Install the fabric manager's package of a release other than the driver's."""
    driver = machine.profile.driver
    packages = {
        name: replace(each, version=each.version.replace(driver, _next(driver)))
        if name.startswith("nvidia-fabricmanager")
        else each
        for name, each in machine.packages.items()
    }
    return with_unit(
        replace(machine, packages=packages),
        FABRIC_MANAGER,
        replace(machine.units[FABRIC_MANAGER], active="failed", sub="failed", result="exit-code"),
    )


# --- kernel log

_XID = re.compile(r"NVRM: Xid \(PCI:[^)]*\): (\d+),")


def says(*texts: str) -> Change:
    """
    Return a change that adds lines to the kernel log, a millisecond apart.

    The lines may contain these fields: {pci} is the GPU's address in NVRM's form, 0000:18:00. {bus}
    is the same address in sysfs' form, with the function. {switch} is the address of the last
    NVSwitch, and {number} its number. {id} has the PCI ids.

    An Xid is also an NVML event, so DCGM, which waits for these events, receives it.
    """
    xids = [found[1] for text in texts if (found := _XID.match(text))]

    def change(machine: Machine, gpu: int) -> Machine:
        bus = machine.gpu_bus_id(gpu)
        switches = [each for each in machine.functions if each.class_code == OTHER_BRIDGE_CLASS]
        function = machine.function(bus)
        words = {
            "pci": bus.rpartition(".")[0],
            "bus": bus,
            "id": f"{function.vendor:04x}:{function.device:04x}",
            "switch": switches[-1].bus_id if switches else "",
            "number": len(switches) - 1,
        }
        return logged(
            with_nvml_lines(machine, *(f"gpu.{gpu}.xid.{xid} = 1" for xid in xids)),
            *((WHEN + number / 1000, text.format(**words)) for number, text in enumerate(texts)),
        )

    return change


def memory_error(*texts: str) -> Change:
    """Return a change of an uncorrectable memory error: logged, counted, and requesting a reset."""
    log = says(*texts)

    def change(machine: Machine, gpu: int) -> Machine:
        lines = []
        if machine.profile.has_ecc:
            lines += [f"gpu.{gpu}.ecc.unc_vol.dram = 1", f"gpu.{gpu}.ecc.unc_agg.dram = 1"]
        if tells_action(machine.profile):
            lines.append(f"gpu.{gpu}.recovery_action = 1")
        return log(with_nvml_lines(machine, *lines), gpu)

    return change


def log_denied(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Deny reading the journal and the ring buffer."""
    return replace(machine, log_access="denied")


def log_wrapped(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Remove the journal and the boot's messages from the ring buffer."""
    newest = [
        (machine.uptime - 3600.0 + number, f'audit: type=1400 audit({number}): apparmor="STATUS"')
        for number in range(20)
    ]
    kept = [line for line in machine.log if line[0] > 60]
    return replace(machine, log=tuple(sorted([*kept, *newest])), log_access="ring")


# --- host


def nouveau(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Let Linux' own driver take the GPUs before NVIDIA's."""
    gpus = {machine.gpu_bus_id(index) for index in range(machine.profile.count)}
    without = _without_module(machine)
    taken = [replace(each, driver="nouveau") for each in without.functions if each.bus_id in gpus]
    first = machine.gpu_bus_id(0)
    return logged(
        replace(
            with_function(without, taken), modules=tuple(sorted([*without.modules, "nouveau"]))
        ),
        (4.101, f"nouveau {first}: vgaarb: deactivate vga console"),
        (4.102, f"nouveau {first}: NVIDIA chipset"),
        (5.301, "nvidia: loading out-of-tree module taints kernel."),
        (5.4, f"NVRM: GPU {first} is already bound to nouveau."),
        (5.401, f"NVRM: The NVIDIA probe routine was not called for {len(gpus)} device(s)."),
        (5.402, "NVRM: No NVIDIA devices probed."),
        (5.403, "nvidia-nvlink: Unregistered Nvlink Core, major device number 234"),
    )


def refused_by_secure_boot(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Turn on Secure Boot with an unsigned module, which the kernel does not load."""
    unsigned = with_kernel(machine, *(replace(each, signer=None) for each in machine.kernels))
    return logged(
        replace(_without_module(unsigned), secure_boot=True),
        (0.9, "Kernel is locked down from EFI Secure Boot mode; see man kernel_lockdown.7"),
        (5.3, "Loading of unsigned module is rejected"),
        (5.31, "Lockdown: modprobe: unsigned module loading is restricted; see man "
         "kernel_lockdown.7"),
    )  # fmt: skip


# ACS control with request and completion redirect, upstream forwarding and source validation. Linux
# enables these bits if the IOMMU translates addresses.
ACS_REDIRECTING = 0x1D


def redirecting(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Make every PCI bridge redirect traffic between GPUs to the root complex."""
    bridges = [
        replace(each, acs=ACS_REDIRECTING) for each in machine.functions if each.acs is not None
    ]
    return replace(with_function(machine, bridges), iommu="DMA-FQ")


def disk_full(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Leave little space on the root filesystem."""
    return replace(machine, disks=tuple(Disk(each.mount, each.size, 700) for each in machine.disks))


def unsynced(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Make the clock unsynchronised, with the kernel's error at its limit."""
    return replace(machine, clock=(False, 16000000))


def small_shm(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Give /dev/shm a container engine's default size."""
    return replace(machine, shm=(64, 64))


def little_memory(machine: Machine, gpu: int) -> Machine:  # noqa: ARG001
    """Let other programs use nearly all memory."""
    return replace(machine, memory_available=2048)


def rdma_down(machine: Machine, gpu: int) -> Machine:
    """Take down one RDMA port: the one beside the GPU, if every GPU has one."""
    beside = min(gpu, machine.profile.number("host.rdma") - 1)
    return replace(
        machine,
        rdma=tuple(
            replace(each, state="1: DOWN", physical="3: Disabled", rate="10 Gb/sec (1X SDR)")
            if number == beside
            else each
            for number, each in enumerate(machine.rdma)
        ),
    )


# --- processes and boards

# A PID above Linux' highest (pid_max is 2^22), so no real process of a node can have it.
STRANGER = 4194305


def stranger(machine: Machine, gpu: int) -> Machine:
    """Add a foreign program in its own unit."""
    return replace(
        with_nvml_lines(machine, f"gpu.{gpu}.proc.0 = {STRANGER},3000,/opt/train.py"),
        processes=(*machine.processes, Process(STRANGER, "/opt/train.py", "train.service", 1001)),
    )


def memory_in_use(machine: Machine, gpu: int) -> Machine:
    """Use half of the GPU's memory, like the leftovers of a dead process."""
    half = int(machine.profile.gpu(gpu, "mem.total_mib")) // 2
    return with_nvml_lines(machine, f"gpu.{gpu}.mem.used_mib = {half}")


def hot(machine: Machine, gpu: int) -> Machine:
    """Set the temperature one degree above the slowdown limit."""
    return with_nvml_lines(
        machine, f"gpu.{gpu}.temp.gpu = {int(machine.profile.gpu(gpu, 'temp.slowdown')) + 1}"
    )


def hot_memory(machine: Machine, gpu: int) -> Machine:
    """Set the memory temperature one degree above its maximum."""
    return with_nvml_lines(
        machine, f"gpu.{gpu}.temp.mem = {int(machine.profile.gpu(gpu, 'temp.mem_max')) + 1}"
    )


def capped(machine: Machine, gpu: int) -> Machine:
    """Set the lowest power limit that the board allows."""
    return with_nvml_lines(
        machine, f"gpu.{gpu}.power.limit_mw = {machine.profile.gpu(gpu, 'power.min_mw')}"
    )


def few_spares(machine: Machine, gpu: int) -> Machine:
    """Let one bank have used nearly all spare rows."""
    banks = int(machine.profile.gpu(gpu, "remap.max"))
    return with_nvml_lines(
        machine, f"gpu.{gpu}.remap.max = {banks - 1}", f"gpu.{gpu}.remap.low = 1"
    )


def another_model(machine: Machine, gpu: int) -> Machine:
    """Replace the board by one of the same series with half the memory."""
    half = int(machine.profile.gpu(gpu, "mem.total_mib")) // 2
    return with_nvml_lines(
        machine,
        f"gpu.{gpu}.name = {machine.profile.gpu(gpu, 'name')} Engineering Sample",
        f"gpu.{gpu}.mem.total_mib = {half}",
    )
