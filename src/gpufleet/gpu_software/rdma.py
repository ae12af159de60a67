"""Determine what a node needs for GPUDirect RDMA between GPUs and network adapters. Pure.

There are two methods. `dma_buf` uses the kernel's DMA-BUF: the driver's open modules export memory,
and the adapter's driver in the kernel imports it. `peermem` uses NVIDIA's module nvidia_peermem,
for programs that require this module. It needs a kernel interface that only the drivers of the
adapter's vendor have. gpufleet installs no driver for the adapter, because the distribution's
kernel has one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from gpufleet.converge.desired import Absent, DesiredState, File, Package
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.gpu_settings import Rdma

MODULES_AT_BOOT = "/etc/modules-load.d/gpufleet-rdma.conf"
ORDER = "/etc/modprobe.d/gpufleet-rdma.conf"
LIMITS = "/etc/security/limits.d/90-gpufleet-rdma.conf"
PEERMEM = "nvidia_peermem"
# Modules for user space: verbs, connection management, and management datagrams (ibstat).
USER_SPACE = ("ib_uverbs", "rdma_ucm", "ib_umad")
# RDMA can import dma-buf since Linux 5.12 (Documentation/driver-api/dma-buf.rst).
DMA_BUF_SINCE = (5, 12)
# rdma-core has the libraries and the udev rules. infiniband-diags has ibstat, for the operator.
PACKAGES = ("rdma-core", "infiniband-diags")


def desired_rdma(rdma: Rdma | None, distribution: str) -> DesiredState:
    """
    Return the packages and files that a node needs.

    Without `rdma`, the files of an earlier run are removed. `distribution` is the ID in os-release,
    for example "debian" or "rhel".
    """
    if rdma is None:
        return DesiredState(Absent(MODULES_AT_BOOT), Absent(ORDER), Absent(LIMITS))
    # On Debian, the library's parts for each adapter are in a package of their own. On Red Hat they
    # are in rdma-core.
    names = (*PACKAGES, "ibverbs-providers") if _has_apt(distribution) else PACKAGES
    order = (
        File(ORDER, f"{_WRITTEN}softdep {PEERMEM} pre: ib_core mlx5_ib\n".encode())
        if rdma.way == "peermem"
        else Absent(ORDER)
    )
    boot = _WRITTEN + "".join(f"{module}\n" for module in required_modules(rdma))
    return DesiredState(
        *(Package(name) for name in names),
        File(MODULES_AT_BOOT, boot.encode()),
        order,
        File(LIMITS, _LIMITS.encode()),
    )


def required_modules(rdma: Rdma) -> tuple[str, ...]:
    """Return the kernel modules that must be loaded."""
    return (*USER_SPACE, PEERMEM) if rdma.way == "peermem" else USER_SPACE


def missing_modules(rdma: Rdma, loaded: Collection[str]) -> tuple[str, ...]:
    """Return the required modules that are not in `loaded`, the listing of /sys/module."""
    return tuple(each for each in required_modules(rdma) if each not in loaded)


def refusals(rdma: Rdma | None, lock: GpuLock, kernel: str) -> Iterator[str]:
    """Yield a sentence for each reason why the declared method does not work on the node."""
    if rdma is None or rdma.way != "dma_buf":
        return
    if lock.modules == "proprietary":
        yield (
            "gpu.rdma.way is dma_buf, but gpu_lock.modules is proprietary, and proprietary modules "
            "do not export dma-buf: write `modules: open`, or `way: peermem`"
        )
    numbers = re.match(r"(\d+)\.(\d+)", kernel)
    if numbers and (int(numbers[1]), int(numbers[2])) < DMA_BUF_SINCE:
        yield (
            f"gpu.rdma.way is dma_buf, but the kernel is {kernel}, and adapters support dma-buf "
            "only since Linux 5.12: upgrade the kernel, or write `way: peermem`"
        )


def load_error(module: str, said: str) -> str:
    """Return a sentence that says why a module could not be loaded. `said` is modprobe's error."""
    if module == PEERMEM and "Invalid argument" in said:
        return (
            f"{PEERMEM} finds no kernel interface to register with. Only the adapter vendor's "
            "driver (DOCA or OFED) has this interface, and the distribution's driver does not: "
            "install the vendor's driver, or write `gpu.rdma.way: dma_buf`"
        )
    return f"kernel module {module} could not be loaded: {said}"


def _has_apt(distribution: str) -> bool:
    return distribution in {"debian", "ubuntu"}


_WRITTEN = "# Written by gpufleet; the next deploy overwrites what is changed here.\n"
_LIMITS = f"""\
{_WRITTEN}# Adapters pin the memory that they read. These limits are for logins (tests by hand);
# systemd's units do not use this file: they have their own LimitMEMLOCK=.
* soft memlock unlimited
* hard memlock unlimited
root soft memlock unlimited
root hard memlock unlimited
"""
