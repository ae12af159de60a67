"""Files of this machine: deploys, roles, templates and locks of gpufleet; files written whole."""

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
The folder with `deploys/`, `roles/`, `templates/`, `locks/` and `config.py`: the checkout, or the
wheel's copy of it. It does not depend on the working directory.
"""


def add_project_to_path() -> None:
    """Make `roles` importable for deploys, also from an installed package."""
    if str(PROJECT) not in sys.path:
        sys.path.append(str(PROJECT))


def import_from_project(module: str, *, needed_by: str, run: str) -> ModuleType:
    """
    Import a module of a folder of the project that is not part of the library.

    `needed_by` is the command that needs it, and `run` what to run instead, for the sentence of the
    `FleetError` that is raised where there is no such folder: a wheel brings no `lab/`.
    """
    folder = module.partition(".")[0]
    if not (PROJECT / folder).is_dir():
        raise FleetError(
            f"`{needed_by}` runs from a checkout of the project, whose directory {folder}/ is not "
            f"part of the installed package: clone it and run {run} there"
        )
    add_project_to_path()
    return import_module(module)


def shipped_deploys() -> tuple[str, ...]:
    """Return the names of the deploys that gpufleet ships: vllm, node ..."""
    return tuple(sorted(file.stem for file in (PROJECT / "deploys").glob("*.py")))


def shipped_lock(name: str) -> Path | None:
    """Return gpufleet's own lock of this name, `locks/vllm-0.32.0.txt`; None: there is none."""
    file = PROJECT / name
    return file if Path(name).parts[:1] == ("locks",) and file.is_file() else None


def write_whole(file: Path, text: str) -> None:
    """
    Write a file atomically, also against a power loss.

    A link is kept: its target is written, with its mode. Raises `FleetError` where that cannot be
    done.
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
    """Lock an open file until it is closed; close it, and raise `FleetError`, if another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise FleetError(
            f"{path}: in use by another process on this machine: wait for it, or stop it (`fuser` "
            "shows it)"
        ) from None
