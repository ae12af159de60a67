"""Determine a node's system and hardware without NVIDIA's driver, to choose its packages.

Pure. The source is the document of `on_node/probe/probe.py` (docs/reference/probe.md). All facts
come from the PCI bus and from files of the kernel, and never from NVIDIA's driver. So the result is
the same before the driver is installed, while the driver is broken, and afterwards. A second run
therefore changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpufleet.errors import FleetError
from gpufleet.on_node.common.linux_facts import SWITCHES_OVER_INFINIBAND

Architecture = Literal["x86_64", "aarch64"]
Generation = Literal["maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"]

# The first and the last PCI device id of the chips of a generation (pci-ids.ucw.cz, vendor 10de).
# Each chip has a block of ids. The generation of a newer chip, which is in no row, is unknown.
_GENERATIONS: tuple[tuple[int, int, Generation], ...] = (
    (0x1340, 0x15EF, "maxwell"),
    (0x15F0, 0x15FF, "pascal"),  # GP100
    (0x1600, 0x17FF, "maxwell"),
    (0x1B00, 0x1D7F, "pascal"),
    (0x1D80, 0x1DFF, "volta"),
    (0x1E00, 0x1FFF, "turing"),
    (0x2080, 0x20FF, "ampere"),  # GA100
    (0x2180, 0x21FF, "turing"),
    (0x2200, 0x229F, "ampere"),
    (0x2300, 0x23FF, "hopper"),
    (0x2400, 0x25FF, "ampere"),
    (0x2680, 0x28FF, "ada"),
    (0x2900, 0x2FFF, "blackwell"),
    (0x3180, 0x31FF, "blackwell"),  # GB110: B300 and GB300
)
_HGX_BLACKWELL = frozenset(int(each, 16) for each in SWITCHES_OVER_INFINIBAND)
# GPUs of a rack's compute trays: GB200 and GB300. The rack's switches are not managed on these
# nodes, and IMEX shares the GPUs' memory.
_RACK = frozenset({0x2941, 0x31C2})
# GPUs on a board with a Grace CPU: the three sizes of GH200.
_GRACE_HOPPER = frozenset({0x2342, 0x2345, 0x2348})

# The PCI class of bridges of an unspecified kind. NVIDIA's devices with this class are NVSwitches.
_NVSWITCH_CLASS = "0x0680"
_GPU_CLASS = "0x03"

# Names of kernel packages: Debian's and Ubuntu's, then Red Hat's.
_OF_KERNELS = re.compile(r"linux-(image|headers|modules)-(?!nvidia-\d)|kernel(-|$)")


@dataclass(frozen=True)
class System:
    """
    The operating system for which packages are built.

    `id` and `version` are from /etc/os-release ("debian", "12"; "rocky", "9.6"), and `arch` is the
    kernel's name of the processor architecture.
    """

    id: str
    version: str
    arch: Architecture

    @property
    def major(self) -> str:
        """
        Return the version for which packages are built.

        In Red Hat's family, it is only the major version.
        """
        return self.version.partition(".")[0] if self.is_red_hat else self.version

    @property
    def is_red_hat(self) -> bool:
        """Return whether the system is RHEL or a rebuild of it. These systems use rpm and dnf."""
        return self.id in {"rhel", "rocky", "almalinux"}

    def __str__(self) -> str:
        return f"{self.id} {self.version} on {self.arch}"


@dataclass(frozen=True)
class Kernel:
    """
    An installed kernel.

    Attributes:
        release: as in `uname -r`.
        running: whether the kernel runs now.
        newest: whether the node boots this kernel next, unless a different one is chosen.
        module: the version of the NVIDIA module on disk for this kernel, or None.
    """

    release: str
    running: bool = False
    newest: bool = False
    module: str | None = None


@dataclass(frozen=True)
class Machine:
    """
    The facts of a node's hardware and system on which its driver packages depend.

    Attributes:
        gpus: the PCI device id of each GPU, in the order of the bus.
        nvswitch: whether the node has NVSwitches that it manages itself.
        nvlink5: whether these switches are of NVLink 5, so that NVLSM manages them over InfiniBand.
        imex: whether the GPUs share memory with other nodes of a rack.
        grace: whether the GPUs are connected to Grace CPUs.
        kernels: the installed kernels, including the running one.
        secure_boot: whether only signed modules can be loaded. None: this could not be read.
        modules: the names of loaded kernel modules. None: they could not be read.
        kernel_packages: the installed packages of kernels, of their modules and of their headers.
    """

    gpus: tuple[int, ...]
    nvswitch: bool = False
    nvlink5: bool = False
    imex: bool = False
    grace: bool = False
    kernels: tuple[Kernel, ...] = ()
    secure_boot: bool | None = None
    modules: frozenset[str] | None = None
    kernel_packages: tuple[str, ...] = ()

    @property
    def generations(self) -> frozenset[Generation]:
        """Return the generations of the GPUs. Unknown generations are omitted."""
        return frozenset(filter(None, map(generation, self.gpus)))

    @property
    def has_nouveau(self) -> bool:
        """Return whether nouveau is loaded. NVIDIA's driver cannot work beside it."""
        return "nouveau" in (self.modules or ())


def generation(device: int) -> Generation | None:
    """
    Return the generation of a GPU by its PCI device id, or None if it is unknown.

    >>> generation(0x2330)
    'hopper'
    """
    return next((name for first, last, name in _GENERATIONS if first <= device <= last), None)


def from_probe(document: Mapping[str, Any]) -> tuple[System, Machine]:
    """
    Return the system and the machine of a probe's document.

    Raises `FleetError` if the system, the processor, the PCI bus or the kernel is unknown, because
    packages are never guessed.
    """
    problems = []
    os_release = document["os_release"]
    for what, value in (
        ("/etc/os-release's ID", os_release.get("id")),
        ("/etc/os-release's VERSION_ID", os_release.get("version_id")),
        ("the node's processor", document["arch"]),
        ("the node's kernel", document["kernel"]),
        ("the node's PCI bus", document["pci"]),
    ):
        if _missing(value):
            problems.append(f"{what} could not be read ({_why(value)}): check it on the node")
    arch = document["arch"]
    if not problems and arch not in {"x86_64", "aarch64"}:
        problems.append(
            f"the node's processor is {arch}: NVIDIA's packages are for x86_64 and aarch64"
        )
    if problems:
        raise FleetError(*problems)
    return System(os_release["id"], os_release["version_id"], arch), _machine(document)


def _machine(document: Mapping[str, Any]) -> Machine:
    gpus = tuple(_functions(document, _GPU_CLASS))
    about = document["system"]
    modules = about["modules"]
    over_infiniband = _manages_over_infiniband(document, gpus)
    return Machine(
        gpus=gpus,
        nvswitch=over_infiniband or bool(_functions(document, _NVSWITCH_CLASS)),
        nvlink5=over_infiniband,
        imex=not _RACK.isdisjoint(gpus),
        grace=not (_GRACE_HOPPER | _RACK).isdisjoint(gpus),
        kernels=tuple(_kernels(document)),
        secure_boot=_secure_boot(about["secure_boot"]),
        modules=None if _missing(modules) else frozenset(modules),
        kernel_packages=tuple(_kernel_packages(about["packages"])),
    )


def _manages_over_infiniband(document: Mapping[str, Any], gpus: tuple[int, ...]) -> bool:
    """
    Return whether this node manages the NVLink 5 switches of a board.

    A virtual machine may have GPUs of the board, but no devices that reach the switches. If the
    devices could not be read, the function returns True. A fabric manager that is not needed then
    fails visibly.
    """
    if _HGX_BLACKWELL.isdisjoint(gpus):
        return False
    listed = document["nics"]["infiniband"]
    said = [] if _missing(listed) else [each.get("manages_switches") for each in listed]
    return not said or any(each is True or _missing(each) for each in said)


def _functions(document: Mapping[str, Any], kind: str) -> list[int]:
    """Return the device ids of NVIDIA's PCI functions whose class begins with `kind`."""
    return [
        int(function["device"], 16)
        for function in document["pci"]
        if str(function["class"]).startswith(kind)
        and re.fullmatch(r"0x[0-9a-f]{4}", str(function["device"]))
    ]


def _kernels(document: Mapping[str, Any]) -> list[Kernel]:
    """Return the installed kernels, or only the running one if they could not be listed."""
    running, listed = document["kernel"], document["driver"].get("kernels")
    rows = [] if listed is None or _missing(listed) else listed
    found = [
        Kernel(
            row["kernel"],
            running=row["kernel"] == running,
            newest=row["newest"] is True,
            module=None if _missing(row["nvidia"]) else row["nvidia"],
        )
        for row in rows
    ]
    if not any(kernel.running for kernel in found):
        found.append(Kernel(running, running=True, newest=not found))
    return found


def _secure_boot(value: Any) -> bool | None:
    """Return whether Secure Boot is on, or None if this is unknown. Without EFI, it is off."""
    if _missing(value):
        return False if value is not None and value["missing"] == "absent" else None
    return bool(value)


def _kernel_packages(packages: Any) -> list[str]:
    return [] if _missing(packages) else sorted(filter(_OF_KERNELS.match, packages))


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and "missing" in value)


def _why(value: Any) -> str:
    return "absent" if value is None else str(value["missing"])
