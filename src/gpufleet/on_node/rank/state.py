"""RUNS ON THE NODE: a rank's state in a file, for readers on this node.

The file is a JSON object; times are seconds since 1970:
  schema        1
  replica, rank, node
  phase         waiting | refused | pausing | starting | running | draining | ending | ended
  since         of the phase
  why           a sentence, for some phases: which node it waits for, what was refused
  at            when this was written: every few seconds, so an old time means that the rank hangs
  incarnation   null | {id, counter, since, master_port, rpc_port}
  peers         {node: {rank, address, connected, round_trip_ms, clock_offset_ms, boot_id}}
  last_end      null | {when, lived, why, rank, node}: of the last incarnation, `lived` in seconds
  short_lives   how many incarnations in a row ended within SHORT_SECONDS
  counter       of the last incarnation that this rank was part of

The file outlives the program, and the next start continues from it, so its directory must survive
restarts (RuntimeDirectoryPreserve=yes). A lost file only causes a start without a pause.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

SCHEMA = 1
REFRESH_SECONDS = 5
# An incarnation that served longer has not failed to start: the next one starts at once.
SHORT_SECONDS = 600
FIRST_PAUSE_SECONDS = 10
LONGEST_PAUSE_SECONDS = 300
KILLED = "the rank's program was killed, or its node went down"


class State:
    """The state file, and its previous content."""

    def __init__(self, path: str, replica: str, rank: int, node: str) -> None:
        self.path = path
        before = self._before()
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "replica": replica,
            "rank": rank,
            "node": node,
            "phase": "waiting",
            "since": int(time.time()),
            "why": "",
            "incarnation": None,
            "peers": {},
            "last_end": before.get("last_end"),
            "short_lives": number(before.get("short_lives")),
            "counter": number(before.get("counter")),
        }
        self.problem: str | None = None
        """Reason why the file could not be written, or None."""
        self._written = ""
        self._next = 0.0
        if before.get("incarnation"):  # killed, or the node lost power: no end was written
            self.document["incarnation"] = before["incarnation"]
            self.end(KILLED, rank, node, when=number(before.get("at")))

    @property
    def counter(self) -> int:
        """Return the number of the last incarnation."""
        return int(self.document["counter"])

    def pause_seconds(self) -> float:
        """
        Return the pause after the last end in seconds, which is 0 at first and then increases.
        """
        failures = int(self.document["short_lives"]) - 1
        if failures <= 0:
            return 0.0
        return min(float(LONGEST_PAUSE_SECONDS), FIRST_PAUSE_SECONDS * 2.0 ** (failures - 1))

    def pause_left(self) -> float:
        """Return the remaining seconds of the pause."""
        end = self.document["last_end"]
        if not end:
            return 0.0
        now = time.time()
        if number(end.get("when")) > now:  # the clock was set back, and must not keep us for hours
            end["when"] = int(now)
        return max(0.0, self.pause_seconds() - (now - number(end.get("when"))))

    def set_phase(self, phase: str, why: str = "") -> None:
        """Record the phase; `since` does not change if only `why` changes."""
        if phase != self.document["phase"]:
            self.document["since"] = int(time.time())
        self.document["phase"] = phase
        self.document["why"] = why

    def begin_incarnation(self, incarnation: dict[str, Any]) -> None:
        """Record the current incarnation."""
        self.document["incarnation"] = {**incarnation, "since": int(time.time())}
        self.document["counter"] = incarnation["counter"]

    def end(self, why: str, rank: int, node: str, *, stopped: bool = False, when: int = 0) -> None:
        """Record the end of the incarnation; a requested stop is not a failure."""
        incarnation = self.document["incarnation"]
        if not incarnation:
            return
        now = when or int(time.time())
        lived = max(0, now - number(incarnation.get("since")))
        self.document["last_end"] = {
            "when": now,
            "lived": lived,
            "why": why,
            "rank": rank,
            "node": node,
        }
        self.document["incarnation"] = None
        short = lived < SHORT_SECONDS and not stopped
        self.document["short_lives"] = self.document["short_lives"] + 1 if short else 0

    def write(self, now: float) -> None:
        """Write the file if its content is new or the last write was some seconds ago."""
        text = json.dumps(self.document, sort_keys=True)
        if text == self._written and now < self._next:
            return
        self._written, self._next = text, now + REFRESH_SECONDS
        temporary = self.path + ".new"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({**self.document, "at": int(time.time())}, file, sort_keys=True)
                os.fchmod(file.fileno(), 0o644)
            os.replace(temporary, self.path)
            self.problem = None
        except OSError as error:
            self.problem = "%s: %s" % (self.path, error.strerror)

    def _before(self) -> dict[str, Any]:
        try:
            with open(self.path, encoding="utf-8") as file:
                document = json.loads(file.read(1 << 20))
        except (OSError, ValueError):
            return {}
        if not isinstance(document, dict):
            return {}
        for name in ("incarnation", "last_end"):
            if not isinstance(document.get(name), dict):
                document[name] = None
        return document


def number(value: Any) -> int:
    """Return a number from an old file as an integer, or 0 if it is not a number."""
    return int(value) if isinstance(value, (int, float)) else 0
