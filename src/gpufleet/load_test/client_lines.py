"""Read what a load client prints: outcomes, heartbeats, totals."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpufleet.load_test.client_transport import Link
from gpufleet.load_test.outcomes import Outcome

MOST_LINE_BYTES = 16 << 20
"""An answer of a million tokens has 5 MB of gaps."""


class ClientError(Exception):
    """A client ended early, or did what no client does; the text goes on after "a load client"."""


@dataclass(frozen=True)
class Totals:
    """The last line of a client."""

    end: str
    """"stopped" by the controller, "seconds" or "schedule"."""
    stopped_at: float
    """Seconds since the load began when its last request was over."""
    sent: int
    unfinished: tuple[float, ...]
    """When requests were due that were dropped at the end."""
    lag_p99: float
    """Seconds from due to sent; in a closed loop, how late its loop was."""
    cpu_seconds: float
    """Processor time of the process since the load began."""
    cpu_share: float
    """Of one core."""
    connects: int
    short: int
    """Answers with fewer tokens than were asked for."""


class Client:
    """One client, as far as its lines tell."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._rest = b""
        self._in_flight: Counter[float] = Counter()
        self._heard = time.monotonic()
        self.ready = False
        self.port: int | None = None
        """Of a server for the ceiling."""
        self.now = float("-inf")
        """Every request due until then has been printed or is in flight; infinite at its end."""
        self.lag_p99 = self.cpu_share = self.peak_cpu_share = 0.0
        self.totals: Totals | None = None

    @property
    def silent_seconds(self) -> float:
        """Return for how long it has printed nothing."""
        return time.monotonic() - self._heard

    def in_flight(self, now: float) -> Iterator[float]:
        """Return when its unfinished requests were due, of those due until `now`."""
        return (due for due in self._in_flight.elements() if due <= now)

    def say(self, line: str) -> None:
        """Send it a line. Raises `ClientError` if it has ended."""
        try:
            self._link.send(f"{line}\n".encode())
        except OSError:
            if self.totals is None:
                raise ClientError("has ended early") from None

    def read(self) -> list[Outcome]:
        """
        Return the outcomes it has printed since the last call.

        Raises `ClientError`, with what it did, if it has ended without totals, or printed anything
        that a client does not.
        """
        found: list[Outcome] = []
        while (data := self._link.receive()) is not None:
            if not data:
                if self.totals is None and self.port is None:
                    raise ClientError("has ended early")
                break
            self._heard = time.monotonic()
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > MOST_LINE_BYTES:
                raise ClientError("printed a line without end")
            for line in lines:
                try:
                    self._take(json.loads(line), found)
                except (ValueError, TypeError, KeyError):
                    raise ClientError("printed what is no line of a load client") from None
        return found

    def _take(self, line: Any, found: list[Outcome]) -> None:
        if isinstance(line, list):
            due, sent, first, done, prompt_tokens, tokens, gaps, error = line
            self._in_flight[due] -= 1
            if self._in_flight[due] <= 0:
                del self._in_flight[due]
            seconds = tuple(gap / 1e6 for gap in gaps)
            found.append(
                Outcome(due, sent, first, done, prompt_tokens, tokens, seconds, str(error))
            )
        elif "now" in line and "in_flight" in line:
            self.now = line["now"]
            self._in_flight = Counter(line["in_flight"])
            self.lag_p99, self.cpu_share = line["lag_p99"], line["cpu_share"]
            self.peak_cpu_share = max(self.peak_cpu_share, self.cpu_share)
        elif "end" in line:
            self.now = float("inf")
            self._in_flight.clear()
            self.peak_cpu_share = max(self.peak_cpu_share, line["cpu_share"])
            self.totals = Totals(
                line["end"],
                line["now"],
                line["sent"],
                tuple(line["unfinished"]),
                line["lag_p99"],
                line["cpu_seconds"],
                line["cpu_share"],
                line["connects"],
                line["short"],
            )
        elif "fault" in line:
            raise ClientError(f"failed: {line['fault']}")
        else:
            self.ready, self.port = "ready" in line, line.get("port")
