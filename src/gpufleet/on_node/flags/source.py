"""RUNS ON THE NODE: the Python files of one release of vLLM: tree, archive or installation.

A release is a source tree, a source distribution (.tar.gz), a wheel, or what is installed beside
the Python that runs this. Nothing of it is imported.
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

# What every release has had since 0.1: the engine's arguments.
_LANDMARK = "vllm/engine/arg_utils.py"

# The largest source file of 0.33.0 has 0.6 MB. A bigger one is not Python that an operator wrote.
_FILE_LIMIT = 16 * 1024 * 1024


class SourceError(Exception):
    """There is no release of vLLM at that path; the text is a message for the operator."""


class Release(NamedTuple):
    """
    One release's files.

    `read` takes a path such as `vllm/envs.py` and returns its text, None if there is no such file;
    `names` is every Python file there is. `version` is None where the place does not say.
    """

    place: str
    read: Callable[[str], Optional[str]]
    names: Callable[[], "list[str]"]
    version: Optional[str]


def release(place: str) -> Release:
    """Return the release at `place`: a path, or "installed". Raises `SourceError` with a reason."""
    if place == INSTALLED:
        return _tree(_installed())
    if os.path.isdir(place):
        return _tree(place)
    if not os.path.exists(place):
        raise SourceError("%s does not exist" % place)
    try:
        if zipfile.is_zipfile(place):
            return _held(place, _unzipped(place))
        if tarfile.is_tarfile(place):
            return _held(place, _untarred(place))
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise SourceError("%s cannot be read (%s): fetch it again" % (place, error)) from error
    raise SourceError("%s is neither a directory, nor a wheel, nor a source distribution" % place)


def _installed() -> str:
    """Return the folder from which `import vllm` would import; find_spec imports nothing."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise SourceError("vllm is not installed beside this Python (%s)" % sys.executable)
    return os.path.dirname(os.path.dirname(spec.origin))


def _tree(folder: str) -> Release:
    if not os.path.isfile(os.path.join(folder, _LANDMARK)):
        raise SourceError(
            "%s holds no %s: give the folder in which vLLM's folder `vllm` lies, its source"
            " distribution (.tar.gz) or its wheel" % (folder, _LANDMARK)
        )

    def read(path: str) -> Optional[str]:
        try:
            with open(os.path.join(folder, path), encoding="utf-8", errors="replace") as file:
                return file.read(_FILE_LIMIT)
        except OSError:
            return None

    def names() -> "list[str]":
        found = []
        for base, folders, files in os.walk(os.path.join(folder, "vllm")):
            folders[:] = [name for name in folders if name != "__pycache__"]
            at = os.path.relpath(base, folder)
            found += [at + "/" + name for name in files if name.endswith(".py")]
        return sorted(found)

    return Release(folder, read, names, _version(read))


def _held(place: str, texts: "dict[str, str]") -> Release:
    if _LANDMARK not in texts:
        raise SourceError("%s holds no %s: it is no release of vLLM" % (place, _LANDMARK))
    return Release(place, texts.get, lambda: sorted(texts), _version(texts.get))


def _wanted(path: str, size: int) -> bool:
    return size <= _FILE_LIMIT and (
        (path.startswith("vllm/") and path.endswith(".py")) or path == "PKG-INFO"
    )


def _unzipped(place: str) -> "dict[str, str]":
    with zipfile.ZipFile(place) as archive:
        return {
            entry.filename: archive.read(entry).decode("utf-8", "replace")
            for entry in archive.infolist()
            if _wanted(entry.filename, entry.file_size)
        }


def _untarred(place: str) -> "dict[str, str]":
    """Read the archive once, from front to end: going back in a compressed one is slow."""
    texts = {}
    with tarfile.open(place, "r|*") as archive:
        for entry in archive:
            path = entry.name.partition("/")[2]  # below the folder vllm-VERSION
            file = archive.extractfile(entry) if _wanted(path, entry.size) else None
            if file is not None:
                texts[path] = file.read().decode("utf-8", "replace")
    return texts


def _version(read: Callable[[str], Optional[str]]) -> Optional[str]:
    """Return the version that the build wrote down; a checkout of vLLM has none."""
    for path, pattern in (
        ("PKG-INFO", r"^Version: (\S+)"),
        ("vllm/_version.py", r"^(?:__version__ = )?version = ['\"]([^'\"]+)"),
        ("vllm/_version.py", r"^__version__ = (?:version = )?['\"]([^'\"]+)"),
        ("vllm/version.py", r"^__version__ = ['\"]([^'\"]+)"),
    ):
        found = re.search(pattern, read(path) or "", re.MULTILINE)
        if found:
            return found.group(1)
    return None
