"""RUNS ON THE NODE: return contents of small world-readable files, to show differences.

    PARAMETERS = {"paths": ["/etc/vllm/x.conf"], "most": 262144}
    {"schema": 1, "files": {"/etc/vllm/x.conf": {"content": "<base64>"}}}

Instead of `content`, an entry may have one of these keys:
  bytes   the size of a file that is larger than `most` bytes
  hidden  if not every user can read the file
  error   the reason why the file could not be read
An entry is null if the path is not a regular file.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from typing import Any, Dict, Optional

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}


def content(path: str, most: int) -> Optional[Dict[str, Any]]:
    """
    Return a file's entry (content, size, `hidden` or error), or None if it is not a regular file.

    O_NONBLOCK is needed because a named pipe at the path would block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return {"error": error.strerror}
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if not status.st_mode & stat.S_IROTH:
            return {"hidden": True}
        text = file.read(most + 1)
    if len(text) > most:
        return {"bytes": status.st_size}
    return {"content": base64.b64encode(text).decode()}


if __name__ == "__main__":
    found = {path: content(path, PARAMETERS["most"]) for path in PARAMETERS["paths"]}
    print(json.dumps({"schema": 1, "files": found}, separators=(",", ":")))
