"""Build the lab's replacement of NVIDIA's apt repository, with real signed packages.

Contract: `build()` writes `state`/vendor/repository complete and signed, and puts it in place in
one step. So a node that updates at this moment sees the old or the new repository. If key and
recipes are unchanged, `build()` changes nothing. If the key is unchanged, the hash of the keyring
package is too.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpufleet.errors import FleetError
from lab import nvml
from lab.state import CACHE
from lab.vendor import kernels, repository, states
from lab.vendor.packages import KEYRING, packages

TOOLS = {"dpkg-deb": "dpkg", "dpkg-scanpackages": "dpkg-dev", "gpg": "gnupg", "gpgconf": "gnupg"}


@dataclass(frozen=True)
class Vendor:
    """The repository's address and key, for an inventory.

    Attributes:
        url: the address of the repository for nodes.
        keyring: the file name of the package with the repository's key.
        keyring_sha256: the hash of this file, 64 hex digits.
    """

    url: str
    keyring: str
    keyring_sha256: str


def build(state: Path, mirror: str) -> Vendor:
    """
    Build the repository of the lab at `state`, for nodes that reach it at `mirror`/vendor.

    `mirror` is the mirror's URL, such as "http://10.201.7.1:8080".  Raises FleetError when a tool
    is missing or fails.
    """
    _need_tools()
    folder = state / "vendor"
    with _understood(folder):
        key = repository.public_key(folder)
        library = nvml.build(CACHE / "nvml").read_bytes()
        recipe = _recipe(key, library)
        stamp = folder / "recipe.sha256"
        if not (stamp.exists() and stamp.read_text() == recipe):
            stamp.unlink(missing_ok=True)
            _rebuild(folder, key, library)
            states.forget(folder)
            stamp.write_text(recipe)
    keyring = folder / "repository" / KEYRING
    digest = hashlib.sha256(keyring.read_bytes()).hexdigest()
    return Vendor(f"{mirror}/vendor", KEYRING, digest)


def build_kernels(state: Path) -> None:
    """Build the kernel archive of the lab at `state`. Raises `FleetError` like `build`."""
    _need_tools()
    with _understood(state / kernels.FOLDER):
        kernels.build(state)


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Convert a tool's failure to a `FleetError`."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        raise FleetError(
            f"the lab's packages could not be built in {folder}:"
            f" {error.cmd[0]} said: {said or f'exit code {error.returncode}'}"
        ) from error


def _need_tools() -> None:
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        raise FleetError(
            "this machine cannot build the lab's vendor repository: install"
            f" {' and '.join(missing)} (apt-get install {' '.join(missing)})."
        )


def _rebuild(folder: Path, key: bytes, library: bytes) -> None:
    new, live, old = (folder / name for name in ("repository.new", "repository", "repository.old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    for package in packages(key, library):
        package.build(new)
    repository.index(new, folder)
    if live.exists():
        live.rename(old)
    new.rename(live)
    shutil.rmtree(old, ignore_errors=True)


def _recipe(key: bytes, library: bytes) -> str:
    """Return a hash of everything that determines the repository's content."""
    digest = hashlib.sha256(key + library)
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
