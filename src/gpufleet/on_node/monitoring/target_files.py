"""RUNS ON THE NODE: read the target files that gpufleet wrote for this node's Prometheus.

Takes (`PARAMETERS`):
  directory  the directory of Prometheus' configuration
Prints one JSON document {"files": {"targets/vllm.json": [...], ...}}. A file that cannot be read is
not in the document. The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from typing import Any, Iterator, Tuple

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}


def files() -> "Iterator[Tuple[str, Any]]":
    """Yield each target file's name and content."""
    for path in glob.glob(PARAMETERS["directory"] + "/targets/*.json"):
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            continue
        if isinstance(found, list) and all(isinstance(each, dict) for each in found):
            yield os.path.relpath(path, PARAMETERS["directory"]), found


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"files": dict(files())}) + "\n")
