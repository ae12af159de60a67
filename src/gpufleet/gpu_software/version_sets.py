"""Provide sets of versions that NVIDIA released together, as templates for locks. Pure data.

`data/version_sets.yml` has the sets. It has a reason for each value, which is copied to the lock's
file.
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
        title: the purpose of the set, in a few words.
        lock: the versions.
        why: {key: the reason for its value}.
    """

    name: str
    title: str
    lock: GpuLock
    why: Mapping[str, str]


def release_set(name: str) -> ReleaseSet:
    """
    Return the set with this name. Raises `FleetError` with the known names if there is no such set.
    """
    if found := release_sets().get(name):
        return found
    near = suggestion(name, list(release_sets()))
    known = "; ".join(f"{each.name}: {each.title}" for each in release_sets().values())
    raise FleetError(f"--set {name}: there is no such set{near} (known sets: {known})")


@cache
def release_sets() -> Mapping[str, ReleaseSet]:
    """Return {name: set} for all sets."""
    data: dict[str, Any] = yaml.safe_load(_DATA.read_text(encoding="utf-8"))
    return {
        name: ReleaseSet(
            name, each["title"], GpuLock.model_validate(each["lock"]), each.get("why", {})
        )
        for name, each in data.items()
    }
