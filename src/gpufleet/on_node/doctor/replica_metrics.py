"""RUNS ON THE NODE: read each replica's counters twice, some seconds apart.

Takes (JSON header `PARAMETERS`):
  families  prefixes of the names of metrics to return
  apart     seconds between the two reads
Prints one JSON document {"schema": 1, "replicas": {id: ...}}, or `replicas` as {"missing": reason}.
A replica has these keys, or is {"missing": reason}:
  seconds   time between the two reads, as measured on this node
  servers   {url: [first, last]}, where each of the two is {"text": lines of /metrics} or
            {"error": reason}; empty for a rank that has no server

The program changes nothing. Each replica is read by its own process, with a deadline.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

from gpufleet.on_node.common import unit_journal
from gpufleet.on_node.common.answers import is_missing, read
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.serving import replica_answers

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# Time limit of both reads, without the wait between them. A busy server needs one or two seconds
# for /metrics. A server that accepts a connection and never answers costs this time and the wait.
# The doctor has 10 s for everything.
LOOK_SECONDS = 4


def main() -> None:
    """Read every replica's counters and print the document."""
    watch = Watch()
    found = read(unit_journal.ids)
    names = [] if is_missing(found) else found
    for name in names:
        watch.ask(name, partial(sample_twice, name), float(PARAMETERS["apart"]) + LOOK_SECONDS)
    answers = watch.answers(*names)
    watch.stop()
    document = {"schema": 1, "replicas": found if is_missing(found) else answers}
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def sample_twice(stage: str) -> dict[str, Any]:
    """Return the counters of a stage's servers, read at two times."""
    replica_answers.PARAMETERS["families"] = PARAMETERS["families"]
    asked = {"replica": stage, "prompts": [], "times": 0}
    begun = time.monotonic()
    first = replica_answers.replica(asked)["servers"]
    if not first:
        return {"seconds": 0.0, "servers": {}}
    time.sleep(float(PARAMETERS["apart"]))
    between = time.monotonic() - begun
    last = replica_answers.replica(asked)["servers"]
    return {
        "seconds": round(between, 3),
        "servers": {
            url: [first[url]["metrics"], last[url]["metrics"]] for url in first if url in last
        },
    }


if __name__ == "__main__":
    main()
