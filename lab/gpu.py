"""Give a node its simulated GPUs: the library that stands in for NVIDIA's, and its profile."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from gpufleet.errors import FleetError
from lab import nvml
from lab.state import CACHE, write

# Where Debian's libnvidia-ml1 installs the real one, which is where loaders look.
_LIBRARY = Path(f"usr/lib/{platform.machine()}-linux-gnu/libnvidia-ml.so.1")


def check_profiles(wanted: dict[str, str]) -> None:
    """Refuse hardware that is not in lab/profiles/; `wanted` maps nodes to profiles."""
    known = ", ".join(nvml.profiles())
    wrong = [
        f"Node {node!r}: there is no hardware profile {profile!r} (there are: {known})."
        for node, profile in wanted.items()
        if profile not in nvml.profiles()
    ]
    if wrong:
        raise FleetError(*wrong)


def install(root: Path, profile: str) -> None:
    """Put the library and the profile into the node whose root is mounted at `root`."""
    built = nvml.build(CACHE / "nvml")
    target = root / _LIBRARY
    if not target.exists() or target.read_bytes() != built.read_bytes():
        # Renamed into place: a process that has the old one mapped keeps it whole.
        draft = target.with_name(f".{target.name}.new")
        shutil.copyfile(built, draft)
        draft.chmod(0o644)
        draft.rename(target)
    write(root / "etc/gpufleet-lab/nvml.conf", nvml.profile(profile).read_text())
