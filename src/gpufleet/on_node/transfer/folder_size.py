"""RUNS ON THE NODE: report the present and the expected size of a folder.

Takes (`PARAMETERS`):
  folder      the folder
  tree        URL at which a Hub lists a model's files with their sizes; null: no Hub is queried
  token_file  file with the token for this URL, or null
Prints one JSON document {"schema": 1, "bytes": int, "total": int or null}.

The program changes nothing, and its result is only informational. Unknown values are null. It needs
only Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from typing import Any, Dict, Optional, Tuple

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

# The caller does not wait longer than this (gpufleet.operations.progress_watch.LOOK_SECONDS).
SECONDS = 10
HUB_SECONDS = 5
# Limit of a page of the Hub's list. A page has a thousand files and about 300 KB.
MOST_LISTED = 4 << 20


def size(folder: str, endings: Tuple[str, ...] = ("",)) -> int:
    """
    Return the size in bytes of all files below a folder whose names have one of these endings.

    If there are no such files, the result is 0.
    """
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(endings):
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(place, name))
                    # Space that is only allocated for a file does not count as received.
                    found += min(status.st_size, status.st_blocks * 512)
    return found


def listed_bytes(tree: str, token_file: Optional[str]) -> Optional[int]:
    """
    Return the total size in bytes of the files in a Hub's list.

    If the list cannot be read or is incomplete, the result is None.
    """
    request = urllib.request.Request(tree, headers={"User-Agent": "gpufleet"})
    with contextlib.suppress(OSError):
        if token_file:
            with open(token_file, encoding="ascii") as file:
                token = file.read().strip()
            # The token is sent only to this server, not to servers that it redirects to.
            request.add_unredirected_header("Authorization", "Bearer " + token)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            if 'rel="next"' in (answer.headers.get("Link") or ""):
                return None
            files = json.loads(answer.read(MOST_LISTED).decode())
        return sum(int(each["size"]) for each in files if each["type"] == "file")
    return None


def main() -> None:
    """Print the folder's present and expected size."""
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
