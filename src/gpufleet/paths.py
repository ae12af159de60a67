"""Locate gpufleet's own files on this machine, write files atomically, and lock them."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from gpufleet.errors import FleetError

_INSTALLED = Path(__file__).with_name("_project")
PROJECT = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2]
"""
The folder with `deploys/`, `roles/`, `templates/`, `locks/` and `config.py`.

This is the checkout, or the checkout's copy in the wheel. The path does not depend on the working
directory.
"""


def add_project_to_path() -> None:
    """Make `roles` importable for deploys, also in an installed package."""
    if str(PROJECT) not in sys.path:
        sys.path.append(str(PROJECT))


def import_from_project(module: str, *, needed_by: str, run: str) -> ModuleType:
    """
    Import a module from a project folder outside the library.

    Raises `FleetError` if the folder does not exist, for example `lab/` in an installed wheel. The
    message names the command that needs the module (`needed_by`), and the command to run instead
    (`run`).
    """
    folder = module.partition(".")[0]
    if not (PROJECT / folder).is_dir():
        raise FleetError(
            f"`{needed_by}` needs the project's directory {folder}/, which is not part of the "
            f"installed package: clone the project and run {run} there"
        )
    add_project_to_path()
    return import_module(module)


def shipped_deploys() -> tuple[str, ...]:
    """Return the names of the deploys that gpufleet ships, such as vllm or node."""
    return tuple(sorted(file.stem for file in (PROJECT / "deploys").glob("*.py")))


def shipped_lock(name: str) -> Path | None:
    """Return gpufleet's own lock of this name (`locks/vllm-0.32.0.txt`), or None."""
    file = PROJECT / name
    return file if Path(name).parts[:1] == ("locks",) and file.is_file() else None


def write_whole(file: Path, text: str) -> None:
    """
    Write a file atomically, also across a power loss.

    If the file is a symbolic link, the link stays and its target is written. An existing file keeps
    its mode. Raises `FleetError` if the file cannot be written.
    """
    place = file.resolve()
    new = place.with_name(f".{place.name}.new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with new.open("w", encoding="utf-8", newline="") as written:
            written.write(text)
            written.flush()
            if place.exists():
                os.fchmod(written.fileno(), stat.S_IMODE(place.stat().st_mode))
            os.fsync(written.fileno())
        new.replace(place)
        folder = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise FleetError(f"{file} cannot be written: {error.strerror}") from None


def lock_file(path: Path, descriptor: int) -> None:
    """Lock an open file until it is closed.

    If a different process has the lock, the file is closed and `FleetError` is raised.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise FleetError(
            f"{path}: in use by another process on this machine: wait until that process ends, or "
            "stop it (`fuser` shows the process)"
        ) from None
