"""Build a machine in its delivered state, with healthy surroundings of the profile's GPUs. Pure.

If a profile has no `host.` line for a value, the value is the usual one of such a machine.
docs/develop/lab-profiles.md lists the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lab.machine import pci
from lab.machine.parts import (
    ABSENT,
    FAILED,
    Disk,
    Function,
    Kernel,
    Library,
    Machine,
    Net,
    Package,
    Rdma,
    Unit,
    Upgrades,
)
from lab.machine.profile import HOPPER, Profile, expanded

# Units that the probe queries.
UNITS = (
    "nvidia-fabricmanager.service",
    "nvidia-persistenced.service",
    "nvidia-imex.service",
    "nvidia-dcgm.service",
    "nvidia-cdi-refresh.service",
)

# The beginning of the vital product data of a NIC that manages NVSwitches. The start script of
# nvidia-fabricmanager searches for this word.
SWITCH_MANAGER = "NVIDIA SW_MNG"

# Origins from which Ubuntu's unattended-upgrades installs by default, and its exclusion of drivers.
ORIGINS = ("Ubuntu:noble", "Ubuntu:noble-security", "UbuntuESM:noble-infra-security")
BLACKLIST = ("nvidia-", "libnvidia-", "linux-(image|headers|modules)")


def of(name: str, *faults: Callable[[Machine], Machine]) -> Machine:
    """
    Return the machine of a profile such as "h100x8", with faults, in their order.

    A fault is any function that changes a Machine; `lab.faults.fault` returns a fault by its name.
    Raises `FleetError` if there is no such profile.
    """
    machine = _delivered(Profile.of(name))
    for fault in faults:
        machine = fault(machine)
    return machine


def _delivered(profile: Profile) -> Machine:
    release = profile.text("host.kernel", "6.8.0-90-generic")
    rdma_layer = profile.text("host.rdma.layer", "InfiniBand")
    count = profile.number("host.rdma")
    names = tuple(f"mlx5_{number}" for number in range(count))
    managers = tuple(
        f"mlx5_{count + number}" for number in range(profile.number("host.rdma.switches"))
    )
    functions = pci.functions(profile, names, managers, rdma_layer)
    functions |= {
        name: replace(each, device=pci.NVSWITCHES.get(profile.architecture, 0))
        for name, each in functions.items()
        if name.startswith("switch")
    }
    secure_boot = profile.text("host.secure_boot")
    iommu = profile.text("host.iommu")
    machine = Machine(
        profile=profile,
        os=profile.text("host.os", "ubuntu-24.04"),
        arch=profile.text("host.arch", "x86_64"),
        kernel=release,
        kernels=(Kernel(release, profile.driver, profile.text("host.signer") or None),),
        cmdline=f"BOOT_IMAGE=/vmlinuz-{release} root=/dev/nvme0n1p2 ro"
        + (" iommu=pt" if iommu == "identity" else ""),
        modules=_modules(profile),
        loaded=profile.driver,
        flavour="proprietary" if profile.text("host.module") == "proprietary" else "open",
        secure_boot=bool(int(secure_boot)) if secure_boot else None,
        iommu=iommu or None,
        functions=tuple(functions.values()),
        rdma=(
            *_rdma(profile, names, functions, rdma_layer),
            *(Rdma(name, functions[name].bus_id, vpd=SWITCH_MANAGER) for name in managers),
        ),
        net=(Net("eth0", "52:54:00:0a:00:01", "10.10.0.1", functions["eth0"].bus_id),),
        cpus=_cpus(profile),
        memory=profile.number("host.memory_mib", 2063927),
        units=_units(profile),
    )
    memory = machine.memory
    machine = replace(
        machine,
        memory_available=memory * 24 // 25,
        shm=(memory // 2, memory // 2),  # tmpfs' own default is half of memory
        disks=(Disk("/", 1831420, 1402380),),
        library=library(machine, profile.driver),
        packages=_packages(machine),
        upgrades=_upgrades(machine),
    )
    return replace(machine, log=boot_log(machine))


def library(machine: Machine, version: str) -> Library:
    """Return libnvidia-ml of a version, at the path of the machine's distribution."""
    folder = "/usr/lib64" if not machine.apt else f"/usr/lib/{machine.arch}-linux-gnu"
    return Library(f"{folder}/libnvidia-ml.so.{version}", version)


def _modules(profile: Profile) -> tuple[str, ...]:
    common = ("ext4", "ipmi_si", "nvidia", "nvidia_modeset", "nvidia_uvm", "nvme", "tls")
    network = ("ib_core", "mlx5_core", "mlx5_ib", "nvidia_peermem")
    return tuple(sorted([*common, *(network if profile.number("host.rdma") else ())]))


def _rdma(
    profile: Profile, names: tuple[str, ...], functions: Mapping[str, Function], layer: str
) -> tuple[Rdma, ...]:
    rate = profile.text("host.rdma.rate", "400 Gb/sec (4X NDR)")
    return tuple(Rdma(name, functions[name].bus_id, rate=rate, layer=layer) for name in names)


def _cpus(profile: Profile) -> str:
    numbers = set().union(*(expanded(profile.gpu(i, "cpus")) for i in range(profile.count)))
    return f"0-{max(numbers)}"


def _units(profile: Profile) -> dict[str, Unit]:
    units = dict.fromkeys(UNITS, ABSENT)
    if profile.managed:
        units["nvidia-fabricmanager.service"] = Unit()
    elif profile.text("host.fabricmanager"):
        # Also installed on machines without switches, where it fails at each boot without harm.
        units["nvidia-fabricmanager.service"] = FAILED
    if profile.gpu(0, "platform.chassis"):
        units["nvidia-imex.service"] = Unit()
    if profile.data_centre:
        units["nvidia-persistenced.service"] = Unit(enabled="static")
        units["nvidia-dcgm.service"] = Unit()
    return units


def _packages(machine: Machine) -> dict[str, Package]:
    profile, driver = machine.profile, machine.profile.driver
    held = profile.text("host.upgrades") == "held"
    if not machine.apt:
        return _rpms(machine)
    # From R580 on NVIDIA names the fabric manager's package without the branch.
    branch = profile.branch
    own = f"{driver}-1" if machine.os.startswith("debian") else f"{driver}-0ubuntu1"
    kind = "-open" if machine.flavour == "open" else ""
    packages = {
        f"linux-image-{machine.kernel}": Package(machine.kernel.rpartition("-")[0] + ".91", held),
        f"linux-headers-{machine.kernel}": Package(machine.kernel.rpartition("-")[0] + ".91", held),
        f"nvidia-driver-{branch}{kind}": Package(own, held),
        f"nvidia-dkms-{branch}{kind}": Package(own, held),
        f"libnvidia-compute-{branch}": Package(own, held),
        f"nvidia-utils-{branch}": Package(own, held),
    }
    if profile.managed or profile.text("host.fabricmanager"):
        name = "nvidia-fabricmanager" + (f"-{branch}" if branch < 580 else "")
        packages[name] = Package(f"{driver}-1", held)
    if profile.managed and profile.architecture > HOPPER:
        packages["nvlsm"] = Package("2025.06.11-1", held)
    if profile.gpu(0, "platform.chassis"):
        packages["nvidia-imex"] = Package(f"{driver}-1", held)
    if profile.data_centre:
        packages["datacenter-gpu-manager-4-core"] = Package("1:4.5.3-1")
    if profile.text("host.upgrades") != "absent":
        packages["unattended-upgrades"] = Package("2.9.1+nmu4ubuntu1")
    return packages


def _rpms(machine: Machine) -> dict[str, Package]:
    version, _, rest = machine.kernel.partition("-")
    release = rest.rpartition(".")[0]
    driver = machine.profile.driver
    return {
        "kernel": Package(f"{version}-{release}"),
        "kernel-devel": Package(f"{version}-{release}"),
        "nvidia-driver-cuda": Package(f"{driver}-1.el9"),
        "nvidia-driver-cuda-libs": Package(f"{driver}-1.el9"),
        "kmod-nvidia-open-dkms": Package(f"{driver}-1.el9"),
        "nvidia-persistenced": Package(f"{driver}-1.el9"),
        "datacenter-gpu-manager-4-core": Package("4.5.3-1"),
    }


def _upgrades(machine: Machine) -> Upgrades | None:
    wanted = machine.profile.text("host.upgrades", "blacklist")
    if wanted == "absent" or not machine.apt:
        return None
    return Upgrades(True, ORIGINS, BLACKLIST if wanted == "blacklist" else ())


def boot_log(machine: Machine) -> tuple[tuple[float, str], ...]:
    """Return the boot messages of a healthy machine's kernel, as far as they are read."""
    profile, arch = machine.profile, machine.arch
    lines = [
        (0.0, f"Linux version {machine.kernel} (build@host) (gcc 13.3.0) #91 SMP PREEMPT_DYNAMIC"),
        (0.0, f"Command line: {machine.cmdline}"),
        (0.011, "KERNEL supported cpus:"),
        (1.482, "pci_bus 0000:00: root bus resource [bus 00-ff]"),
        (
            3.917,
            "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Quota mode: none.",
        ),
        (5.301, "nvidia: loading out-of-tree module taints kernel."),
    ]
    if machine.kernels and machine.kernels[0].signer is None:
        lines.append(
            (5.302, "nvidia: module verification failed: signature and/or required key missing - "
             "tainting kernel")
        )  # fmt: skip
    if machine.flavour == "proprietary":
        lines.append((5.303, "nvidia: module license 'NVIDIA' taints kernel."))
    lines.append(
        (5.412, "nvidia-nvlink: Nvlink Core is being initialized, major device number 234")
    )
    switches = [each for each in machine.functions if each.driver == "nvidia-nvswitch"]
    for number, switch in enumerate(switches):
        begin = 5.42 + number / 100
        lines += [
            (begin, f"nvidia-nvswitch: Probing device {switch.bus_id}, Vendor Id = 0x10de, "
             f"Device Id = 0x{switch.device:x}, Class = 0x{switch.class_code:x}"),
            (begin + 0.004, f"nvidia-nvswitch{number}: using MSI"),
        ]  # fmt: skip
    module = f"UNIX Open Kernel Module for {arch}" if machine.flavour == "open" else (
        f"UNIX {arch} Kernel Module"
    )  # fmt: skip
    lines += [
        (6.512, f"NVRM: loading NVIDIA {module}  {profile.driver}  Release Build"),
        (6.733, f"nvidia-modeset: Loading NVIDIA Kernel Mode Setting Driver for UNIX platforms  "
         f"{profile.driver}"),
        (7.104, "nvidia-uvm: Loaded the UVM driver, major device number 511."),
        (9.871, "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready"),
    ]  # fmt: skip
    lines += [
        (11.2 + number, f"nvidia-nvswitch{number}: open (major=235)")
        for number in range(len(switches))
    ]
    return tuple(sorted(lines, key=lambda line: line[0]))
