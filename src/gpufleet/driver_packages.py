"""Which packages a node's driver consists of: by its system, the lock and the machine.  Pure.

Names are a table for each packaging, never derived from another's: Debian, Ubuntu up to R580
(branched: nvidia-utils-580), Ubuntu from R590 (un-branched), Red Hat's family. Everything is
compute-only: no display server, no OpenGL. Whatever has the driver's version is named with it, so
that no resolver's preference decides; what they depend on follows in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpufleet.bare_node import Machine, System
from gpufleet.driver_branches import serves
from gpufleet.errors import FleetError
from gpufleet.gpu_settings import GpuLock
from gpufleet.wanted import Lockstep, NoPackage, Package, Value

# Ubuntu's packages lost the branch in their names with this one ("Ubuntu 590 and later packages" in
# NVIDIA's driver installation guide).
UNBRANCHED_SINCE = 590
# Fabric manager, NSCQ and IMEX lost theirs with this one (the same guide, "Fabric Manager").
FABRIC_UNBRANCHED_SINCE = 580

_FLAVOURS = {"open", "proprietary"}


@dataclass(frozen=True)
class DriverPackages:
    """What a node's driver is made of: `wanted` values, and a sentence for each decision."""

    wanted: tuple[Value, ...]
    why: tuple[str, ...]


@dataclass(frozen=True)
class _Names:
    """
    One packaging's names.

    Attributes:
        parts: user-space and kernel packages of the driver's version.
        others: patterns of packages that another branch, flavour or packaging of the driver has.
        persistence: package of the persistence daemon.
    """

    parts: tuple[str, ...]
    others: tuple[str, ...]
    persistence: str


def driver_packages(system: System, lock: GpuLock, machine: Machine) -> DriverPackages:
    """
    Return the packages of the locked driver, and those that must not be beside it.

    Raises `FleetError` for a system that is not in the table of `docs/os-matrix.md`.
    """
    names = _packaging(system)(lock, machine)
    version = f"{lock.exact}-*" if lock.exact else f"{lock.branch}.*"
    parts, why = list(names.parts), []
    if lock.persistence:
        parts.append(names.persistence)
    for name, reason in _fabric(system, machine):
        parts.append(name)
        why.append(f"{name}: {reason}")
    parts = list(dict.fromkeys(parts))
    values: list[Value] = [Package(name, version, hold=True) for name in parts]
    values.append(Lockstep(tuple(parts)))
    values += [NoPackage(pattern, but=tuple(parts)) for pattern in names.others]
    values += list(_beside(lock, machine))
    return DriverPackages(tuple(values), (_headline(system, lock), *why))


def _packaging(system: System) -> Callable[[GpuLock, Machine], _Names]:
    if system.id == "debian" and system.major in {"12", "13"}:
        return _debian
    raise FleetError(
        f"{system} is not among the systems that NVIDIA's driver is installed on here "
        "(docs/os-matrix.md): use one of those, or take `gpu_lock` out and install it yourself"
    )


def _headline(system: System, lock: GpuLock) -> str:
    which = lock.exact or f"any version of R{lock.branch}"
    return f"driver {which}, {lock.modules} modules by DKMS, compute-only, as for {system.id}"


# --- Debian: NVIDIA's packages for it, which keep Debian's own names


def _debian(lock: GpuLock, machine: Machine) -> _Names:  # noqa: ARG001  # one signature for all
    kernel = {"open": "nvidia-kernel-open-dkms", "proprietary": "nvidia-kernel-dkms"}
    return _Names(
        parts=(
            "nvidia-driver-cuda",
            kernel[lock.modules],
            "libcuda1",
            "libnvidia-ml1",
            "nvidia-modprobe",
            "nvidia-smi",
        ),
        others=(
            *(kernel[flavour] for flavour in sorted(_FLAVOURS - {lock.modules})),
            # Pins of the vendor's, which would contradict ours.
            "nvidia-driver-pinning-*",
        ),
        persistence="nvidia-persistenced",
    )


# --- what only some machines have


def _fabric(system: System, machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield the packages, of the driver's version, that its fabric asks for, and why."""
    if machine.nvswitch:
        yield "nvidia-fabricmanager", "the node has NVSwitches"
        yield "libnvidia-nscq", "DCGM reads the NVSwitches by it"
    if machine.nvlink5 and system.arch == "x86_64":
        yield "libnvsdm", "DCGM reads NVLink 5 switches by it"
    if machine.imex:
        yield "nvidia-imex", "the node's GPUs share memory with others of their rack"


def _beside(lock: GpuLock, machine: Machine) -> Iterator[Value]:
    """Yield what has a version of its own: kernel headers, what builds modules, NVLSM."""
    yield Package("dkms")
    for kernel in machine.kernels:
        yield Package(f"linux-headers-{kernel.release}")
    if machine.nvlink5:
        yield Package("nvlsm", lock.nvlsm, hold=True)
        yield Package("infiniband-diags")


# --- DCGM


def dcgm_packages(lock: GpuLock) -> DriverPackages:
    """
    Return DCGM's packages, all of one version; none where the lock has no DCGM.

    Raises `FleetError` where NVIDIA publishes none, or the driver's CUDA is not known.
    """
    if lock.dcgm is None:
        return DriverPackages((), ("no DCGM: gpu_lock.dcgm is not set",))
    major = serves(lock.branch)
    if major is None:
        raise FleetError(
            f"gpu_lock.driver is {lock.driver}, and which CUDA R{lock.branch} serves is not known "
            "here, so neither is DCGM's package: take `gpu_lock.dcgm` out, or lock a branch that is"
        )
    names = ("datacenter-gpu-manager-4-core", f"datacenter-gpu-manager-4-cuda{major}")
    values: list[Value] = [Package(name, lock.dcgm.version, hold=True) for name in names]
    values += [
        Lockstep(names),
        NoPackage("datacenter-gpu-manager-4-cuda*", but=names),
        NoPackage("datacenter-gpu-manager"),
    ]
    if lock.dcgm.exporter:
        values.append(Package("datacenter-gpu-manager-exporter", lock.dcgm.exporter, hold=True))
    return DriverPackages(tuple(values), (f"DCGM for CUDA {major}, which R{lock.branch} serves",))
