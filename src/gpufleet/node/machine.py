"""Determine a node's system and hardware, which decide its packages, without a driver.

Pure. The source is the document of `on_node/probe/probe.py` (docs/reference/probe.md). All facts
come from the PCI bus and the kernel's files, never from NVIDIA's driver. So the result is the same
before the driver is installed, while it is broken, and afterwards, and a second run changes
nothing.
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

# The first and last PCI device ids that a generation's chips have (pci-ids.ucw.cz, vendor 10de;
# the ids stand in blocks of a chip each). A newer chip is in no row: its generation is unknown.
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
# Compute trays of a rack, whose switches are managed elsewhere and whose memory IMEX shares: GB200,
# GB300.
_RACK = frozenset({0x2941, 0x31C2})
# GPUs that are attached to a Grace CPU: GH200 in its three sizes.
_GRACE_HOPPER = frozenset({0x2342, 0x2345, 0x2348})

# PCI class code, bridge of no named kind: among NVIDIA's functions that is an NVSwitch.
_NVSWITCH_CLASS = "0x0680"
_GPU_CLASS = "0x03"

# Packages of kernels: Debian's and Ubuntu's, then Red Hat's.
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
        Return the version for which packages are built: the major version for Red Hat's family.
        """
        return self.version.partition(".")[0] if self.is_red_hat else self.version

    @property
    def is_red_hat(self) -> bool:
        """Return whether the system is RHEL or a rebuild, which use rpm and dnf."""
        return self.id in {"rhel", "rocky", "almalinux"}

    def __str__(self) -> str:
        return f"{self.id} {self.version} on {self.arch}"


@dataclass(frozen=True)
class Kernel:
    """
    An installed kernel.

    Attributes:
        release: as in `uname -r`.
        running: it runs now.
        newest: it boots next, unless another is chosen.
        module: version of the NVIDIA module on disk for it; None: there is none.
    """

    release: str
    running: bool = False
    newest: bool = False
    module: str | None = None


@dataclass(frozen=True)
class Machine:
    """
    The hardware and system facts of a node that its driver packages depend on.

    Attributes:
        gpus: the PCI device id of each GPU on the bus, in the bus's order.
        nvswitch: it has NVSwitches that it manages itself.
        nvlink5: these are of NVLink 5, managed over InfiniBand by NVLSM.
        imex: its GPUs share memory with other nodes of a rack.
        grace: its GPUs are connected to Grace CPUs.
        kernels: the installed ones, including the running one.
        secure_boot: firmware lets only signed modules load; None: could not be read.
        modules: names of loaded kernel modules; None: could not be read.
        kernel_packages: installed packages of kernels, their modules and headers.
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
        """Return the generations of the GPUs, without unknown ones."""
        return frozenset(filter(None, map(generation, self.gpus)))

    @property
    def has_nouveau(self) -> bool:
        """Return whether nouveau is loaded, which excludes NVIDIA's driver."""
        return "nouveau" in (self.modules or ())


def generation(device: int) -> Generation | None:
    """
    Return a GPU's generation by its PCI device id, or None if unknown.

    >>> generation(0x2330)
    'hopper'
    """
    return next((name for first, last, name in _GENERATIONS if first <= device <= last), None)


def from_probe(document: Mapping[str, Any]) -> tuple[System, Machine]:
    """
    Return the system and the machine of a probe's document.

    Raises `FleetError` if the system, the processor, the PCI bus or the kernel is unknown: packages
    are never guessed.
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
    Return whether this node manages a board's NVLink 5 switches.

    A virtual machine has the board's GPUs but no devices that reach its switches. If the devices
    could not be read, the switches count as local, because an unneeded fabric manager fails
    visibly.
    """
    if _HGX_BLACKWELL.isdisjoint(gpus):
        return False
    listed = document["nics"]["infiniband"]
    said = [] if _missing(listed) else [each.get("manages_switches") for each in listed]
    return not said or any(each is True or _missing(each) for each in said)


def _functions(document: Mapping[str, Any], kind: str) -> list[int]:
    """Return the device ids of NVIDIA's PCI functions with this class prefix."""
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
    """Return Secure Boot's state, or None if unknown; without EFI it is off."""
    if _missing(value):
        return False if value is not None and value["missing"] == "absent" else None
    return bool(value)


def _kernel_packages(packages: Any) -> list[str]:
    return [] if _missing(packages) else sorted(filter(_OF_KERNELS.match, packages))


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and "missing" in value)


def _why(value: Any) -> str:
    return "absent" if value is None else str(value["missing"])
