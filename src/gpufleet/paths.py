"""Files of this machine: where the checkout lies, its folders' modules, files written whole."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from gpufleet.errors import FleetError

CHECKOUT = Path(__file__).resolve().parents[2]
"""The project's directory; it does not depend on the working directory."""


def import_from_checkout(module: str, *, needed_by: str, run: str) -> ModuleType:
    """
    Import a module of a folder of the checkout that is not part of the installed package.

    `needed_by` is the command that needs it, and `run` what to run instead, for the sentence of the
    `FleetError` that is raised where there is no such folder.
    """
    folder = module.partition(".")[0]
    if not (CHECKOUT / folder).is_dir():
        raise FleetError(
            f"`{needed_by}` runs from a checkout of the project, whose directory {folder}/ is not "
            f"part of the installed package: clone it and run {run} there"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return import_module(module)


def write_whole(file: Path, text: str) -> None:
    """
    Write a file, whole or not at all; after a power loss, too.

    A link stays one: what it leads to is written, with the mode that it has. Raises `FleetError`
    where that cannot be done.
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
