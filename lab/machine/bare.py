"""Simulate a machine that was delivered without NVIDIA's driver, and its loaded modules. Pure.

Such a machine has its GPUs on the PCI bus and Linux' own driver for them; everything of NVIDIA's is
installed on it later, and what it shows of a driver follows from which modules are loaded then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from lab.machine.parts import Kernel, Machine, Upgrades, with_nvml_lines
from lab.machine.profile import HOPPER

# What NVIDIA's modules are called in /proc/modules.
NVIDIA_MODULES = ("nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia_uvm")
NOUVEAU = "nouveau"

# Origins as unattended-upgrades names them; which of them a fresh Debian has is assumed.
_ORIGINS = (
    "origin=Debian,codename=bookworm,label=Debian",
    "origin=Debian,codename=bookworm-security,label=Debian-Security",
)

# Lines for the simulated NVML: it finds out itself which driver is loaded, and holds the GPUs'
# device while it is open.
LIVE = ("system.loaded = /sys/module/nvidia/version", "system.device = /dev/nvidiactl")
_NOT_LOADED = "error.nvmlInitWithFlags = 9"  # as the faults have it that keep a module out


@dataclass(frozen=True)
class Loaded:
    """The loaded GPU modules.

    Attributes:
        modules: their names in /proc/modules.
        version: the NVIDIA driver's, None while it is not loaded.
        flavour: which of its two kernel modules it is.
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
    # Assumed: nouveau takes no GPU from Hopper on, although it is loaded for them.
    takes = own == "nvidia" and machine.profile.architecture < HOPPER
    return NOUVEAU if takes and NOUVEAU in loaded.modules else None


def _unconfigured(machine: Machine) -> tuple[str, ...]:
    """Return lines for the state before daemons have configured it."""
    lines = ["gpu.*.persistence = 0"] if machine.profile.gpu(0, "persistence") else []
    if machine.profile.registers and machine.profile.managed:
        lines.append("gpu.*.fabric.state = 1")
    return tuple(lines)
