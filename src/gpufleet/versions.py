"""Parse vLLM's release numbers for comparison. Pure."""

from __future__ import annotations

import re

RELEASE = re.compile(r"\d+\.\d+\.\d\w*(?:\.\w+)*")
"""A pattern of three numbers with an optional suffix: 0.32.0, 0.19.1rc2, 0.32.0.post1."""


def numbers(version: str) -> tuple[int, ...]:
    """
    Return a release's numbers without any suffix; () if there are none.

    >>> numbers("0.32.0.post1"), numbers("0.19.1rc2"), numbers("")
    ((0, 32, 0), (0, 19, 1), ())
    """
    found = re.match(r"\d+(?:\.\d+){0,2}", version)
    return tuple(map(int, found[0].split("."))) if found else ()
