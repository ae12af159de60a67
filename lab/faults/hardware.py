"""Decide from a profile which faults its hardware can have. Pure."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from lab.machine import Profile

Condition = Callable[[Profile], bool]

# Conditions that `Profile` itself defines.
has_ecc: Condition = attrgetter("has_ecc")
remaps: Condition = attrgetter("remaps")
retires: Condition = attrgetter("retires")
linked: Condition = attrgetter("linked")
switched: Condition = attrgetter("switched")
managed: Condition = attrgetter("managed")
registers: Condition = attrgetter("registers")


def everywhere(profile: Profile) -> bool:  # noqa: ARG001
    """Return True, for faults of all hardware."""
    return True


def several(profile: Profile) -> bool:
    """Return whether the machine has several GPUs."""
    return profile.count > 1


def tells_action(profile: Profile) -> bool:
    """Return whether the driver reports the recovery action (field 230, from R570 on)."""
    return profile.branch >= 570


def counts_sram(profile: Profile) -> bool:
    """
    Return whether the driver supports nvmlDeviceGetSramEccErrorStatus (R535.161, Ampere or later).
    """
    return profile.remaps and profile.has_ecc and profile.branch >= 535


def linked_beyond_a_pair(profile: Profile) -> bool:
    """
    Return whether a GPU without any NVLink must be a fault.

    For a pair of boards this is no fault, because pairs are also sold without a bridge.
    """
    return profile.linked and (profile.switched or profile.count > 2)


def has(key: str) -> Condition:
    """Return whether the boards have a key, such as "mig"."""
    return lambda profile: bool(profile.gpu(0, key))


def efi(profile: Profile) -> bool:
    """Return whether the machine boots by EFI."""
    return bool(profile.text("host.secure_boot"))


def debian_like(profile: Profile) -> bool:
    """Return whether the machine has dpkg and apt."""
    return not profile.text("host.os").startswith("rocky")


def has_rdma(profile: Profile) -> bool:
    """Return whether the machine has InfiniBand or RoCE."""
    return profile.number("host.rdma") > 0


def has_bridges(profile: Profile) -> bool:
    """Return whether several GPUs are below visible PCI bridges, which virtual machines lack."""
    return profile.count > 1 and not profile.text("host.virtual")


def nvlink5(profile: Profile) -> bool:
    """Return whether the links are NVLink 5, which counts and logs errors differently."""
    return profile.linked and int(profile.gpu(0, "nvlink.version")) >= 7


def knows_memory_limit(profile: Profile) -> bool:
    """Return whether the boards report their memory's temperature and its limit."""
    return bool(profile.gpu(0, "temp.mem") and profile.gpu(0, "temp.mem_max"))


def has_switches_on_pci(profile: Profile) -> bool:
    """
    Return whether NVSwitches are PCI functions with errors in the kernel log (before NVLink 5).
    """
    return profile.pci_switches > 0


def talks_over_pcie(profile: Profile) -> bool:
    """Return whether some GPUs communicate only over PCIe, with the driver's permission."""
    all_linked = profile.linked and (profile.switched or profile.count == 2)
    return profile.count > 1 and not all_linked and profile.gpu(0, "p2p.pcie", "0") == "0"


def own_memory(profile: Profile) -> bool:
    """Return whether the GPUs' memory is their own; Linux on Grace counts it as system memory."""
    return not profile.gpu(0, "gpu_numa_id")
