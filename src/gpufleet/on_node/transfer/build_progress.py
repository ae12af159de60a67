"""RUNS ON THE NODE: report the progress of a release's running build.

Takes (`PARAMETERS`): `said`, the file with the output of uv and then of compile_bytecode.py
(release.build_script).
Prints one JSON document: {"schema": 1, "step": what the build does, "bytes": int, "total": int,
"left": [names]}; the last three are of the large downloads that have begun. `step` is None before
uv's first output.

uv prints a large download with its size at its beginning and with its name at its end, and does not
print small downloads. uv does not report partial downloads, so no rate is shown: a rate would be
wrong while the last download takes a minute. Python 3.8, standard library.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

# A lock of 200 packages makes 15 KB.
MOST = 1 << 20
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_BEGUN = re.compile(r"^Downloading (\S+) \(([\d.]+)([KMG]?i?B)\)$", re.MULTILINE)
_THERE = re.compile(r"^ Downloaded (\S+)$", re.MULTILINE)
# The last of these that uv 0.13.9 or compile_bytecode has said tells what it does now, or what
# follows on it.
_STEPS = (
    ("Bytecode compiled ", "the installation is tested"),
    ("Installed ", "bytecode is compiled"),
    ("Prepared ", "packages are installed"),
    ("Resolved ", "packages are downloaded"),
)


def parse_progress(text: str) -> Dict[str, Any]:
    """
    Return the document for uv's output so far.

    >>> parse_progress("Downloading a (2.0MiB)\\nDownloading b (1.0MiB)\\n Downloaded b\\n")["left"]
    ['a']
    """
    text = "\n" + text
    begun = _BEGUN.findall(text) if "\nPrepared " not in text else []
    sizes = {name: int(float(size) * _UNITS[unit]) for name, size, unit in begun}
    left = sorted(sizes.keys() - _THERE.findall(text))
    total = sum(sizes.values())
    return {
        "schema": 1,
        "step": next((step for word, step in _STEPS if "\n" + word in text), None),
        "bytes": total - sum(sizes[name] for name in left),
        "total": total,
        "left": left,
    }


def main() -> None:
    """Print the current progress."""
    try:
        with open(PARAMETERS["said"], encoding="utf-8", errors="replace") as file:
            text = file.read(MOST)
    except OSError:  # it has not come to uv yet, or is done
        text = ""
    print(json.dumps(parse_progress(text)))


if __name__ == "__main__":
    main()
