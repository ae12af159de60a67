"""RUNS ON THE NODE: how far the build of a release is that goes on beside it.

Takes (`PARAMETERS`): `said`, the file that has what uv says (release.build_script).
Prints one JSON document: {"schema": 1, "step": what it does, "bytes": None, "total": None, "line":
what is there and what is not, or None}; `step` is None while uv has said nothing.

uv names a large download with its size when it begins, and by its name alone when it is there;
small ones it does not name. How much of one has come it does not say, so there is no rate: where
the last one takes a minute, one would be wrong.
Python 3.8, standard library.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, Optional

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

# A lock of 200 packages makes 15 KB.
MOST = 1 << 20
_NAMED = 3
# In GiB.
_UNITS = {"B": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}
_DOWNLOADED = "packages are downloaded"
_BEGUN = re.compile(r"^Downloading (\S+) \(([\d.]+)([KMG]?i?B)\)$", re.MULTILINE)
_THERE = re.compile(r"^ Downloaded (\S+)$", re.MULTILINE)
# The last of these that uv 0.13.9 has said tells what it does now, or what follows on it.
_STEPS = (
    ("Bytecode compiled ", "what is installed is tried"),
    ("Installed ", "bytecode is compiled"),
    ("Prepared ", "packages are installed"),
    ("Resolved ", _DOWNLOADED),
)


def look(text: str) -> Dict[str, Any]:
    """
    Return the document for what uv has said.

    >>> look("Downloading a (2.0GiB)\\nDownloading b (1.0GiB)\\n Downloaded b\\n")["line"]
    '1.0 of 3.0 GiB are there, 1 left: a'
    """
    step = next((step for word, step in _STEPS if "\n" + word in "\n" + text), None)
    line = None
    if "\nPrepared " not in text:
        line = downloads(text)
        step = step or (_DOWNLOADED if line else None)
    return {"schema": 1, "step": step, "bytes": None, "total": None, "line": line}


def downloads(text: str) -> Optional[str]:
    """Return which large downloads of those that have begun are there; None if none has."""
    sizes = {name: float(size) * _UNITS[unit] for name, size, unit in _BEGUN.findall(text)}
    left = [name for name in sizes if name not in set(_THERE.findall(text))]
    if not sizes:
        return None
    whole = sum(sizes.values())
    there = "%.1f of %.1f GiB are there" % (whole - sum(sizes[name] for name in left), whole)
    left.sort(key=lambda name: -sizes[name])
    named = ", ".join(left[:_NAMED]) + (" ..." if len(left) > _NAMED else "")
    return "%s, %d left: %s" % (there, len(left), named) if left else there


def main() -> None:
    """Look, and print what was seen."""
    try:
        with open(PARAMETERS["said"], encoding="utf-8", errors="replace") as file:
            text = file.read(MOST)
    except OSError:  # it has not come to uv yet, or is done
        text = ""
    print(json.dumps(look(text)))


if __name__ == "__main__":
    main()
