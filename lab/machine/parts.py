"""Define a machine as values: `Machine` and its parts. Pure.

Sizes are in MiB, times in seconds, and versions in the vendor's form. To make a faulty machine from
a machine, use `dataclasses.replace` or one of the small functions at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lab.machine.profile import Profile


@dataclass(frozen=True)
class Kernel:
    """An installed kernel, and its NVIDIA module below /lib/modules."""

    release: str
    nvidia: str | None  # the module's version; None: no module was built for this kernel
    signer: str | None = None  # the signer of the module; None: unsigned


@dataclass(frozen=True)
class Function:
    """A PCI function: a GPU, a NIC, an NVSwitch, or a bridge above one of them."""

    bus_id: str  # "0000:18:00.0"
    vendor: int
    device: int
    class_code: (
        int  # 0x030200 3D controller, 0x020700 InfiniBand, 0x068000 NVSwitch, 0x060400 bridge
    )
    numa: int
    root: str  # the host bridge's directory in /sys/devices: "pci0000:15"
    above: tuple[str, ...] = ()  # bus ids of the bridges between, the root port first
    driver: str | None = None
    acs: int | None = None  # bits of the ACS control register; None: the function has no ACS


@dataclass(frozen=True)
class Rdma:
    """One InfiniBand or RoCE device with one port, from /sys/class/infiniband."""

    name: str
    bus_id: str
    state: str = "4: ACTIVE"
    physical: str = "5: LinkUp"
    rate: str = "400 Gb/sec (4X NDR)"
    layer: str = "InfiniBand"
    vpd: str = ""  # vital product data: HGX boards from Blackwell on name their switches there


@dataclass(frozen=True)
class Net:
    """One net device."""

    name: str
    mac: str
    ipv4: str | None
    bus_id: str | None = None  # None: a virtual device
    state: str = "up"
    mtu: int = 1500
    speed: int = 25000  # Mbit/s


@dataclass(frozen=True)
class Unit:
    """A systemd unit in the form of `systemctl show`."""

    load: str = "loaded"
    active: str = "active"
    sub: str = "running"
    enabled: str = "enabled"
    result: str = "success"


ABSENT = Unit("not-found", "inactive", "dead", "", "success")
STOPPED = Unit("loaded", "inactive", "dead", "disabled", "success")
FAILED = Unit("loaded", "failed", "failed", "enabled", "exit-code")


@dataclass(frozen=True)
class Package:
    """An installed package."""

    version: str
    held: bool = False


@dataclass(frozen=True)
class Disk:
    """A mounted filesystem."""

    mount: str
    size: int
    free: int


@dataclass(frozen=True)
class Library:
    """The libnvidia-ml that a program's dlopen finds."""

    file: str
    version: str


@dataclass(frozen=True)
class Process:
    """A process that holds a GPU."""

    pid: int
    name: str
    unit: str  # its systemd unit, "train.service"
    uid: int


@dataclass(frozen=True)
class Upgrades:
    """The settings of unattended-upgrades in apt-config."""

    enabled: bool
    origins: tuple[str, ...]
    blacklist: tuple[str, ...]


# Where the kernel log can be read: in the journal, only in the ring buffer, or nowhere.
LogAccess = Literal["journal", "ring", "denied"]


@dataclass(frozen=True)
class Machine:
    """A machine around its GPUs: all facts that the probe does not read from NVML."""

    profile: Profile
    nvml: tuple[str, ...] = ()  # lines of faults, which override the profile's own

    hostname: str = "gpu-01"
    machine_id: str = "0123456789abcdef0123456789abcdef"
    boot_id: str = "9e6f4b52-4c0e-4f5a-8a43-000000000001"
    os: str = "ubuntu-24.04"
    arch: str = "x86_64"
    uid: int = 0
    uptime: float = 864000.5

    kernel: str = ""  # the running one's release
    kernels: tuple[Kernel, ...] = ()
    cmdline: str = ""
    modules: tuple[str, ...] = ()  # loaded, in /proc/modules' names
    loaded: str | None = None  # version of the loaded NVIDIA module
    flavour: Literal["open", "proprietary"] = "open"
    library: Library | None = None
    secure_boot: bool | None = None  # None: not booted by EFI
    iommu: str | None = None  # type of every group, "identity" or "DMA-FQ"; None: there is none

    functions: tuple[Function, ...] = ()
    rdma: tuple[Rdma, ...] = ()
    net: tuple[Net, ...] = ()

    cpus: str = "0"
    memory: int = 0
    memory_available: int = 0
    hugepages: tuple[int, int] = (0, 0)  # total, free; of 2048 KiB
    shm: tuple[int, int] = (0, 0)  # size, free
    disks: tuple[Disk, ...] = ()
    clock: tuple[bool, int] = (True, 1200)  # synchronised; greatest error in microseconds

    units: Mapping[str, Unit] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)
    upgrades: Upgrades | None = None  # None: unattended-upgrades is not installed
    reboot_required: bool = False
    processes: tuple[Process, ...] = ()

    log: tuple[tuple[float, str], ...] = ()  # of the kernel since boot: (seconds, text)
    log_access: LogAccess = "journal"

    @property
    def apt(self) -> bool:
        """Return whether the machine has apt and dpkg, rather than dnf and rpm."""
        return not self.os.startswith(("rocky", "rhel", "alma"))

    def gpu_bus_id(self, index: int) -> str:
        """Return a GPU's address in sysfs' form."""
        return self.profile.gpu(index, "busid").lower()

    def function(self, bus_id: str) -> Function:
        """Return the PCI function at an address."""
        return next(each for each in self.functions if each.bus_id == bus_id)


def with_nvml_lines(machine: Machine, *lines: str) -> Machine:
    """Return the machine with more lines for its simulated NVML."""
    return replace(machine, nvml=(*machine.nvml, *lines))


def logged(machine: Machine, *lines: tuple[float, str]) -> Machine:
    """Return the machine with more lines in its kernel log, in the order of time."""
    return replace(machine, log=tuple(sorted([*machine.log, *lines], key=lambda line: line[0])))


def with_unit(machine: Machine, name: str, unit: Unit) -> Machine:
    """Return the machine with one systemd unit in another state."""
    return replace(machine, units={**machine.units, name: unit})


def with_function(machine: Machine, changed: Iterable[Function]) -> Machine:
    """Return the machine with these PCI functions in place of those at their addresses."""
    new = {function.bus_id: function for function in changed}
    return replace(
        machine, functions=tuple(new.get(each.bus_id, each) for each in machine.functions)
    )


def with_kernel(machine: Machine, *kernels: Kernel) -> Machine:
    """Return the machine with these kernels in place of, or beside, those it has."""
    by_release = {kernel.release: kernel for kernel in (*machine.kernels, *kernels)}
    return replace(machine, kernels=tuple(by_release.values()))
