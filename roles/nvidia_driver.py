"""Install NVIDIA's driver: packages, module settings, and a module for every kernel."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState
from gpufleet.gpu_software.driver_configuration import INITRAMFS, desired_driver, driver_files
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.operations.activate_driver import mark_unchecked, settle_driver_packages
from gpufleet.operations.build_kernel_modules import (
    INITRAMFS_SECONDS,
    build_kernel_modules,
    rebuild_initramfs,
)
from gpufleet.operations.converge import Converge
from roles.driver_activation import guard_unchecked_node


@deploy("NVIDIA's driver")
def nvidia_driver(node: BareNode) -> None:
    """
    Converge the driver on disk, which `driver_activation` loads afterwards.

    The node is marked before its packages change, so that no stage starts on an unchecked driver.
    The modules' settings are written first, because the packages put them into the initramfs.
    """
    settings = Converge(DesiredState(*driver_files(node)), watch=(INITRAMFS,))
    settings.files(name="settings of its modules")
    if node.machine.has_nouveau:
        rebuild_initramfs(settings, name="initramfs without nouveau", _timeout=INITRAMFS_SECONDS)
    guard_unchecked_node()
    packages = Converge(desired_driver(node))
    mark_unchecked(
        packages, "its driver's packages were changed", name="mark the node as unchecked"
    )
    packages.packages(name="packages", _ignore_errors=True)
    settle_driver_packages(packages, node, name="verify the packages")
    build_kernel_modules(node.lock.driver, name="build a module for every kernel")
