"""RUNS ON THE NODE: report the progress of a release's running build.

Takes (`PARAMETERS`): `said`, the file with the output of uv, and after it of compile_bytecode.py
(release.build_script).
Prints one JSON document:
  schema        1
  step          what the build does; null before uv's first output
  bytes, total  how much of the large downloads is done, and their total size, for those that have
                begun
  left          [names of the large downloads that have begun and are not done]

uv prints a line when a large download begins, with its size, and a line when it ends. It prints
nothing for small downloads, and nothing about a part of a download. So no rate is shown, because a
rate would be wrong while the last download takes a minute. The program needs only Python 3.8 and
the standard library.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

# Limit of the output that is read. For a lock of 200 packages, the output has 15 KB.
MOST = 1 << 20
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_BEGUN = re.compile(r"^Downloading (\S+) \(([\d.]+)([KMG]?i?B)\)$", re.MULTILINE)
_THERE = re.compile(r"^ Downloaded (\S+)$", re.MULTILINE)
# Beginnings of lines of uv 0.13.9 and compile_bytecode. The last of these lines that was printed
# determines the current step, which may be the step after the line.
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
    except OSError:  # the build has not started uv yet, or it is done
        text = ""
    print(json.dumps(parse_progress(text)))


if __name__ == "__main__":
    main()
