"""Define the driver's package names in NVIDIA's repositories, in a table per packaging. Pure.

There are four packagings: Debian's names; Ubuntu's with the branch in them (up to R580); Ubuntu's
without the branch (from R590); Red Hat's. Sources: NVIDIA's driver installation guide, chapters on
compute-only installations, version locking and "Ubuntu 590 and later packages"; package lists of
machines that run 580, 590, 595 and 615.
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
    One packaging's names for one lock.

    Attributes:
        packaging: in words, for a report.
        parts: packages of the driver's version that every node gets.
        persistence: the package of the persistence daemon.
        others: patterns of packages of another branch, flavour or packaging, which are removed.
        kept: patterns of packages that match `others` but may stay.
        stream: of the dnf module nvidia-driver; None: there is no such module.
    """

    packaging: str
    parts: tuple[str, ...]
    persistence: str
    others: tuple[str, ...]
    kept: tuple[str, ...] = ()
    stream: str | None = None


def package_names(system: System, lock: GpuLock) -> PackageNames:
    """Return the package names for a system. Raises `FleetError` for an unsupported system."""
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
    Return the package name of fabric manager, NSCQ or IMEX in a branch.

    >>> lock = GpuLock(driver="570.124.06")
    >>> fabric_name("nvidia-imex", System("ubuntu", "24.04", "x86_64"), lock)
    'nvidia-imex-570'
    """
    if int(lock.branch) >= FABRIC_UNBRANCHED_SINCE:
        return name
    if system.is_red_hat and name == "nvidia-fabricmanager":
        return "nvidia-fabric-manager"
    return f"{name}-{lock.branch}"


# NVIDIA's packages that pin a version would contradict gpufleet's holds.
_PINS = "nvidia-driver-pinning-*"
# Fabric parts of branches before 580 carry the branch; a later branch's have to replace them.
_BRANCHED_FABRIC = ("nvidia-fabricmanager-???", "libnvidia-nscq-???", "nvidia-imex-???")


def _fabric_of_others(lock: GpuLock) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the patterns of all branches' fabric packages, and the patterns of this branch's."""
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


# Parts of Ubuntu's packaging that a compute node gets, and those that others may have put there:
# of a branch the name goes on with it ("libnvidia-compute-580").
_UBUNTU = ("libnvidia-compute", "libnvidia-cfg1", "libnvidia-gpucomp", "nvidia-kernel-common",
           "nvidia-firmware")  # fmt: skip
_UBUNTU_BRANCHED = (*_UBUNTU, "nvidia-compute-utils", "nvidia-utils")
_UBUNTU_DISPLAY = ("libnvidia-common", "libnvidia-decode", "libnvidia-encode", "libnvidia-extra",
                   "libnvidia-fbc1", "libnvidia-gl", "xserver-xorg-video-nvidia")  # fmt: skip
# Packages that Ubuntu builds: modules signed by Canonical for one kernel each, in step with the
# archive's libraries, not with NVIDIA's.
_UBUNTU_PREBUILT = ("linux-modules-nvidia-*", "linux-objects-nvidia-*", "linux-signatures-nvidia-*")


def _of_a_branch(*names: str) -> tuple[str, ...]:
    """Return patterns of package names followed by a branch, and possibly a kind."""
    return tuple(f"{name}-???{rest}" for name in names for rest in ("", "-*"))


def _ubuntu(lock: GpuLock) -> PackageNames:
    branched = int(lock.branch) < UNBRANCHED_SINCE
    return _ubuntu_branched(lock) if branched else _ubuntu_unbranched(lock)


def _ubuntu_branched(lock: GpuLock) -> PackageNames:
    branch, suffix = lock.branch, {"open": "-open", "proprietary": ""}[lock.modules]
    # Older branches' firmware had the version in its name, and no libnvidia-gpucomp: what they
    # depend on follows. Their persistence daemon is one of the compute utilities.
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
            # Modules that were built for one kernel.
            *("kmod-nvidia-open-prebuilt", "kmod-nvidia-???.*", "kmod-nvidia-branch-*"),
            *_of_a_branch("libnvidia-nscq", "nvidia-imex"),
            *(("nvidia-fabric-manager",) if int(lock.branch) >= FABRIC_UNBRANCHED_SINCE else ()),
        ),
        kept=(f"libnvidia-nscq-{lock.branch}", f"nvidia-imex-{lock.branch}"),
    )


def _red_hat_9(lock: GpuLock) -> PackageNames:
    """
    Return Red Hat 9's names, where each branch is a stream of a dnf module.

    The module hides other branches' packages.
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
