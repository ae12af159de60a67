"""RUNS ON THE NODE, as root: record the controller's findings about the node.

Takes (`PARAMETERS`):
  files    {"check.prom": [[name, labels, value], ...]}: metrics, as on_node/common/textfile.py has
           them
  deploy   the name of the deploy that has just ended; "" or absent: none has
  sysroot  "" on a real machine
Prints one JSON document {"schema": 1, "error": sentence or "", "recorded": [file, ...]}. A node
without the directory has no node facts yet: nothing is written there. Python 3.8, standard library.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, List

from gpufleet.on_node.common import textfile

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# One file for each deploy, whose text is a time in seconds since 1970; node_facts.py serves them.
DEPLOYS = "/var/lib/gpufleet/deploys"


def main() -> None:
    """Write the files, and print their names."""
    done: List[str] = []
    said = ""
    try:
        record(done)
    except FileNotFoundError:
        said = "it has no %s: deploys/vllm.py or deploys/node.py makes it" % textfile.DIRECTORY
    except Exception as error:
        said = "%s: %s" % (textfile.DIRECTORY, getattr(error, "strerror", None) or error)
    print(json.dumps({"schema": 1, "error": said, "recorded": done}))


def record(done: List[str]) -> None:
    """Write every file, and the end of a deploy; `done` lists the files written so far."""
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
