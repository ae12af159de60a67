"""
Record on this machine which releases were built. Border: the module reads and writes the record.

The record is `<lock>.built.json`, in the folder of the release's lock. A node copies a release only
if the release's files match a recorded build, whatever the source reports.

    {"schema": 1, "built": [{"lock": "<the lock's SHA-256>", "system": "ubuntu 24.04",
      "machine": "x86_64", "interpreter": "CPython 3.12.3", "tree": "<the manifest's SHA-256>",
      "node": "gpu-01"}]}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpufleet.artifacts.distribution import Kind
from gpufleet.artifacts.release import Release
from gpufleet.errors import FleetError
from gpufleet.paths import write_whole

SCHEMA = 1
_KIND = ("system", "machine", "interpreter")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def note_path(wanted: Release) -> Path:
    """
    Return the path of a release's record. Like the lock's path, it is relative to the project.
    """
    return Path(f"{wanted.source.lock}.built.json")


def read_note(wanted: Release) -> dict[Kind, frozenset[str]]:
    """
    Return {kind of node: digests of the recorded builds}.

    Raises `FleetError` if the record cannot be read.
    """
    lock = hashlib.sha256(wanted.lock).hexdigest()
    found: dict[Kind, frozenset[str]] = {}
    for each in _entries(note_path(wanted)):
        if each["lock"] == lock:
            kind = tuple(each[name] for name in _KIND)
            found[kind] = found.get(kind, frozenset()) | {each["tree"]}
    return found


def note_build(wanted: Release, kind: Sequence[str], tree: str, node: str) -> None:
    """Add a completed build to the record. Raises `FleetError` if the record cannot be accessed."""
    path = note_path(wanted)
    lock = hashlib.sha256(wanted.lock).hexdigest()
    added = {"lock": lock, **dict(zip(_KIND, kind, strict=True)), "tree": tree, "node": node}
    entries = [*(each for each in _entries(path) if each["tree"] != tree), added]
    text = json.dumps({"schema": SCHEMA, "built": entries}, indent=1) + "\n"
    write_whole(path, text)


def _entries(path: Path) -> list[Mapping[str, str]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise FleetError(f"{path} cannot be read ({error}): restore it, or remove it") from None
    entries = document.get("built") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not all(_is_entry(each) for each in entries):
        raise FleetError(f"{path} is not a record of builds: restore it, or remove it")
    return entries


def _is_entry(each: Any) -> bool:
    names = ("lock", *_KIND, "tree", "node")
    return (
        isinstance(each, dict)
        and all(isinstance(each.get(name), str) for name in names)
        and bool(_DIGEST.fullmatch(each["tree"]))
    )
