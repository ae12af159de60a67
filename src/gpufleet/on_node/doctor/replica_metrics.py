"""RUNS ON THE NODE: each replica's counters, read twice some seconds apart.

Takes (JSON header `PARAMETERS`):
  families  prefixes of the names of metrics to return
  apart     seconds between the two looks
Prints one JSON document {"schema": 1, "replicas": {id: ...}}, or `replicas` as {"missing": reason}.
Of a replica:
  seconds   between the two looks, as this node measured them
  servers   {url: [first, last]}, each {"text": lines of /metrics} or {"error": reason}; none for a
            rank that has no server
or {"missing": reason}.

It changes nothing. Every replica is read by its own process, with a deadline.
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

# Beside the wait, for both looks: /metrics of a busy server takes a second or two. A server that
# accepts and never answers costs this and the wait; doctor has 10 s for everything.
LOOK_SECONDS = 4


def main() -> None:
    """Sample every replica and print the document."""
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
    """Return the counters of a stage's servers at two moments."""
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
