"""Parse a load client's output: outcomes, heartbeats and totals."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpufleet.load_test.client_transport import Link
from gpufleet.load_test.outcomes import Outcome
from gpufleet.sanitize import printable

MOST_LINE_BYTES = 16 << 20
"""The maximum length of a line in bytes. The gaps of an answer of a million tokens need 5 MB."""
MOST_SECONDS = 1e6
"""The longest time in seconds that a client may report. A level takes at most an hour or two."""
MOST_COUNT = 10_000_000
"""The largest number of tokens or requests that a client may report."""
_MOST_ERROR = 40
"""
The maximum length of an error reason. The reasons in failure_reasons have at most 20 characters.
"""
_EARLY_SECONDS = 1.0
"""The maximum seconds by which a closed loop's first request may be due before the load begins.

Normally the difference is some microseconds.
"""


class ClientError(Exception):
    """
    The client ended early, or printed an invalid line.

    The message continues the words "a load client".
    """


@dataclass(frozen=True)
class Totals:
    """The last line of a client's output."""

    end: str
    """
    Why the client ended.

    "stopped": the controller ended the level. "seconds": the time was over. "schedule": all
    requests of the trace were sent.
    """
    stopped_at: float
    """When the client stopped sending requests, in seconds since the load began."""
    sent: int
    unfinished: tuple[float, ...]
    """The due times of the requests that the client dropped, unfinished, at the end."""
    lag_p99: float
    """
    The p99 of the seconds between the due time of a request and its sending.

    In a closed loop, it is the delay of the client's event loop.
    """
    cpu_seconds: float
    """CPU seconds of the process since the load began."""
    cpu_share: float
    """The part of one core that the process used, from 0 to 1."""
    connects: int
    short: int
    """The number of answers with fewer tokens than requested."""


class Client:
    """The state of one client, parsed from its output."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._rest = b""
        self._in_flight: Counter[float] = Counter()
        self._heard = time.monotonic()
        self.ready = False
        self.port: int | None = None
        """The port of a ceiling server."""
        self.now = float("-inf")
        """
        All requests that were due until this time are either finished and read, or in `in_flight`.

        After the client's end, the time is infinite.
        """
        self.lag_p99 = self.cpu_share = self.peak_cpu_share = 0.0
        self.totals: Totals | None = None

    @property
    def silent_seconds(self) -> float:
        """Return the seconds since the client's last output."""
        return time.monotonic() - self._heard

    def in_flight(self, now: float) -> Iterator[float]:
        """Yield the due times of the client's unfinished requests that were due until `now`."""
        return (due for due in self._in_flight.elements() if due <= now)

    def say(self, line: str) -> None:
        """Send the client a line. Raises `ClientError` if the client has ended."""
        try:
            self._link.send(f"{line}\n".encode())
        except OSError:
            if self.totals is None:
                raise ClientError("has ended early") from None

    def read(self) -> list[Outcome]:
        """
        Return the outcomes printed since the last call.

        Raises `ClientError` if the client ended without totals, or printed an unknown line.
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
                raise ClientError("printed a line that is too long")
            for line in lines:
                try:
                    self._take(json.loads(line, parse_constant=_refuse), found)
                except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError,
                        RecursionError):  # fmt: skip
                    raise ClientError("printed a line that gpufleet cannot interpret") from None
        return found

    def _take(self, line: Any, found: list[Outcome]) -> None:
        if isinstance(line, list):
            outcome = _outcome(line)
            self._in_flight[outcome.due] -= 1
            if self._in_flight[outcome.due] <= 0:
                del self._in_flight[outcome.due]
            found.append(outcome)
        elif "now" in line and "in_flight" in line:
            self.now = _number(line["now"])
            self._in_flight = Counter(map(_number, line["in_flight"]))
            self.lag_p99, self.cpu_share = _number(line["lag_p99"]), _number(line["cpu_share"])
            self.peak_cpu_share = max(self.peak_cpu_share, self.cpu_share)
        elif "end" in line:
            self.totals = Totals(
                _word(line["end"]),
                _number(line["now"]),
                _count(line["sent"]),
                tuple(map(_number, line["unfinished"])),
                _number(line["lag_p99"]),
                _number(line["cpu_seconds"]),
                _number(line["cpu_share"]),
                _count(line["connects"]),
                _count(line["short"]),
            )
            self.now = float("inf")
            self._in_flight.clear()
            self.peak_cpu_share = max(self.peak_cpu_share, self.totals.cpu_share)
        elif "fault" in line:
            raise ClientError(f"failed: {printable(str(line['fault']))[:200]}")
        else:
            port = line.get("port")
            self.ready, self.port = "ready" in line, None if port is None else _port(port)


def _outcome(line: list[Any]) -> Outcome:
    """Return a finished request. Raises `ValueError` or `TypeError` for an invalid line."""
    due, sent, first, done, prompt_tokens, tokens, gaps, error = line
    seconds = tuple(gap / 1e6 for gap in gaps)
    if seconds:
        _number(min(seconds))
        _number(max(seconds))
    return Outcome(
        _number(due),
        _number(sent),
        None if first is None else _number(first),
        None if done is None else _number(done),
        _count(prompt_tokens),
        _count(tokens),
        seconds,
        _word(error),
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not -_EARLY_SECONDS <= value <= MOST_SECONDS:
        raise ValueError
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
        raise ValueError
    return value


def _port(value: Any) -> int:
    if not 0 < _count(value) < 1 << 16:
        raise ValueError
    return int(value)


def _word(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_ERROR or printable(value) != value:
        raise ValueError
    return value


def _refuse(constant: str) -> float:
    raise ValueError(constant)
