"""RUNS ON THE NODE: read the Python files of one release of an engine.

A release is a source tree, a source distribution (.tar.gz), a wheel, or an installation in the
Python that runs this program. The release is not imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tarfile
import zipfile
from typing import Callable, NamedTuple, Optional

INSTALLED = "installed"

# The largest source file of 0.33.0 has 0.6 MB. A file above this limit is not Python source.
_FILE_LIMIT = 16 * 1024 * 1024


class SourceError(Exception):
    """Raised if there is no release at a path. Its text is a message for the operator."""


class Package(NamedTuple):
    """
    The package of one engine.

    `name` is the import name, and `title` the name in messages. `landmark` is a file that every
    release has. `versions` has the files to which a build writes the version. Each has a pattern
    with a group that matches the version.
    """

    name: str
    title: str
    landmark: str
    versions: "tuple[tuple[str, str], ...]"


VLLM = Package(
    "vllm",
    "vLLM",
    "vllm/engine/arg_utils.py",  # since 0.1: the engine's arguments
    (
        ("PKG-INFO", r"^Version: (\S+)"),
        ("vllm/_version.py", r"^(?:__version__ = )?version = ['\"]([^'\"]+)"),
        ("vllm/_version.py", r"^__version__ = (?:version = )?['\"]([^'\"]+)"),
        ("vllm/version.py", r"^__version__ = ['\"]([^'\"]+)"),
    ),
)


class Release(NamedTuple):
    """
    The files of one release.

    `package` is the import name. `read` returns the text of a file such as `vllm/envs.py`, or None
    if the file does not exist. `names` returns the paths of all Python files. `version` is None if
    the sources do not contain the version.
    """

    package: str
    place: str
    read: Callable[[str], Optional[str]]
    names: Callable[[], "list[str]"]
    version: Optional[str]


def release(place: str, package: Package = VLLM) -> Release:
    """
    Return the release at `place`, which is a path or "installed".

    Raises `SourceError` with a reason if there is no release.
    """
    if place == INSTALLED:
        return _tree(_installed(package), package)
    if os.path.isdir(place):
        return _tree(place, package)
    if not os.path.exists(place):
        raise SourceError("%s does not exist" % place)
    try:
        if zipfile.is_zipfile(place):
            return _held(place, _unzipped(place, package), package)
        if tarfile.is_tarfile(place):
            return _held(place, _untarred(place, package), package)
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise SourceError("%s cannot be read (%s): fetch it again" % (place, error)) from error
    raise SourceError("%s is neither a directory, nor a wheel, nor a source distribution" % place)


def _installed(package: Package) -> str:
    """Return the folder of the installed package. It is found without importing the package."""
    try:
        spec = importlib.util.find_spec(package.name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise SourceError(
            "%s is not installed beside this Python (%s)" % (package.name, sys.executable)
        )
    return os.path.dirname(os.path.dirname(spec.origin))


def _tree(folder: str, package: Package) -> Release:
    if not os.path.isfile(os.path.join(folder, package.landmark)):
        raise SourceError(
            "%s holds no %s: give the folder in which %s's folder `%s` lies, its source"
            " distribution (.tar.gz) or its wheel"
            % (folder, package.landmark, package.title, package.name)
        )

    def read(path: str) -> Optional[str]:
        try:
            with open(os.path.join(folder, path), encoding="utf-8", errors="replace") as file:
                return file.read(_FILE_LIMIT)
        except OSError:
            return None

    def names() -> "list[str]":
        found = []
        for base, folders, files in os.walk(os.path.join(folder, package.name)):
            folders[:] = [name for name in folders if name != "__pycache__"]
            at = os.path.relpath(base, folder)
            found += [at + "/" + name for name in files if name.endswith(".py")]
        return sorted(found)

    return Release(package.name, folder, read, names, _version(read, package))


def _held(place: str, texts: "dict[str, str]", package: Package) -> Release:
    if package.landmark not in texts:
        raise SourceError(
            "%s holds no %s: it is not a release of %s" % (place, package.landmark, package.title)
        )
    version = _version(texts.get, package)
    return Release(package.name, place, texts.get, lambda: sorted(texts), version)


def _wanted(path: str, size: int, package: Package) -> bool:
    return size <= _FILE_LIMIT and (
        (path.startswith(package.name + "/") and path.endswith(".py")) or path == "PKG-INFO"
    )


def _unzipped(place: str, package: Package) -> "dict[str, str]":
    with zipfile.ZipFile(place) as archive:
        return {
            entry.filename: archive.read(entry).decode("utf-8", "replace")
            for entry in archive.infolist()
            if _wanted(entry.filename, entry.file_size, package)
        }


def _untarred(place: str, package: Package) -> "dict[str, str]":
    """
    Read the archive once from its beginning to its end.

    Seeking back in a compressed archive would be slow.
    """
    texts = {}
    with tarfile.open(place, "r|*") as archive:
        for entry in archive:
            path = entry.name.partition("/")[2]  # below the folder NAME-VERSION
            wanted = _wanted(path, entry.size, package)
            file = archive.extractfile(entry) if wanted else None
            if file is not None:
                texts[path] = file.read().decode("utf-8", "replace")
    return texts


def _version(read: Callable[[str], Optional[str]], package: Package) -> Optional[str]:
    """Return the version that the build recorded, or None for a checkout that was not built."""
    for path, pattern in package.versions:
        found = re.search(pattern, read(path) or "", re.MULTILINE)
        if found:
            return found.group(1)
    return None
