"""Choose the packages of a node's driver by its system, its lock and the machine. Pure.

The packages are only for computing, without display server and OpenGL. Their names are in
`gpu_software/package_names.py`. All packages that have the driver's version are declared by name
and held, so that the package manager's resolver has no choice. Their dependencies get the same
version. Packages of a different branch, flavour or packaging are removed in the same transaction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpufleet.catalog.driver_branches import cuda_major
from gpufleet.converge.desired import Lockstep, ModuleStream, NoPackage, Package, Value
from gpufleet.errors import FleetError
from gpufleet.gpu_software.package_names import PackageNames, fabric_name, package_names
from gpufleet.gpu_software.repository import vendor_repository
from gpufleet.node.machine import Machine, System
from gpufleet.settings.gpu_lock import GpuLock

# GPU generations for which DCGM's package for CUDA 13 has no kernels (NVIDIA/DCGM, issue 254).
_WITHOUT_CUDA_13 = frozenset({"maxwell", "pascal", "volta"})


@dataclass(frozen=True)
class DriverPackages:
    """The packages of the driver as desired values, and a sentence for each decision (`why`)."""

    wanted: tuple[Value, ...]
    why: tuple[str, ...]


def driver_packages(system: System, lock: GpuLock, machine: Machine) -> DriverPackages:
    """
    Return the packages of the locked driver, and the packages that conflict with it.

    Raises `FleetError` if the system is not in the table of docs/gpu-nodes/supported-systems.md.
    """
    found = package_names(system, lock)
    version = f"{lock.exact}-*" if lock.exact else f"{lock.branch}.*"
    fabric = list(_fabric(system, lock, machine))
    daemon = (found.persistence,) if lock.persistence else ()
    parts = tuple(dict.fromkeys((*found.parts, *daemon, *(name for name, _ in fabric))))
    values: list[Value] = [Package(name, version, hold=True) for name in parts]
    values += [Lockstep(parts), *(NoPackage(pattern, found.kept) for pattern in found.others)]
    values += [ModuleStream("nvidia-driver", found.stream)] if found.stream else []
    values += _kernels(system, lock, machine)
    if machine.nvlink5:
        values += [Package("nvlsm", lock.nvlsm, hold=True), Package("infiniband-diags")]
    return DriverPackages(
        tuple(dict.fromkeys(values)), tuple(_reasons(system, lock, machine, found, fabric))
    )


def _fabric(system: System, lock: GpuLock, machine: Machine) -> Iterator[tuple[str, str]]:
    """
    Yield the packages of the machine's fabric that must have the driver's version, with reasons.
    """
    if machine.nvswitch:
        yield fabric_name("nvidia-fabricmanager", system, lock), "the node has NVSwitches"
        yield fabric_name("libnvidia-nscq", system, lock), "DCGM needs it for NVSwitches"
    if machine.nvlink5 and system.arch == "x86_64":  # NVIDIA has no libnvsdm for Arm
        yield "libnvsdm", "DCGM needs it for NVLink 5 switches"
    if machine.imex:
        reason = "the node's GPUs share memory with other nodes of the rack"
        yield fabric_name("nvidia-imex", system, lock), reason


def _kernels(system: System, lock: GpuLock, machine: Machine) -> Iterator[Package]:
    """
    Yield the packages that are needed to build modules.

    If kernels are held, also yield the packages of the installed kernels.
    """
    held = {name: Package(name, hold=True) for name in machine.kernel_packages}
    if lock.kernel == "follow":
        held = {}
    yield Package("dkms")
    for name in kernel_headers(system, machine):
        yield held.pop(name, Package(name))
    yield from held.values()


def kernel_headers(system: System, machine: Machine) -> tuple[str, ...]:
    """
    Return the packages of headers that DKMS needs, one for each installed kernel.

    On Debian and Ubuntu, if the metapackage of a kernel's flavour is installed, the metapackage of
    its headers is added. Otherwise, a kernel that an upgrade installs would get no module.
    """
    if system.is_red_hat:
        # Several versions of one package may be installed, so its version is part of the name.
        releases = (kernel.release.removesuffix(f".{system.arch}") for kernel in machine.kernels)
        return tuple(f"kernel-devel-{release}" for release in releases)
    flavours = (re.fullmatch(r"linux-image-(?!unsigned-)([a-z].*)", name)
                for name in machine.kernel_packages)  # fmt: skip
    return (
        *(f"linux-headers-{kernel.release}" for kernel in machine.kernels),
        *(f"linux-headers-{found[1]}" for found in flavours if found),
    )


def _reasons(
    system: System,
    lock: GpuLock,
    machine: Machine,
    found: PackageNames,
    fabric: list[tuple[str, str]],
) -> Iterator[str]:
    which = lock.exact or f"any version of R{lock.branch}"
    yield f"driver {which} with {lock.modules} modules, as packaged for {found.packaging}"
    yield from (f"{name}: {reason}" for name, reason in fabric)
    if not machine.nvswitch:
        yield "no fabric manager: it would fail, because the node has no NVSwitches to manage"
    if machine.nvlink5:
        yield "nvlsm, infiniband-diags: the fabric manager needs them for NVLink 5 switches"
    if system.is_red_hat:
        yield "dkms is a package of EPEL, so EPEL must be one of the node's repositories"
    if lock.kernel == "held":
        yield f"kernels held: {', '.join(machine.kernel_packages) or 'none is installed'}"


def dcgm_packages(system: System, lock: GpuLock, machine: Machine) -> DriverPackages:
    """
    Return DCGM's packages, which all have the same version. If the lock has no DCGM, return none.

    Raises `FleetError` if NVIDIA publishes no DCGM for the system, or if the driver's CUDA version
    is unknown.
    """
    if lock.dcgm is None:
        return DriverPackages((), ("no DCGM: gpu_lock.dcgm is not set",))
    if vendor_repository(system).dcgm is False:
        raise FleetError(
            f"NVIDIA publishes no DCGM for {system}: remove `gpu_lock.dcgm`, or use a supported "
            "system (docs/gpu-nodes/supported-systems.md)"
        )
    newest = cuda_major(lock.branch)
    if newest is None:
        raise FleetError(
            f"gpu_lock.driver is {lock.driver}, but the CUDA version of R{lock.branch} is "
            "unknown, so gpufleet cannot choose a package of DCGM: lock a known branch, or remove "
            "`gpu_lock.dcgm`"
        )
    majors = {newest, 12} if machine.generations & _WITHOUT_CUDA_13 else {newest}
    packages = (
        "datacenter-gpu-manager-4-core",
        *(f"datacenter-gpu-manager-4-cuda{major}" for major in sorted(majors)),
    )
    values: list[Value] = [Package(name, lock.dcgm.version, hold=True) for name in packages]
    values += [
        Lockstep(packages),
        NoPackage("datacenter-gpu-manager-4-cuda*", packages),
        NoPackage("datacenter-gpu-manager"),  # DCGM 3
    ]
    if lock.dcgm.exporter:
        values.append(Package("datacenter-gpu-manager-exporter", lock.dcgm.exporter, hold=True))
    cuda = " and ".join(map(str, sorted(majors)))
    return DriverPackages(tuple(values), (f"DCGM for CUDA {cuda}, the version of R{lock.branch}",))
