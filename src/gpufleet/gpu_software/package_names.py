"""Define the names of the driver's packages in NVIDIA's repositories. Pure.

There is a table for each of the four packagings:

- Debian
- Ubuntu with the branch in the names (up to R580)
- Ubuntu without the branch in the names (from R590 on)
- Red Hat

The sources are NVIDIA's driver installation guide (the chapters on compute-only installations, on
version locking, and on "Ubuntu 590 and later packages") and lists of packages of machines that run
580, 590, 595 and 615.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpufleet.errors import FleetError
from gpufleet.node.machine import System
from gpufleet.settings.gpu_lock import GpuLock

# The first branch whose packages for Ubuntu have no branch in their names.
UNBRANCHED_SINCE = 590
# The first branch whose fabric manager, NSCQ and IMEX have no branch in their names, on every
# system.
FABRIC_UNBRANCHED_SINCE = 580


@dataclass(frozen=True)
class PackageNames:
    """
    The names of one packaging for one lock.

    Attributes:
        packaging: a description of the packaging, for a report.
        parts: the packages with the driver's version that every node gets.
        persistence: the package of the persistence daemon.
        others: patterns of packages of a different branch, flavour or packaging, which are removed.
        kept: patterns of packages that match `others` but may stay.
        stream: the stream of the dnf module nvidia-driver; None if there is no such module.
    """

    packaging: str
    parts: tuple[str, ...]
    persistence: str
    others: tuple[str, ...]
    kept: tuple[str, ...] = ()
    stream: str | None = None


def package_names(system: System, lock: GpuLock) -> PackageNames:
    """
    Return the names of the packages for a system.

    Raises `FleetError` if the system is not supported.
    """
    packaging = _PACKAGINGS.get((system.id, system.major))
    if packaging is None:
        known = ", ".join(f"{name} {version}" for name, version in _PACKAGINGS)
        raise FleetError(
            f"{system}: gpufleet can install NVIDIA's driver only on {known}. Use one of these "
            "systems, or remove `gpu_lock` and install the driver by hand"
        )
    return packaging(lock)


def fabric_name(name: str, system: System, lock: GpuLock) -> str:
    """
    Return the name of the package of the fabric manager, NSCQ or IMEX in the branch of a lock.

    >>> lock = GpuLock(driver="570.124.06")
    >>> fabric_name("nvidia-imex", System("ubuntu", "24.04", "x86_64"), lock)
    'nvidia-imex-570'
    """
    if int(lock.branch) >= FABRIC_UNBRANCHED_SINCE:
        return name
    if system.is_red_hat and name == "nvidia-fabricmanager":
        return "nvidia-fabric-manager"
    return f"{name}-{lock.branch}"


# NVIDIA's packages that pin a version. They would conflict with gpufleet's holds.
_PINS = "nvidia-driver-pinning-*"
# Before branch 580, the names of the fabric's packages have the branch. The packages of a later
# branch must replace them.
_BRANCHED_FABRIC = ("nvidia-fabricmanager-???", "libnvidia-nscq-???", "nvidia-imex-???")


def _fabric_of_others(lock: GpuLock) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    Return the patterns of the fabric's packages of all branches, and the patterns of this branch.
    """
    own = tuple(pattern.replace("???", lock.branch) for pattern in _BRANCHED_FABRIC)
    return _BRANCHED_FABRIC, ("nvidia-fabricmanager-dev", *own)


def _debian(lock: GpuLock) -> PackageNames:
    kernel = {"open": "nvidia-kernel-open-dkms", "proprietary": "nvidia-kernel-dkms"}
    fabric, own = _fabric_of_others(lock)
    return PackageNames(
        "Debian",
        parts=(
            "nvidia-driver-cuda",
            kernel[lock.modules],
            "libcuda1",
            "libnvidia-ml1",
            "nvidia-modprobe",
            "nvidia-smi",
        ),
        persistence="nvidia-persistenced",
        others=(*(name for key, name in kernel.items() if key != lock.modules), *fabric, _PINS),
        kept=own,
    )


# Parts of Ubuntu's packaging that a compute node gets, and parts that others may have installed. In
# packages of a branch, the branch follows the name ("libnvidia-compute-580").
_UBUNTU = ("libnvidia-compute", "libnvidia-cfg1", "libnvidia-gpucomp", "nvidia-kernel-common",
           "nvidia-firmware")  # fmt: skip
_UBUNTU_BRANCHED = (*_UBUNTU, "nvidia-compute-utils", "nvidia-utils")
_UBUNTU_DISPLAY = ("libnvidia-common", "libnvidia-decode", "libnvidia-encode", "libnvidia-extra",
                   "libnvidia-fbc1", "libnvidia-gl", "xserver-xorg-video-nvidia")  # fmt: skip
# Packages that Ubuntu builds. Each has modules for one kernel, signed by Canonical. Their version
# matches the libraries in Ubuntu's archive, but not NVIDIA's libraries.
_UBUNTU_PREBUILT = ("linux-modules-nvidia-*", "linux-objects-nvidia-*", "linux-signatures-nvidia-*")


def _of_a_branch(*names: str) -> tuple[str, ...]:
    """Return patterns for package names that are followed by a branch, and possibly by a kind."""
    return tuple(f"{name}-???{rest}" for name in names for rest in ("", "-*"))


def _ubuntu(lock: GpuLock) -> PackageNames:
    branched = int(lock.branch) < UNBRANCHED_SINCE
    return _ubuntu_branched(lock) if branched else _ubuntu_unbranched(lock)


def _ubuntu_branched(lock: GpuLock) -> PackageNames:
    branch, suffix = lock.branch, {"open": "-open", "proprietary": ""}[lock.modules]
    # In older branches, the firmware's package has the version in its name, and there is no
    # libnvidia-gpucomp. Such packages are installed as dependencies. The persistence daemon of
    # these branches is one of the compute utilities.
    old = int(branch) < FABRIC_UNBRANCHED_SINCE
    left_out = {"libnvidia-gpucomp", "nvidia-firmware"} if old else set()
    modules = tuple(f"{name}-{branch}{suffix}" for name in ("nvidia-dkms", "nvidia-kernel-source"))
    fabric, own = _fabric_of_others(lock)
    later = ("nvidia-open", "nvidia-dkms-open", "nvidia-kernel-source-open", "nvidia-driver-open")
    plain = ("nvidia-dkms", "nvidia-kernel-source", "nvidia-driver", "nvidia-headless")
    return PackageNames(
        f"Ubuntu, with the branch in the names ({branch})",
        parts=(
            *(f"{name}-{branch}" for name in _UBUNTU_BRANCHED if name not in left_out),
            *(*modules, "nvidia-modprobe"),
        ),
        persistence=f"nvidia-compute-utils-{branch}" if old else "nvidia-persistenced",
        others=(
            *(f"{name}-*" for name in (*_UBUNTU_BRANCHED, *_UBUNTU_DISPLAY, *plain)),
            *(*_UBUNTU, *_UBUNTU_DISPLAY, *later, *plain, "cuda-drivers", "cuda-drivers-*"),
            *(*_UBUNTU_PREBUILT, *fabric, _PINS),
        ),
        kept=(
            *(f"{name}-{branch}" for name in (*_UBUNTU_BRANCHED, *_UBUNTU_DISPLAY)),
            *(*modules, *own, f"nvidia-firmware-{branch}-*", "nvidia-driver-assistant"),
            *(f"{name}-{branch}{suffix}" for name in ("nvidia-driver", "nvidia-headless")),
        ),
    )


def _ubuntu_unbranched(lock: GpuLock) -> PackageNames:
    suffix = {"open": "-open", "proprietary": ""}[lock.modules]
    modules = tuple(f"{name}{suffix}" for name in ("nvidia-dkms", "nvidia-kernel-source"))
    other = {"open": "", "proprietary": "-open"}[lock.modules]
    plain = ("nvidia-dkms", "nvidia-kernel-source", "nvidia-driver", "nvidia-headless")
    fabric, own = _fabric_of_others(lock)
    return PackageNames(
        "Ubuntu, without the branch in the names",
        parts=(*_UBUNTU, *modules, "nvidia-modprobe"),
        persistence="nvidia-persistenced",
        others=(
            *_of_a_branch(*_UBUNTU_BRANCHED, *_UBUNTU_DISPLAY, *plain),
            *_of_a_branch("cuda-drivers", "nvidia-open"),
            *(f"{name}{other}" for name in ("nvidia-dkms", "nvidia-kernel-source")),
            *(*_UBUNTU_PREBUILT, *fabric, _PINS),
        ),
        kept=own,
    )


def _red_hat(lock: GpuLock) -> PackageNames:
    kernel = {"open": "kmod-nvidia-open-dkms", "proprietary": "kmod-nvidia-latest-dkms"}
    return PackageNames(
        "Red Hat",
        parts=(
            "nvidia-driver-cuda",
            "nvidia-driver-cuda-libs",
            kernel[lock.modules],
            "nvidia-kmod-common",
            "libnvidia-ml",
            "libnvidia-cfg",
            "libnvidia-gpucomp",
            "nvidia-modprobe",
        ),
        persistence="nvidia-persistenced",
        others=(
            *(name for key, name in kernel.items() if key != lock.modules),
            # Packages with modules that were built for one kernel.
            *("kmod-nvidia-open-prebuilt", "kmod-nvidia-???.*", "kmod-nvidia-branch-*"),
            *_of_a_branch("libnvidia-nscq", "nvidia-imex"),
            *(("nvidia-fabric-manager",) if int(lock.branch) >= FABRIC_UNBRANCHED_SINCE else ()),
        ),
        kept=(f"libnvidia-nscq-{lock.branch}", f"nvidia-imex-{lock.branch}"),
    )


def _red_hat_9(lock: GpuLock) -> PackageNames:
    """
    Return the names for Red Hat 9, where each branch is a stream of a dnf module.

    The module hides the packages of other branches.
    """
    found = _red_hat(lock)
    kind = {"open": "open", "proprietary": "dkms"}[lock.modules]
    return PackageNames(
        "Red Hat 9",
        found.parts,
        found.persistence,
        found.others,
        found.kept,
        stream=f"{lock.branch}-{kind}",
    )


_PACKAGINGS: Mapping[tuple[str, str], Callable[[GpuLock], PackageNames]] = {
    ("debian", "12"): _debian,
    ("debian", "13"): _debian,
    ("ubuntu", "22.04"): _ubuntu,
    ("ubuntu", "24.04"): _ubuntu,
    ("ubuntu", "26.04"): _ubuntu,
    ("rhel", "9"): _red_hat_9,
    ("rocky", "9"): _red_hat_9,
    ("almalinux", "9"): _red_hat_9,
    ("rhel", "10"): _red_hat,
    ("rocky", "10"): _red_hat,
    ("almalinux", "10"): _red_hat,
}
