"""
Write, update and remove gpufleet's own files in a shared folder, without changing other files.

A list in the folder has gpufleet's files and their hashes. If a file is not in the list, or was
changed, gpufleet reports an error and does not overwrite the file. The list is written before the
files. So if a run is killed, the next run recognises the files of that run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpufleet.errors import FleetError

LIST = ".gpufleet-written.json"


def write(folder: Path, wanted: Mapping[str, bytes]) -> list[str]:
    """
    Write these files into `folder`, and remove files of earlier calls that are no longer wanted.

    `wanted` maps paths inside the folder to contents. Returns the changes, one line for each, or an
    empty list if nothing changed. If there are files that gpufleet must not overwrite, it writes
    nothing and raises `FleetError` with all of them.
    """
    ours = _listed(folder)
    now = {path: _hash(folder / path) for path in {*ours, *wanted}}
    problems = [
        f"{folder / path}: {_why(path in ours)}: move the file away, or name a different directory"
        for path, found in sorted(now.items())
        if found is not None
        and found not in ours.get(path, ())
        and found != _digest(wanted.get(path, b""))
    ]
    if problems:
        raise FleetError(*problems)
    try:
        return _write(folder, wanted, ours, now)
    except OSError as error:
        raise FleetError(f"{error.filename}: cannot be written: {error.strerror}") from None


def _write(
    folder: Path,
    wanted: Mapping[str, bytes],
    ours: Mapping[str, list[str]],
    now: Mapping[str, str | None],
) -> list[str]:
    hashes = {path: [_digest(content)] for path, content in wanted.items()}
    both = {path: [*ours.get(path, ()), *hashes.get(path, ())] for path in {*ours, *hashes}}
    done: list[str] = []
    stale = [path for path in sorted(ours) if path not in wanted and now[path] is not None]
    changed = [path for path in sorted(wanted) if now[path] not in hashes[path]]
    if stale or changed:
        _put(folder / LIST, _text(both))
    for path in changed:
        _put(folder / path, wanted[path])
        done.append(f"wrote {folder / path}")
    for path in stale:
        (folder / path).unlink()
        done.append(f"removed {folder / path}")
        with suppress(OSError):  # the directory is not empty
            (folder / path).parent.rmdir()
    if stale or changed or dict(ours) != hashes:
        _put(folder / LIST, _text(hashes))
    return done


def _why(listed: bool) -> str:
    if listed:
        return "was changed after gpufleet wrote it"
    return "exists, but gpufleet did not write it"


def _listed(folder: Path) -> dict[str, list[str]]:
    """Return the files in the list, each with the hashes that its content may have."""
    try:
        found: dict[str, list[str]] = json.loads((folder / LIST).read_bytes())["files"]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise FleetError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise FleetError(
            f"{folder / LIST}: is not a valid list of gpufleet's files: name a different directory"
        ) from None
    return found


def _hash(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FleetError(f"{path}: cannot be read: {error.strerror}") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _text(files: Mapping[str, list[str]]) -> bytes:
    said = (
        "The files in this directory that gpufleet wrote, with their hashes. gpufleet does not "
        "change other files."
    )
    return (json.dumps({"": said, "files": files}, indent=1, sort_keys=True) + "\n").encode()


def _put(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(content)
    draft.replace(path)
