"""`group_vars/<group>.lock.yml`: where a group's `gpu_lock` is, when `gpufleet lock` writes it.

One file for one key, so that a program may write it anew without touching what people wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpufleet.errors import FleetError
from gpufleet.settings import variables
from gpufleet.settings.variables import Variables

SUFFIX = ".lock.yml"
KEY = "gpu_lock"


def path(group_vars: Path, group: str) -> Path:
    """Return where a group's lock lies below a `group_vars` directory."""
    return group_vars / f"{group}{SUFFIX}"


def name_of(file: Path) -> str:
    """
    Return the group or host whose variables a file has, by the file's name alone.

    >>> name_of(Path("gpu_h100.lock.yml")), name_of(Path("gpu_h100.yml"))
    ('gpu_h100', 'gpu_h100')
    """
    return file.name.removesuffix(SUFFIX) if file.name.endswith(SUFFIX) else file.stem


def over(
    written: Variables, directories: Iterable[Path], group: str, root: Path | None = None
) -> Variables:
    """
    Return a group's variables with its lock from each `group_vars` directory laid over them.

    `written` is what people wrote of the group. Raises FleetError for a lock in both, of which one
    would be read by nobody, and for other keys in a lock's file, which the next lock would lose.
    """
    problems = []
    locked: Variables = {}
    for file in (path(directory, group) for directory in directories):
        if not file.is_file():
            continue
        found = variables.load_file(file, root)
        if not found:
            problems.append(
                f"{variables.shown_path(file, root)}: is empty: `gpufleet lock` writes it, or "
                "remove it"
            )
        problems += [
            f"{origin}: {key}: this file has `{KEY}` alone, and `gpufleet lock` writes it anew: "
            f"move it to {variables.shown_path(file.with_name(f'{group}.yml'), root)}"
            for key, (_, origin) in found.items()
            if key != KEY
        ]
        if KEY in found and KEY in written:
            problems.append(
                f"{found[KEY][1]}: {KEY}: the group has another one in {written[KEY][1]}: "
                "remove one of the two"
            )
        locked = variables.merge(locked, found)
    if problems:
        raise FleetError(*problems)
    return variables.merge(written, locked)


def write(file: Path, text: str) -> None:
    """Write a lock's file, whole or not at all. Raises `FleetError` where that cannot be done."""
    new = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise FleetError(f"{file}: cannot be written: {error.strerror}") from None
