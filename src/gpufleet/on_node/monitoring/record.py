"""RUNS ON THE NODE, as root: record the controller's findings about the node.

Takes (`PARAMETERS`):
  files    {"check.prom": [[name, labels, value], ...]}: the samples of each metrics file, in the
           form of on_node/common/textfile.py
  deploy   the name of the deploy that has just ended; "" or absent if no deploy has
  sysroot  prefix of all paths; "" on a real machine
Prints one JSON document {"schema": 1, "error": sentence or "", "recorded": [file, ...]}. If the
directory of the metrics files does not exist, the node has no node facts yet, and nothing is
written. The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, List

from gpufleet.on_node.common import textfile

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# This directory has one file for each deploy. The file's text is the deploy's time in seconds since
# 1970. node_facts.py writes the times as metrics.
DEPLOYS = "/var/lib/gpufleet/deploys"


def main() -> None:
    """Write the files, and print their names."""
    done: List[str] = []
    said = ""
    try:
        record(done)
    except FileNotFoundError:
        said = "the node has no %s: deploys/vllm.py or deploys/node.py creates it" % (
            textfile.DIRECTORY
        )
    except Exception as error:
        said = "%s: %s" % (textfile.DIRECTORY, getattr(error, "strerror", None) or error)
    print(json.dumps({"schema": 1, "error": said, "recorded": done}))


def record(done: List[str]) -> None:
    """
    Write every metrics file and the time of a deploy. Add each written file to `done`.
    """
    root = PARAMETERS.get("sysroot", "")
    for name, samples in PARAMETERS.get("files", {}).items():
        textfile.write(name, textfile.text(samples), root)
        done.append(name)
    deploy = PARAMETERS.get("deploy")
    if deploy:
        path = "%s%s/%s" % (root, DEPLOYS, deploy)
        with open(path + ".tmp", "w", encoding="ascii") as file:
            file.write("%d\n" % time.time())
        os.replace(path + ".tmp", path)
        done.append(deploy)


if __name__ == "__main__":
    main()
