"""Real programs of Debian's packages, for tests: unpacked into the lab's cache, never installed."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from gpufleet.errors import FleetError
from lab import run_command
from lab.state import CACHE, exclusive, forget

PROGRAMS = CACHE / "programs"
_APT = ("apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "DPkg::Lock::Timeout=300")


def program(package: str, path: str, *libraries: str) -> Path:
    """
    Return a program of a Debian package: `program("prometheus", "usr/bin/promtool")`.

    The first call downloads it (seconds), as root, with this machine's own apt. `libraries` are
    packages of shared libraries that the machine may lack; then the path is that of a script that
    starts the program with them. Raises `FleetError` when apt has no such package.
    """
    folder = _unpacked(package)
    found = folder / path
    if not found.is_file():
        has = ", ".join(sorted(str(file.relative_to(folder)) for file in folder.glob("usr/*bin/*")))
        raise FleetError(f"The package {package} has no {path}; of programs it has {has}.")
    return _started_with(found, libraries) if libraries else found


def _unpacked(package: str) -> Path:
    """Return the folder with a package's files; it has that name only when it is whole."""
    folder = PROGRAMS / package
    if folder.is_dir():
        return folder
    with exclusive("programs", CACHE, limit=900):
        if not folder.is_dir():  # else another test has fetched it while we waited
            PROGRAMS.mkdir(parents=True, exist_ok=True)
            draft = PROGRAMS / f".{package}.new"
            if draft.exists():
                forget(draft)
            with tempfile.TemporaryDirectory(prefix="gpufleet-") as empty:
                run_command.run(
                    "dpkg-deb", "-x", _downloaded(package, Path(empty)), draft, limit=300
                )
            draft.rename(folder)
    return folder


def _downloaded(package: str, folder: Path) -> Path:
    """Download a package into an empty folder, with new lists where the present ones are old."""
    try:
        _download(package, folder)
    except FleetError:  # a fresh machine's apt has no lists; old ones name files that are gone
        run_command.run(*_APT, "update", limit=600)
        _download(package, folder)
    (deb,) = folder.glob("*.deb")
    return deb


def _download(package: str, folder: Path) -> None:
    # apt-get writes where it is started.
    inside = ("env", "-C", folder, *_APT)
    run_command.run(*inside, "download", package, limit=600)


def _started_with(found: Path, libraries: tuple[str, ...]) -> Path:
    """Return a script that starts `found` and lets it find the packages' libraries."""
    folders = sorted(
        {
            str(file.parent)
            for package in libraries
            for file in _unpacked(package).glob("usr/lib/**/*.so*")
        }
    )
    script = PROGRAMS / f"{found.name}-with-{len(libraries)}-libraries"
    text = (
        f"#!/bin/sh\nexport LD_LIBRARY_PATH={shlex.quote(':'.join(folders))}\n"
        f'exec {shlex.quote(str(found))} "$@"\n'
    )
    with exclusive("programs", CACHE, limit=900):
        if not script.is_file() or script.read_text() != text:
            draft = script.with_suffix(".new")
            draft.write_text(text)
            draft.chmod(0o755)
            draft.rename(script)
    return script
