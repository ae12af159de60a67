"""Refuse locks that cannot work. Pure.

Locks are checked before any node is probed, and again with the facts of each node. With a lock that
is refused, a node would have no driver, or no driver that is suitable for vLLM. For a remark on a
lock that works, `refused` is False.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gpufleet.catalog.driver_branches import (
    BRANCHES,
    LAST_BEFORE_TURING,
    OLDEST_DRIVER,
    branch,
    version_numbers,
)
from gpufleet.gpu_software import repository
from gpufleet.node.machine import Machine, System, generation
from gpufleet.settings.gpu_lock import GpuLock, Objection, lock_objections

if TYPE_CHECKING:  # settings, which a release is made of, asks this module
    from gpufleet.artifacts.release import Wheels

OWN_PYTHON = "/usr/bin/python3"
"""The distribution's Python interpreter. The probe runs in it."""

_BEFORE_TURING = frozenset({"maxwell", "pascal", "volta"})
# {generation: the first branch that runs its boards}. From CUDA's release notes: the first release
# that compiles for the boards, and the branch that was released with it.
_FIRST_BRANCH = {"blackwell": 570}
# B300 and GB300 (by their PCI device ids) need a later branch, because they came with CUDA 12.9.
_BLACKWELL_ULTRA, _FIRST_OF_ULTRA = range(0x3180, 0x3200), 575


def objections(
    lock: GpuLock,
    system: System,
    machine: Machine,
    wheels: Wheels | None,
    today: dt.date,
) -> tuple[Objection, ...]:
    """
    Return all objections to the lock of one node.

    `wheels` has the wheels of the node's release, or None if it has none.
    """
    return (
        *lock_objections(lock),
        *(release_objections(lock, wheels) if wheels else ()),
        *calendar_objections(lock, today),
        *system_objections(lock, system),
        *machine_objections(lock, machine, wheels),
    )


def refusals(
    lock: GpuLock,
    system: System,
    machine: Machine,
    wheels: Wheels | None,
    today: dt.date,
) -> list[Objection]:
    """Return only the objections that stop a run."""
    return [each for each in objections(lock, system, machine, wheels, today) if each.refused]


def release_objections(lock: GpuLock, wheels: Wheels) -> Iterator[Objection]:
    """Yield the reasons why vLLM's wheels do not run with the locked driver."""
    if wheels.cuda is None:
        return
    major, minor = wheels.cuda
    oldest = OLDEST_DRIVER.get(major)
    if oldest is None:
        yield Objection(
            ("gpu_lock", "driver"),
            f"{wheels.source} contains CUDA {major}.{minor}, but gpufleet does not know which "
            "driver this CUDA version needs: look it up in NVIDIA's CUDA compatibility guide",
            refused=False,
        )
    elif not _reaches(lock, oldest):
        yield Objection(
            ("gpu_lock", "driver"),
            f"is {lock.driver}, but {wheels.source} contains CUDA {major}.{minor}, which needs "
            f"driver {oldest} or newer: lock a newer driver, or a vLLM built for an older CUDA",
        )


def calendar_objections(lock: GpuLock, today: dt.date) -> Iterator[Objection]:
    """Yield remarks about the end of a branch's support. They do not stop a run."""
    at = ("gpu_lock", "driver")
    known = branch(lock.branch)
    if known is None:
        yield Objection(
            at,
            f"R{lock.branch} is an unknown branch, so its requirements are not checked",
            refused=False,
        )
    elif known.end_of_life and known.end_of_life < today:
        yield Objection(
            at,
            f"R{lock.branch} ({known.designation}) has had no security updates since "
            f"{known.end_of_life:%B %Y}: plan for {_supported(today)}",
            refused=False,
        )


def system_objections(lock: GpuLock, system: System) -> Iterator[Objection]:
    """
    Yield the parts of a lock that NVIDIA does not publish for a system.

    Raises `FleetError` if NVIDIA has no packages for the system.
    """
    if lock.dcgm is None:
        return
    there = repository.vendor_repository(system).dcgm
    if there is False:
        yield Objection(
            ("gpu_lock", "dcgm"),
            f"NVIDIA publishes no DCGM for {system}: remove this key and `dcgm` for these nodes",
        )
    elif there is None:
        yield Objection(
            ("gpu_lock", "dcgm"),
            f"it is unknown whether NVIDIA publishes DCGM for {system}",
            refused=False,
        )


def python_objections(lock: GpuLock, interpreter: str, python: str) -> Iterator[Objection]:
    """
    Yield an objection if the node's Python differs from the locked one.

    `interpreter` is `vllm.python`. `python` is the version of the node's own interpreter, for
    example "3.12.3". The version of any other interpreter is in its path, or it is unknown.
    """
    own = ".".join(python.split(".")[:2])
    if lock.vllm and interpreter == OWN_PYTHON and own != lock.vllm.python:
        yield Objection(
            ("gpu_lock", "vllm", "python"),
            f"is {lock.vllm.python}, but the node's {OWN_PYTHON} is {own}: set `vllm.python` to "
            f"{OWN_PYTHON.removesuffix('3')}{lock.vllm.python}, or lock {own}",
        )


def machine_objections(
    lock: GpuLock, machine: Machine, wheels: Wheels | None = None
) -> Iterator[Objection]:
    """Yield the parts of a lock that do not run on a node's GPUs."""
    old = sorted(machine.generations & _BEFORE_TURING)
    if old:
        yield from _before_turing(lock, ", ".join(name.capitalize() for name in old), wheels)
    blackwell = "blackwell" in machine.generations
    if lock.modules == "proprietary" and (machine.grace or blackwell):
        yield Objection(
            ("gpu_lock", "modules"),
            f"is proprietary, but {'Blackwell' if blackwell else 'Grace Hopper'} needs the open "
            "modules: write `open`",
        )
    first = max((_first_branch(device) for device in machine.gpus), default=0)
    if int(lock.branch) < first:
        yield Objection(
            ("gpu_lock", "driver"),
            f"is {lock.driver}, but the node's GPUs ({_ids(machine.gpus)}) need R{first} or newer",
        )
    unknown = tuple(device for device in machine.gpus if generation(device) is None)
    if unknown:
        yield Objection(
            ("gpu_lock", "driver"),
            f"is {lock.driver}, but it is unknown whether this driver supports {_ids(unknown)}: "
            "check the driver's list of supported GPUs",
            refused=False,
        )


def _before_turing(lock: GpuLock, names: str, wheels: Wheels | None) -> Iterator[Objection]:
    """Yield the parts of a lock that do not run on GPUs older than Turing."""
    if lock.modules == "open":
        yield Objection(
            ("gpu_lock", "modules"),
            f"is open, but the open modules need Turing or newer, and the node has {names}: write "
            f"`proprietary`, and lock R{LAST_BEFORE_TURING} or older",
        )
    if int(lock.branch) > LAST_BEFORE_TURING:
        yield Objection(
            ("gpu_lock", "driver"),
            f"is {lock.driver}, but R{LAST_BEFORE_TURING} is the last branch that supports "
            f"{names}: lock R{LAST_BEFORE_TURING}",
        )
    if wheels and wheels.cuda and wheels.cuda >= (13, 0):
        yield Objection(
            ("gpu_lock", "vllm"),
            f"{wheels.source} contains CUDA {wheels.cuda[0]}, whose kernels need Turing or newer, "
            f"but the node has {names}: lock a vLLM built for CUDA 12",
        )


def _first_branch(device: int) -> int:
    if device in _BLACKWELL_ULTRA:
        return _FIRST_OF_ULTRA
    return _FIRST_BRANCH.get(generation(device) or "", 0)


def _ids(devices: Iterable[int]) -> str:
    return ", ".join(f"10de:{device:04x}" for device in sorted(set(devices)))


def _supported(today: dt.date) -> str:
    """
    Return the branches that have security updates on a day. The branch with the longest support is
    first.

    >>> _supported(dt.date(2026, 11, 22))
    'R580 (until June 2028) or R595 (until March 2027)'
    """
    ends = {each.name: each.end_of_life for each in BRANCHES.values() if each.end_of_life}
    living = sorted(((end, name) for name, end in ends.items() if end >= today), reverse=True)
    return " or ".join(f"R{name} (until {end:%B %Y})" for end, name in living) or "a newer one"


def _reaches(lock: GpuLock, oldest: str) -> bool:
    """
    Return whether the locked driver is `oldest` or newer. A branch counts as its newest version.
    """
    if lock.exact:
        return version_numbers(lock.exact) >= version_numbers(oldest)
    return int(lock.branch) >= version_numbers(oldest)[0]
