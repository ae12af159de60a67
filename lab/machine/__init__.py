"""Simulate a machine around its simulated GPUs: files, programs, and system calls.

    machine = of("h100x8", fault("nouveau"))     # lab/faults.py has the faults
    write(machine, Path("/tmp/root"))            # a root that the probe can be pointed at
    answers(machine)                             # what cannot be a file: the probe's `answers`
    profile_text(machine)                        # what the simulated NVML reads

profile.py reads the hardware profile. healthy.py makes the healthy machine, and bare.py a machine
without a driver. pci.py makes the machine's bus. tree.py and programs.py convert the machine to
files and scripts. All functions except `write` are pure.
"""

from lab.machine.bare import Loaded, bare_machine
from lab.machine.healthy import boot_log, library, of
from lab.machine.parts import (
    Disk,
    Function,
    Kernel,
    Library,
    Machine,
    Net,
    Package,
    Process,
    Rdma,
    Unit,
    Upgrades,
)
from lab.machine.profile import Profile
from lab.machine.programs import programs
from lab.machine.tree import Entry, Folder, Link, answers, device_path, files, profile_text, write

__all__ = [
    "Disk",
    "Entry",
    "Folder",
    "Function",
    "Kernel",
    "Library",
    "Link",
    "Loaded",
    "Machine",
    "Net",
    "Package",
    "Process",
    "Profile",
    "Rdma",
    "Unit",
    "Upgrades",
    "answers",
    "bare_machine",
    "boot_log",
    "device_path",
    "files",
    "library",
    "of",
    "profile_text",
    "programs",
    "write",
]
