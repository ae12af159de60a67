"""List NVIDIA's driver branches: support periods, CUDA releases and kernel modules. Pure data.

If a branch is not in this table, it is reported as `unknown` and not refused, because NVIDIA
publishes branches more often than gpufleet is released. Unknown values are None, and no check uses
them.
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

    `end_of_life` is the last day of the month in NVIDIA's list. For a branch without a month, it is
    the date of the edition of the list that no longer has the branch. It is None if unknown. `cuda`
    is the CUDA release that came with the branch. This is the newest CUDA whose PTX the branch can
    compile. `flavours` are the kernel modules in the branch's packages.
    """

    name: str
    designation: Designation
    cuda: tuple[int, int]
    end_of_life: dt.date | None
    flavours: tuple[Flavour, ...] = ("open", "proprietary")


# Sources:
# - Designation and end of life: NVIDIA's "Supported Drivers and CUDA Toolkit Versions", in the
#   editions of 4 August 2025 (R570; branches that are not in it had ended by then) and of 2026
#   (R535 to R610). R590 is in neither edition.
# - CUDA: the driver in the runfile of each CUDA toolkit.
# - Flavours: the release notes of 615.71.09.
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

# {CUDA's major version: the oldest driver that runs wheels of all its minor versions}. See "minor
# version compatibility" in NVIDIA's CUDA compatibility guide.
OLDEST_DRIVER: Mapping[int, str] = {12: "525.60.13", 13: "580.65.06"}

# The last branch that runs GPUs older than Turing. Only its proprietary modules run them, because
# the open modules need Turing or newer (driver installation guide, "NVIDIA Kernel Modules").
LAST_BEFORE_TURING = 580

# {compute capability: the first CUDA release that compiles for it} (CUDA's release notes).
FIRST_CUDA: Mapping[tuple[int, int], tuple[int, int]] = {
    (10, 0): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}


def branch(name: str) -> Branch | None:
    """Return the entry of a branch, or None if the table does not have the branch."""
    return BRANCHES.get(name)


def flavours(name: str) -> tuple[Flavour, ...]:
    """
    Return the kernel modules in a branch's packages. An unknown branch is judged by its number.

    >>> flavours("620")
    ('open',)
    """
    if known := branch(name):
        return known.flavours
    return ("open",) if int(name) >= OPEN_ONLY_SINCE else ("open", "proprietary")


def cuda_major(name: str) -> int | None:
    """Return the CUDA major version that came with a branch, or None if it is unknown."""
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
