"""Build the desired state of NVIDIA's driver: packages and module settings. Pure."""

from __future__ import annotations

from gpufleet import node_paths
from gpufleet.converge.desired import Absent, DesiredState, File, Value
from gpufleet.gpu_software.driver_packages import driver_packages
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.gpu_software.repository import package_source

MODPROBE = "/etc/modprobe.d/gpufleet-nvidia.conf"

LOADED_AT_BOOT = "/etc/modules-load.d/gpufleet-nvidia.conf"

UNATTENDED = "/etc/apt/apt.conf.d/52gpufleet-unattended-upgrades"

# The modprobe settings with which every initramfs was built. nouveau is loaded from an initramfs.
INITRAMFS = node_paths.INITRAMFS


def desired_driver(node: BareNode) -> DesiredState:
    """Return the driver's packages and their source."""
    packages = driver_packages(node.system, node.lock, node.machine)
    return DesiredState(package_source(node.repository), *packages.wanted)


def driver_files(node: BareNode) -> tuple[Value, ...]:
    """Return the configuration files for the driver's modules and for unattended upgrades."""
    modprobe = (
        "# Written by gpufleet: gpu.module_options in group_vars.\n"
        "# The kernel's own driver; NVIDIA's cannot have a GPU beside it.\n"
        "blacklist nouveau\noptions nouveau modeset=0\n"
    )
    options = dict(node.settings.gpu.module_options)
    if node.machine.imex:
        options.setdefault("NVreg_CreateImexChannel0", "1")
    if options:
        words = " ".join(f"{name}={value}" for name, value in sorted(options.items()))
        modprobe += f"options nvidia {words}\n"
    # CUDA would load nvidia-uvm with a setuid program, which gpufleet's units forbid.
    loaded = "# Written by gpufleet.\nnvidia\nnvidia-uvm\n"
    return (
        File(MODPROBE, modprobe.encode()),
        File(LOADED_AT_BOOT, loaded.encode()),
        # dnf-automatic obeys the version locks that hold the packages.
        Absent(UNATTENDED)
        if node.system.is_red_hat
        else File(UNATTENDED, unattended_upgrades_file(node).encode()),
    )


def unattended_upgrades_file(node: BareNode) -> str:
    """
    Return the blacklist of unattended-upgrades. It is needed in addition to apt's holds.

    An upgrade by hand may remove a hold, but it does not remove this file.
    """
    patterns = ["nvidia-", "libnv", "libcuda1", "nvlsm", "datacenter-gpu-manager", "cuda-"]
    if node.lock.kernel == "held":
        patterns.append("linux-(image|headers|modules|generic)")
    rows = "".join(f'    "^{pattern}";\n' for pattern in patterns)
    return (
        "// Written by gpufleet: only deploys/node.py upgrades these.\n"
        f"Unattended-Upgrade::Package-Blacklist {{\n{rows}}};\n"
    )
