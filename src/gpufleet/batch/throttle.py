"""Compute the number of batch lines that may be in flight. Pure: all times are arguments.

The lowest of three limits applies:

- The fleet's idle capacity (`load_test/guest.py`). The limit starts at 1 and doubles at each
  observation until it has reached this capacity.
- A hold after a request that was rejected or lost. No line is sent for 1, 2, 4, ... 60 s, and then
  only one line at first.
- 0, if the last observation is too old.
"""

from __future__ import annotations

from gpufleet.batch.replies import LONGEST_BACK_OFF_SECONDS, back_off_seconds
from gpufleet.load_test.guest import Allowance

STALE_SECONDS = 60.0
"""
The age in seconds from which a reading is too old. A node has 30 s to answer, and a connection to
the node 40 s.
"""


class Throttle:
    """
    The limit of lines in flight.

    Callers query the limit before each line. They update it after each observation, answer and
    failure.
    """

    def __init__(self, most: int | None, now: float) -> None:
        """
        Set the maximum number of lines in flight. If it is None, only the idle capacity limits it.
        """
        self._most = most
        self._looked_at = now
        self._allowed = 0
        self._why = "the fleet's load has not been read yet"
        self._failures = 0
        self._held_at = self._held_until = now

    def allow(self, found: Allowance, now: float) -> None:
        """Record a reading of the servers' load."""
        self._looked_at = now
        wanted = found.most if self._most is None else min(found.most, self._most)
        self._allowed = min(wanted, max(1, 2 * self._allowed))
        self._why = found.why

    def record_success(self) -> None:
        """Record an answer. After a hold, an answer ends the limit of one line."""
        self._failures = 0

    def record_failure(self, asked_at: float, now: float, retry_after: float = 0.0) -> None:
        """Record a failed line that makes other lines wait."""
        if asked_at < self._held_at:
            return  # the line was sent before the others failed, so it is the same event
        self._failures += 1
        wanted = max(back_off_seconds(self._failures), retry_after)
        self._held_at = now
        self._held_until = now + min(LONGEST_BACK_OFF_SECONDS, wanted)

    def limit(self, now: float) -> int:
        """Return the number of lines that may be in flight."""
        if now - self._looked_at > STALE_SECONDS or now < self._held_until:
            return 0
        return min(1, self._allowed) if self._failures else self._allowed

    def why(self, now: float) -> str:
        """Return why no line may be sent now, or "" if lines may be sent."""
        if now - self._looked_at > STALE_SECONDS:
            return "the fleet's load is no longer known"
        if now < self._held_until:
            return "the fleet refuses or loses requests, so gpufleet waits and tries again"
        return "" if self._allowed else self._why
