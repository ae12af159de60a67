"""
A queue server in a process of its own, so that its cost is not a client's.

    python -m benchmarks.measure_client.server SLOTS FIRST_SECONDS TOKEN_SECONDS

Prints its port. When its input ends it prints what it saw, as JSON: [arrived, began, ended, tokens]
of each request, in seconds of its own clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.queue_server import QueueServer

_END_SECONDS = 30.0


class Times(NamedTuple):
    """One request as the server saw it; None: it never began, or its client left."""

    arrived: float
    began: float | None
    ended: float | None
    tokens: int


class Served:
    """A server that runs; `times` are there after its end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.times: list[Times] = []


@contextmanager
def queue_server(slots: int, first_seconds: float, token_seconds: float) -> Iterator[Served]:
    """Run a server; yield where it is."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, (slots, first_seconds, token_seconds))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        served = Served(process.stdout.readline().decode().strip())
        try:
            yield served
        finally:
            printed, _ = process.communicate(timeout=_END_SECONDS)
            served.times = [Times(*each) for each in json.loads(printed)]


def main() -> None:
    """Serve until the input ends."""
    slots, first, token = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    with QueueServer(slots=slots, first_seconds=first, token_seconds=token) as server:
        print(server.url, flush=True)
        sys.stdin.read()
        record = list(server.record)
    print(json.dumps([[each.arrived, each.began, each.ended, each.tokens] for each in record]))


if __name__ == "__main__":
    main()
