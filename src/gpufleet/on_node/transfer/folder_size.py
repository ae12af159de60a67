"""RUNS ON THE NODE: report a folder's present and expected bytes.

Takes (`PARAMETERS`): `folder`; `tree`, the URL at which a Hub lists a model's files with their
sizes, None: not queried; `token_file`, which holds the token for it, or None.
Prints one JSON document {"schema": 1, "bytes": int, "total": int or None}.

It is read-only and informational: unknown values are None. Python 3.8, standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from typing import Any, Dict, Optional, Tuple

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

# No reader waits longer than that (gpufleet.operations.progress_watch.LOOK_SECONDS).
SECONDS = 10
HUB_SECONDS = 5
# A list of the thousand files that a page of it has is some 300 KB.
MOST_LISTED = 4 << 20


def size(folder: str, endings: Tuple[str, ...] = ("",)) -> int:
    """Return the bytes of all files below a folder with these name endings; 0 without any."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(endings):
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(place, name))
                    # What was set aside for a file has not come yet.
                    found += min(status.st_size, status.st_blocks * 512)
    return found


def listed_bytes(tree: str, token_file: Optional[str]) -> Optional[int]:
    """
    Return the total bytes of a Hub's list of files, or None if it is unreadable or incomplete.
    """
    request = urllib.request.Request(tree, headers={"User-Agent": "gpufleet"})
    with contextlib.suppress(OSError):
        if token_file:
            with open(token_file, encoding="ascii") as file:
                token = file.read().strip()
            # For this server, not for where it redirects to.
            request.add_unredirected_header("Authorization", "Bearer " + token)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            if 'rel="next"' in (answer.headers.get("Link") or ""):
                return None
            files = json.loads(answer.read(MOST_LISTED).decode())
        return sum(int(each["size"]) for each in files if each["type"] == "file")
    return None


def main() -> None:
    """Print the folder's present and expected bytes."""
    signal.alarm(SECONDS)
    tree = PARAMETERS["tree"]
    document = {
        "schema": 1,
        "bytes": size(PARAMETERS["folder"]),
        "total": listed_bytes(tree, PARAMETERS["token_file"]) if tree else None,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
