"""Define the faults of lab machines, and the checks that must report each fault. Pure.

    machine.of("h100x8", fault("nvlink-dead-link", gpu=3), fault("nouveau"))

A fault changes a Machine: it adds lines to the simulated NVML, and changes the contents of files
and the output of programs. A machine can have several faults, in any order. If two faults change
the same value, the later fault overrides the earlier one, like a later event on real hardware.

catalogue.py lists the faults, changes.py has their changes, and hardware.py decides which hardware
can have a fault.
"""

from __future__ import annotations

from collections.abc import Callable

from gpufleet.errors import FleetError
from lab.faults import catalogue
from lab.faults.fault import Fault
from lab.machine import Machine, Profile

FAULTS: dict[str, Fault] = {
    each.name: each
    for group in (
        catalogue.OF_GPUS,
        catalogue.OF_MEMORY,
        catalogue.OF_LINKS,
        catalogue.OF_STATE,
        catalogue.OF_DRIVER,
        catalogue.OF_FABRIC,
        catalogue.OF_LOG,
        catalogue.OF_HOST,
    )
    for each in group
}
"""All faults by name."""


def fault(name: str, gpu: int = 0) -> Callable[[Machine], Machine]:
    """Return a fault by name as a change of a machine. Raises `FleetError` if it is unknown."""
    found = find_fault(name)
    return lambda machine: found.on(machine, gpu)


def find_fault(name: str) -> Fault:
    """Return a fault by name. Raises `FleetError` with the known names."""
    if name not in FAULTS:
        raise FleetError(f"there is no fault {name!r}: choose one of {', '.join(FAULTS)}")
    return FAULTS[name]


def possible(profile: Profile) -> tuple[str, ...]:
    """Return the names of all faults that this hardware can have."""
    return tuple(name for name, each in FAULTS.items() if each.applies(profile))


__all__ = ["FAULTS", "Fault", "fault", "find_fault", "possible"]
