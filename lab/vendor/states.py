"""Define the states of the simulated repository: good, or damaged like real ones were.

    put(folder, "bad-signature")        # `gpufleet lab vendor bad-signature`

In every state, the repository for nodes is signed again with the present date. The reason is that
apt regards an older Release than its own as a replay, and keeps its own. The repository that
`lab.vendor.build` made is never changed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from gpufleet.errors import FleetError
from lab.state import write
from lab.vendor import driver, repository

GOOD, GONE, SLOW = "good", "gone", "slow"

STATES = {
    GOOD: "not damaged",
    "unsigned": "no Release is signed",
    "bad-signature": "the Release was changed after its signature",
    "wrong-hash": "libnvidia-ml1's packages have other hashes than in the index",
    "malformed-index": "an entry of the index has no Package field",
    "missing-dependency": "nvidia-driver-cuda needs a package that does not exist",
    "dkms-fails": f"modules later than {driver.VERSIONS[0]} do not compile",
    GONE: "the server answers every request with 404",
    SLOW: "the server sends one kilobyte per second",
}
"""Every state, with its defect."""

# Of its files, those that say what is in it; the rest are packages.
_INDEXES = ("InRelease", "Release", "Release.gpg", "Packages", "Packages.gz")


def current(folder: Path) -> str:
    """Return the state of the repository below `folder`, the lab's vendor/."""
    try:
        return (folder / "state").read_text().strip()
    except FileNotFoundError:
        return GOOD


def served(folder: Path) -> Path:
    """Return the directory that is served to nodes."""
    altered = folder / "served"
    return altered if altered.is_dir() else folder / "repository"


def put(folder: Path, name: str) -> None:
    """
    Bring the repository below `folder` into a state, in one step.

    Raises FleetError when there is no such state, or no repository yet.
    """
    if name not in STATES:
        raise FleetError(f"The vendor repository cannot be {name!r}: it is {', '.join(STATES)}.")
    if not (folder / "repository").is_dir():
        raise FleetError(f"{folder} has no repository yet: run `gpufleet lab up`.")
    new, live, old = (folder / f"served{suffix}" for suffix in (".new", "", ".old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(folder / "repository", new, copy_function=os.link)
    for index in _INDEXES:
        (new / index).unlink()  # another file than the one that it was linked to
    _HARM.get(name, _as_it_is)(new, folder)
    _newer(new, served(folder))
    if live.exists():
        live.rename(old)
    new.rename(live)
    write(folder / "state", f"{name}\n")
    shutil.rmtree(old, ignore_errors=True)


def forget(folder: Path) -> None:
    """Serve the built repository, regardless of the state, because it was rebuilt."""
    (folder / "state").unlink(missing_ok=True)
    shutil.rmtree(folder / "served", ignore_errors=True)


def _newer(new: Path, before: Path) -> None:
    """Give every index a later date than the one served before, for clients that ask by date."""
    last = int((before / "Release").stat().st_mtime) + 1
    for path in (new / name for name in _INDEXES):
        if path.exists() and path.stat().st_mtime < last:
            os.utime(path, (last, last))


def _as_it_is(pool: Path, folder: Path) -> None:
    repository.index(pool, folder)


def _unsigned(pool: Path, folder: Path) -> None:
    repository.index(pool, folder)
    for name in ("InRelease", "Release.gpg"):
        (pool / name).unlink()


def _bad_signature(pool: Path, folder: Path) -> None:
    repository.index(pool, folder)
    for name in ("InRelease", "Release"):
        text = (pool / name).read_text()
        (pool / name).write_text(text.replace("Origin: NVIDIA", "Origin: NVIDIA2", 1))


def _wrong_hash(pool: Path, folder: Path) -> None:
    repository.index(pool, folder)
    for package in pool.glob("libnvidia-ml1_*.deb"):
        content = bytearray(package.read_bytes())
        content[-1] ^= 1
        package.unlink()
        package.write_bytes(content)


def _malformed_index(pool: Path, folder: Path) -> None:
    def nameless(text: str) -> str:
        return text + "\nVersion: 1.0\nArchitecture: amd64\n"

    repository.index(pool, folder, nameless)


def _missing_dependency(pool: Path, folder: Path) -> None:
    def needy(text: str) -> str:
        entry = r"(Package: nvidia-driver-cuda\n(?:.+\n)*?Depends: )"
        return re.sub(entry, r"\1nvidia-firmware (>= 1), ", text)

    repository.index(pool, folder, needy)


def _dkms_fails(pool: Path, folder: Path) -> None:
    for version in driver.VERSIONS[1:]:
        for package in driver.modules(version, broken=True):
            package.path(pool).unlink()
            package.build(pool)
    repository.index(pool, folder)


_HARM: dict[str, Callable[[Path, Path], None]] = {
    "unsigned": _unsigned,
    "bad-signature": _bad_signature,
    "wrong-hash": _wrong_hash,
    "malformed-index": _malformed_index,
    "missing-dependency": _missing_dependency,
    "dkms-fails": _dkms_fails,
}
