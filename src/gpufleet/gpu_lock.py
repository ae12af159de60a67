"""Which locks cannot work, and why: before a node is touched, and once a node is known.  Pure.

What is refused would leave a node without a driver, or vLLM without one that runs it. What works
and yet should be known is said without stopping anything (`refused` is False).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpufleet.driver_branches import (
    OLDEST_DRIVER,
    OPEN_ONLY_SINCE,
    branch,
    flavours,
    numbers,
    serves,
)
from gpufleet.gpu_settings import GpuLock
from gpufleet.locked import KeyPath

if TYPE_CHECKING:  # settings, which a release is made of, asks this module
    from gpufleet.release import Wheels


@dataclass(frozen=True)
class Objection:
    """What is wrong with a lock: the key to change, the sentence, and whether it stops the run."""

    at: KeyPath
    what: str
    refused: bool = True

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.at))}: {self.what}"


def in_itself(lock: GpuLock) -> Iterator[Objection]:
    """Yield what is wrong with a lock whatever the node, the release of vLLM and the day."""
    if lock.modules not in flavours(lock.branch):
        yield Objection(
            ("gpu_lock", "modules"),
            f"R{lock.branch} has no {lock.modules} kernel modules (none since R{OPEN_ONLY_SINCE}): "
            "write `open`, or stay on R580 for GPUs that the open modules do not run",
        )
    yield from _toolkit(lock)


def with_release(lock: GpuLock, wheels: Wheels) -> Iterator[Objection]:
    """Yield what keeps vLLM's wheels from running on the locked driver."""
    if wheels.cuda is None:
        return
    major, minor = wheels.cuda
    oldest = OLDEST_DRIVER.get(major)
    if oldest is None:
        yield Objection(
            ("gpu_lock", "driver"),
            f"{wheels.source} brings CUDA {major}.{minor}, and which driver runs that is not known "
            "here: look it up in NVIDIA's CUDA compatibility guide",
            refused=False,
        )
    elif not _reaches(lock, oldest):
        yield Objection(
            ("gpu_lock", "driver"),
            f"is {lock.driver}, and {wheels.source} brings CUDA {major}.{minor}, which runs on "
            f"{oldest} and newer: lock a newer driver, or a vLLM built for an older CUDA",
        )


def on_day(lock: GpuLock, today: dt.date) -> Iterator[Objection]:
    """Yield what the calendar says of a branch; nothing of it stops a run."""
    at = ("gpu_lock", "driver")
    known = branch(lock.branch)
    if known is None:
        yield Objection(
            at,
            f"R{lock.branch} is a branch that is not known here: what it needs and serves is not "
            "checked beforehand",
            refused=False,
        )
    elif known.end_of_life and known.end_of_life < today:
        yield Objection(
            at,
            f"R{lock.branch} ({known.designation}) has had no security updates since "
            f"{known.end_of_life:%B %Y}: plan for R580, which has them until June 2028",
            refused=False,
        )


def _toolkit(lock: GpuLock) -> Iterator[Objection]:
    """
    A toolkit's kernels run on any driver of its CUDA major; of a newer minor, only what is compiled
    to machine code ("minor version compatibility" in NVIDIA's CUDA compatibility guide).
    """
    if lock.toolkit.branch is None:
        return
    major, minor = (int(part) for part in lock.toolkit.branch.split("-"))
    at = ("gpu_lock", "toolkit", "branch")
    major_served, known = serves(lock.branch), branch(lock.branch)
    if major_served is not None and major > major_served:
        yield Objection(
            at,
            f"is {lock.toolkit.branch}, and driver R{lock.branch} runs CUDA {major_served}: what "
            f"it compiles would not start; lock a toolkit of CUDA {major_served}, or a newer "
            "driver",
        )
    elif known and (major, minor) > known.cuda:
        yield Objection(
            at,
            f"is {lock.toolkit.branch}, newer than driver R{lock.branch} (CUDA "
            f"{known.cuda[0]}.{known.cuda[1]}): kernels run as machine code, and not as PTX that "
            "the driver would have to compile",
            refused=False,
        )


def _reaches(lock: GpuLock, oldest: str) -> bool:
    """Whether the locked driver is as new as `oldest`; of a branch, its newest version is."""
    if lock.exact:
        return numbers(lock.exact) >= numbers(oldest)
    return int(lock.branch) >= numbers(oldest)[0]
