"""Build line diffs of the files that a converge writes, for `pyinfra --diff`. Pure.

The content of a secret is never shown. The content of a file that not all users may read, before or
after the change, is not shown either, because any file may contain a password. Instead, the diff
has a line with the reason.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.converge.desired import File
from gpufleet.sanitize import printable

MOST_BYTES = 256 << 10
"""
The maximum size of a compared file in bytes.

A rendered unit has 5 KB, and a program's archive has 0.5 MB.
"""
MOST_LINES = 400
"""The maximum number of lines in the diff of one file. A longer diff is truncated."""

NO_NEWLINE = "\\ No newline at end of file"
"""The text that diff(1) prints in this case."""

WORLD_READABLE = 0o004


def is_readable(file: File) -> bool:
    """Return whether a file's content may be shown."""
    return not file.secret and bool(file.mode & WORLD_READABLE)


def lines(file: File, found: Mapping[str, Any] | str | None) -> Iterator[str]:
    """
    Yield the diff between a file's desired and current content.

    `found` is the file's entry in the answer of on_node/converge/read_files.py. It is None if the
    file is missing, or a text with the reason if the content is unknown.
    """
    if file.secret:
        yield f"{file.path}: the difference is not shown, because the content is a secret"
        return
    if not is_readable(file):
        yield (
            f"{file.path}: the difference is not shown, because with mode {file.mode:04o} not all "
            "users may read the file"
        )
        return
    before = _before(found)
    if isinstance(before, str):
        yield f"{file.path}: the current content is not shown: {before}"
        return
    old, new = _text(before), _text(file.content)
    if old is None or new is None or len(file.content) > MOST_BYTES:
        yield (
            f"{file.path}: {len(before)} bytes become {len(file.content)}. The content is binary, "
            "or too large to be shown"
        )
        return
    if old == new:
        return
    names = (file.path if found else "/dev/null", file.path)
    for number, line in enumerate(difflib.unified_diff(old, new, *names, n=2, lineterm="")):
        if number == MOST_LINES:
            yield "..."
            return
        yield printable(line.removesuffix("\n"))
        if number > 1 and not line.startswith("@@") and not line.endswith("\n"):
            yield NO_NEWLINE


def _before(found: Mapping[str, Any] | str | None) -> bytes | str:
    if found is None:
        return b""
    if isinstance(found, str):
        return found
    if not isinstance(found, Mapping):
        return "the node's answer is not valid"
    if "hidden" in found:
        return "the mode of the file does not allow all users to read it"
    if "content" not in found:
        return str(found.get("error") or f"the file has {found.get('bytes')} bytes")
    try:
        return base64.b64decode(found["content"], validate=True)
    except (TypeError, ValueError, binascii.Error):
        return "the node's answer is not valid"


def _text(content: bytes) -> list[str] | None:
    """Return the lines of a text with their line ends, or None for binary content."""
    if b"\0" in content:
        return None
    try:
        return re.findall(r"[^\n]*\n|[^\n]+", content.decode())
    except UnicodeDecodeError:
        return None
