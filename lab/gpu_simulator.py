"""Give a node simulated GPUs: a replacement of NVIDIA's library, and its profile."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable
from pathlib import Path

from gpufleet.errors import FleetError
from lab import nvml
from lab.state import CACHE, NO_GPUS, write
from lab.vendor.templates import program

# Debian's libnvidia-ml1 installs the real library here, and loaders look for it here.
_LIBRARY = Path(f"usr/lib/{platform.machine()}-linux-gnu/libnvidia-ml.so.1")
_PROFILE = Path("etc/gpufleet-lab/nvml.conf")
_SMI = Path("usr/bin/nvidia-smi")


def check_profiles(wanted: dict[str, str]) -> None:
    """Refuse unknown hardware profiles; `wanted` maps nodes to profiles."""
    known = ", ".join([*nvml.profiles(), NO_GPUS])
    wrong = [
        f"Node {node!r}: there is no hardware profile {profile!r} (known profiles: {known})."
        for node, profile in wanted.items()
        if profile not in (*nvml.profiles(), NO_GPUS)
    ]
    if wrong:
        raise FleetError(*wrong)


def describe(root: Path, profile: str) -> None:
    """Write the GPUs' profile for the library of the node at `root`, which may be running."""
    write(root / _PROFILE, profile)


def install(root: Path, version: str | None) -> None:
    """
    Install the library in the node with its root mounted at `root`.

    The library has the driver's file name, libnvidia-ml.so.570.124.06, and a link with the loader's
    name, as in NVIDIA's packages. `nvidia-smi` is installed too. With `version` None, both are
    removed.
    """
    built = nvml.build(CACHE / "nvml")
    folder, name = (root / _LIBRARY).parent, f"{_LIBRARY.stem}.{version}"
    for other in folder.glob(f"{_LIBRARY.stem}.*"):
        if other.name not in ((_LIBRARY.name, name) if version else ()):
            other.unlink()
    if version is None:
        (root / _SMI).unlink(missing_ok=True)
        return
    write(root / _SMI, str(program("nvidia_smi.py", VERSION=version).content), 0o755)
    target, draft = folder / name, folder / f".{name}.new"
    if not target.exists() or target.read_bytes() != built.read_bytes():
        # Replaced by a rename, so a process that has mapped the old file keeps it complete.
        shutil.copyfile(built, draft)
        draft.chmod(0o644)
        draft.rename(target)
    link = root / _LIBRARY
    if not link.is_symlink() or link.readlink() != Path(name):
        draft.unlink(missing_ok=True)
        draft.symlink_to(name)
        draft.rename(link)


def override(root: Path, lines: Iterable[str]) -> None:
    """
    Discard setters' changes of the keys in these profile lines, so that the lines apply.

    Later calls of setters override the lines again, like a repair.
    """
    state = root / f"{_PROFILE}.state"
    if not state.exists():
        return
    keys = {_key(line) for line in lines}
    old = state.read_text().splitlines(keepends=True)
    kept = [line for line in old if not any(_overlap(_key(line), key) for key in keys)]
    if kept != old:
        write(state, "".join(kept))


def _key(line: str) -> str:
    return line.partition("=")[0].strip()


def _overlap(one: str, other: str) -> bool:
    """Return whether two keys of a profile mean the same GPU: `gpu.3.mig` and `gpu.*.mig`."""
    first, second = one.split("."), other.split(".")
    return len(first) == len(second) and all(
        a == b or (place == 1 and "*" in (a, b))
        for place, (a, b) in enumerate(zip(first, second, strict=True))
    )
