"""Simulate a machine that was delivered without NVIDIA's driver, and its loaded modules. Pure.

Such a machine has its GPUs on the PCI bus, and Linux' own driver for these GPUs. All software of
NVIDIA is installed later. The machine's entries of a driver then depend on the loaded modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from lab.machine.parts import Kernel, Machine, Upgrades, with_nvml_lines
from lab.machine.profile import HOPPER

# Names of NVIDIA's modules in /proc/modules.
NVIDIA_MODULES = ("nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia_uvm")
NOUVEAU = "nouveau"

# Origins in the form of unattended-upgrades. That a new Debian has these origins is an assumption.
_ORIGINS = (
    "origin=Debian,codename=bookworm,label=Debian",
    "origin=Debian,codename=bookworm-security,label=Debian-Security",
)

# With these lines, the simulated NVML itself detects the loaded driver, and keeps the GPUs' device
# open while it is in use.
LIVE = ("system.loaded = /sys/module/nvidia/version", "system.device = /dev/nvidiactl")
_NOT_LOADED = "error.nvmlInitWithFlags = 9"  # set by faults that prevent a module from loading


@dataclass(frozen=True)
class Loaded:
    """The loaded GPU modules.

    Attributes:
        modules: their names in /proc/modules.
        version: the version of the NVIDIA driver, or None while it is not loaded.
        flavour: which of the driver's two kernel modules is loaded.
    """

    modules: tuple[str, ...] = ()
    version: str | None = None
    flavour: Literal["open", "proprietary"] = "open"


def bare_machine(machine: Machine, loaded: Loaded = Loaded()) -> Machine:
    """
    Return a machine in its delivered state, with these modules loaded later.

    Its faults stay, except their statements about a driver, which follow from the loaded modules.
    """
    kept = tuple(name for name in machine.modules if name not in NVIDIA_MODULES)
    distributions = {
        name: package
        for name, package in machine.packages.items()
        if name.startswith("linux-") or name == "unattended-upgrades"
    }
    surroundings = tuple(
        (at, text) for at, text in machine.log if not re.match(r"nvidia|NVRM", text)
    )
    without = replace(
        machine,
        modules=tuple(sorted([*kept, *loaded.modules])),
        loaded=loaded.version,
        flavour=loaded.flavour,
        library=None,
        functions=tuple(
            replace(each, driver=_driver(machine, each.driver, loaded))
            for each in machine.functions
        ),
        kernels=tuple(Kernel(each.release, None) for each in machine.kernels),
        packages=distributions,
        units={name: unit for name, unit in machine.units.items() if "nvidia" not in name},
        upgrades=Upgrades(True, _ORIGINS, ()) if machine.upgrades else None,
        log=surroundings,
        nvml=tuple(line for line in machine.nvml if not line.startswith(_NOT_LOADED)),
    )
    return with_nvml_lines(without, *LIVE, *_unconfigured(machine))


def _driver(machine: Machine, own: str | None, loaded: Loaded) -> str | None:
    """Return the driver of a PCI function whose final driver is `own`."""
    if own not in {"nvidia", "nvidia-nvswitch"}:
        return own
    if loaded.version:
        return own
    # Assumption: nouveau drives no GPU of Hopper or later, although it is loaded for these GPUs.
    takes = own == "nvidia" and machine.profile.architecture < HOPPER
    return NOUVEAU if takes and NOUVEAU in loaded.modules else None


def _unconfigured(machine: Machine) -> tuple[str, ...]:
    """Return lines for the state before daemons have configured it."""
    lines = ["gpu.*.persistence = 0"] if machine.profile.gpu(0, "persistence") else []
    if machine.profile.registers and machine.profile.managed:
        lines.append("gpu.*.fabric.state = 1")
    return tuple(lines)
