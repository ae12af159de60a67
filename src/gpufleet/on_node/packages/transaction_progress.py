"""RUNS ON THE NODE: report the progress of a running package transaction.

Takes (`PARAMETERS`): `root`, which is "" for the node itself. Prints one JSON document:
  schema        1
  step          what the transaction does; null if no transaction runs
  bytes, total  how much of a download is done, and its size; null if not known
  line          the last line of the package manager's output

The program reads the file STEP that `transaction.py` writes. It uses no file that a package manager
locks. It needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from typing import Any, Dict, Optional

from gpufleet.on_node.packages.steps import LOG, STEP
from gpufleet.on_node.transfer.folder_size import size

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

# The caller does not wait longer than this (gpufleet.operations.progress_watch.LOOK_SECONDS).
SECONDS = 10
PACKAGES = (".deb", ".rpm")
# Bytes that are read from the end of the log. No line is longer.
_END = 4096
# Control characters of the progress bars of apt and dnf, and of their colours.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
# The line that steps.begin_log writes.
_BEGUN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$")


def look(root: str) -> Dict[str, Any]:
    """Return the progress document."""
    document: Dict[str, Any] = {
        "schema": 1,
        "step": None,
        "bytes": None,
        "total": None,
        "line": None,
    }
    try:
        with open(root + STEP, encoding="utf-8") as file:
            step = json.load(file)
        # A transaction that was killed has left the record of its last step.
        os.kill(int(step["pid"]), 0)
        document["step"] = str(step["step"])
        if step["folder"]:
            document["bytes"] = size(root + step["folder"], PACKAGES)
            document["total"] = step["bytes"]
        else:
            document["line"] = last_line(root + LOG)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return document


def last_line(path: str) -> Optional[str]:
    """Return the last non-empty line of a log, or None if there is none."""
    with contextlib.suppress(OSError):
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            text = file.read().decode("utf-8", "replace")
        for line in reversed(text.replace("\r", "\n").splitlines()):
            said = " ".join(_CONTROL.sub("", line).split())
            if said.startswith("$ ") or _BEGUN.match(said):  # no output of the step yet
                return None
            if said:
                return said
    return None


def main() -> None:
    """Print the current progress."""
    signal.alarm(SECONDS)
    print(json.dumps(look(PARAMETERS["root"])))


if __name__ == "__main__":
    main()
