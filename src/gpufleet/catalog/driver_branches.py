"""NVIDIA's driver branches: support periods, CUDA releases and kernel modules.  Pure data.

A branch that is missing here is reported as `unknown` and not refused: NVIDIA publishes branches
more often than gpufleet releases. Unknown values are None, and no check uses them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Flavour = Literal["open", "proprietary"]
Designation = Literal["long term support", "production", "new feature"]


@dataclass(frozen=True)
class Branch:
    """
    One branch of the driver, for example "580".

    `end_of_life` is the last day of the month that NVIDIA names; for branches without a month it is
    the date of NVIDIA's edition that no longer lists them. None if unknown. `cuda` is the CUDA
    release that came with the branch, the newest whose PTX it compiles. `flavours` are the kernel
    modules in the branch's packages.
    """

    name: str
    designation: Designation
    cuda: tuple[int, int]
    end_of_life: dt.date | None
    flavours: tuple[Flavour, ...] = ("open", "proprietary")


# Designation and end of life: NVIDIA's "Supported Drivers and CUDA Toolkit Versions", its editions
# of 4 August 2025 (R570; those that it left out had ended by then) and of 2026 (R535 to R610). R590
# is in none of them. CUDA: the driver that each toolkit's runfile brought. Flavours: the release
# notes of 615.71.09.
_BRANCHES = (
    Branch("535", "long term support", (12, 2), dt.date(2026, 6, 30)),
    Branch("550", "production", (12, 4), dt.date(2025, 8, 4)),
    Branch("560", "new feature", (12, 6), dt.date(2025, 8, 4)),
    Branch("565", "new feature", (12, 7), dt.date(2025, 8, 4)),
    Branch("570", "production", (12, 8), dt.date(2026, 2, 28)),
    Branch("575", "new feature", (12, 9), dt.date(2025, 8, 4)),
    Branch("580", "long term support", (13, 0), dt.date(2028, 6, 30)),
    Branch("590", "new feature", (13, 1), None),
    Branch("595", "production", (13, 2), dt.date(2027, 3, 31)),
    Branch("610", "new feature", (13, 3), dt.date(2026, 8, 31)),
    Branch("615", "new feature", (13, 4), None, ("open",)),
)
BRANCHES: Mapping[str, Branch] = {each.name: each for each in _BRANCHES}

# The first branch whose packages have no proprietary modules (release notes of 615.71.09).
OPEN_ONLY_SINCE = 615

# CUDA's majors, and the oldest driver on which the wheels of any of their minors run: "minor
# version compatibility" in NVIDIA's CUDA compatibility guide.
OLDEST_DRIVER: Mapping[int, str] = {12: "525.60.13", 13: "580.65.06"}

# The last branch that runs GPUs older than Turing, with its proprietary modules alone: the open
# ones begin with Turing (driver installation guide, "NVIDIA Kernel Modules").
LAST_BEFORE_TURING = 580

# The first CUDA that compiles for a GPU generation, by compute capability (CUDA's release notes).
FIRST_CUDA: Mapping[tuple[int, int], tuple[int, int]] = {
    (10, 0): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}


def branch(name: str) -> Branch | None:
    """Return the table's entry of a branch, or None if it is missing."""
    return BRANCHES.get(name)


def flavours(name: str) -> tuple[Flavour, ...]:
    """
    Return the kernel modules in a branch's packages; an unknown branch is judged by its number.

    >>> flavours("620")
    ('open',)
    """
    if known := branch(name):
        return known.flavours
    return ("open",) if int(name) >= OPEN_ONLY_SINCE else ("open", "proprietary")


def cuda_major(name: str) -> int | None:
    """Return the CUDA major version that a branch runs, or None if unknown."""
    if known := branch(name):
        return known.cuda[0]
    newer = [each for each in _BRANCHES if int(each.name) < int(name)]
    return newer[-1].cuda[0] if newer and newer[-1] is not _BRANCHES[-1] else None


def version_numbers(version: str) -> tuple[int, ...]:
    """
    Return a driver's version or branch as numbers, for comparison.

    >>> version_numbers("580.95.05") < version_numbers("580.178.04")
    True
    """
    return tuple(int(part) for part in version.split("."))
