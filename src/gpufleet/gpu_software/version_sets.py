"""Provide sets of versions that NVIDIA released together, as templates for a lock. Pure data.

`data/version_sets.yml` has the sets, with a reason for each value that a lock's file repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.settings.gpu_lock import GpuLock

_DATA = Path(__file__).with_name("data") / "version_sets.yml"


@dataclass(frozen=True)
class ReleaseSet:
    """
    One set.

    Attributes:
        title: what it is for, in a few words.
        lock: its versions.
        why: the reason of a value, by its key.
    """

    name: str
    title: str
    lock: GpuLock
    why: Mapping[str, str]


def release_set(name: str) -> ReleaseSet:
    """Return the set with a name. Raises `FleetError` that lists the known names."""
    if found := release_sets().get(name):
        return found
    near = suggestion(name, list(release_sets()))
    known = "; ".join(f"{each.name}: {each.title}" for each in release_sets().values())
    raise FleetError(f"--set {name}: there is no such set{near} (known sets: {known})")


@cache
def release_sets() -> Mapping[str, ReleaseSet]:
    """Return all sets by name."""
    data: dict[str, Any] = yaml.safe_load(_DATA.read_text(encoding="utf-8"))
    return {
        name: ReleaseSet(
            name, each["title"], GpuLock.model_validate(each["lock"]), each.get("why", {})
        )
        for name, each in data.items()
    }
