"""Define a fault: its name, its changes, and the checks that must find it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpufleet.errors import FleetError
from lab.faults.changes import Change, nothing
from lab.faults.hardware import Condition, everywhere
from lab.machine import Machine, Profile
from lab.machine.parts import with_nvml_lines

# Severities of checks, from bad to mild. With "", the check may report nothing on this hardware.
BLOCK, UNKNOWN, WARN, INFO = "block", "unknown", "warn", "info"

Severity = str | Callable[[Profile], str]


@dataclass(frozen=True)
class Fault:
    """
    One problem of a machine.

    `lines` override lines of the NVML profile, with {gpu} for the concerned GPU. `change` makes all
    other changes. `finds` maps each check that must find the fault to the mildest severity that
    this check may report. A `harmless` fault only looks like a fault, and no check may warn of it.
    """

    name: str
    says: str
    finds: Mapping[str, Severity] = field(default_factory=dict)
    applies: Condition = everywhere
    lines: str = ""
    change: Change = nothing
    harmless: bool = False

    def expected(self, profile: Profile) -> dict[str, str]:
        """
        Return the checks that must find the fault on this hardware, with their minimum severity.
        """
        found = {
            check: severity if isinstance(severity, str) else severity(profile)
            for check, severity in self.finds.items()
        }
        return {check: severity for check, severity in found.items() if severity}

    def on(self, machine: Machine, gpu: int = 0) -> Machine:
        """
        Return the machine with this fault, on GPU `gpu` if the fault concerns a single GPU.

        Raises `FleetError` if the hardware cannot have the fault, or has no such GPU.
        """
        profile = machine.profile
        if not self.applies(profile):
            raise FleetError(
                f"{profile.name} cannot have the fault {self.name!r} ({self.says}): "
                "run `gpufleet lab fault --list` for the hardware of each fault"
            )
        if not 0 <= gpu < profile.count:
            raise FleetError(
                f"{profile.name} has no GPU {gpu}: choose a GPU from 0 to {profile.count - 1}"
            )
        lines = self.lines.replace("{gpu}", str(gpu)).strip().splitlines()
        return self.change(with_nvml_lines(machine, *map(str.strip, lines)), gpu)

    def concerns_one_gpu(self, machine: Machine) -> bool:
        """Return whether the result depends on the chosen GPU."""
        last = machine.profile.count - 1
        return last > 0 and self.on(machine, 0) != self.on(machine, last)
