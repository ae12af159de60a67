"""Check every node's lock against its release, the date, and the node's hardware.

Border: the module reads the vLLM locks whose paths are in the settings.
`gpu_software/lock_rules.py` finds the problems of a lock, and this module adds their key and file.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpufleet.artifacts import release
from gpufleet.artifacts.release import Wheels
from gpufleet.gpu_software import lock_rules
from gpufleet.node.machine import Machine, System
from gpufleet.settings import gpu_lock
from gpufleet.settings.gpu_lock import Objection
from gpufleet.settings.node_settings import NodeSettings

if TYPE_CHECKING:
    from gpufleet.settings.node_variables import NodeVars


@dataclass(frozen=True)
class LockProblems:
    """The problems that stop a run, and remarks. Both are sentences with file and line."""

    problems: tuple[str, ...]
    remarks: tuple[str, ...]


def check_locks(nodes: Mapping[str, NodeVars], today: dt.date) -> LockProblems:
    """
    Check the locks of all nodes.

    If several nodes inherit a problem from one place, the problem is reported once.
    """
    wheels = cache(_wheels)  # many nodes have the same release
    said: dict[str, bool] = {}
    for node in nodes.values():
        for each in _objections(node.settings, today, wheels):
            said[f"{_place(node, each)}: {each}"] = each.refused
    return LockProblems(
        tuple(sentence for sentence, refused in said.items() if refused),
        tuple(sentence for sentence, refused in said.items() if not refused),
    )


def check_node_lock(
    node: NodeVars, system: System, machine: Machine, python: str | None = None
) -> LockProblems:
    """
    Check one node's lock against the node's hardware and system, when these are known.

    `python` is the version of the node's own interpreter, or None if unknown.

    The checks of `check_locks` are not repeated. Parts that NVIDIA does not publish for the node's
    system are reported by `read_provisioning`, which chooses the packages.
    """
    lock = node.settings.gpu_lock
    if lock is None:
        return LockProblems((), ())
    vllm = node.settings.vllm
    engines = [each for each in node.settings.engines.values() if each.device == "cuda"]
    wheels = [_wheels(each.lock) for each in engines] or [None]
    objections = (
        *(each for each in lock_rules.system_objections(lock, system) if not each.refused),
        *dict.fromkeys(
            found for each in wheels for found in lock_rules.machine_objections(lock, machine, each)
        ),
        *(lock_rules.python_objections(lock, vllm.python, python) if vllm and python else ()),
    )
    said = [(f"{node.name} ({_place(node, each)}): {each}", each.refused) for each in objections]
    return LockProblems(
        tuple(sentence for sentence, refused in said if refused),
        tuple(sentence for sentence, refused in said if not refused),
    )


def _place(node: NodeVars, objection: Objection) -> str:
    """
    Return the file and line of the key to change.

    If the value is a default, return the place of the key above it.
    """
    at = node.origins.get(str(objection.at[0]))
    return str(at.place_of(*objection.at[1:])) if at else ".".join(map(str, objection.at))


def _objections(
    settings: NodeSettings, today: dt.date, wheels: Callable[[str], Wheels | None]
) -> Iterator[Objection]:
    lock = settings.gpu_lock
    if lock is None:
        return
    yield from (each for each in gpu_lock.lock_objections(lock) if not each.refused)
    for engine in settings.engines.values():
        if engine.device == "cuda" and (needed := wheels(engine.lock)):
            yield from lock_rules.release_objections(lock, needed)
    yield from lock_rules.calendar_objections(lock, today)


def _wheels(path: str) -> Wheels | None:
    """Return what a release's wheels require, or None if the release's lock cannot be read."""
    try:
        return release.wheels(Path(path).read_bytes(), path)
    except OSError:
        return None
