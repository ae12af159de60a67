"""Validate values that become part of a command line or a file's name."""

from __future__ import annotations

import re

from gpufleet.errors import FleetError

CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def must_match(pattern: re.Pattern[str], value: str, what: str) -> None:
    """
    Raise `FleetError` unless the pattern matches the whole value.

    The message has the form "VALUE is not WHAT".
    """
    if not pattern.fullmatch(value):
        raise FleetError(f"{value!r} is not {what}: it must match {pattern.pattern}")


def must_be_path(path: str, what: str) -> None:
    """
    Raise `FleetError` unless a path is absolute and plain.

    `what` describes the path in the message.
    """
    plain = path.startswith("/") and not CONTROL.search(path)
    if not plain or any(part in {"", ".", ".."} for part in path.split("/")[1:]):
        raise FleetError(
            f"{path!r} is not a path {what}: it must be absolute, without '.', '..', empty parts "
            "or control characters"
        )
