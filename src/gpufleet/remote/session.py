"""Run all short queries of a run in one Python process on a node. This is the controller's part.

The node's part, `on_node/remote/session.py`, describes how much time this saves. An error of a
session only costs time. The session is then abandoned, and the caller queries the node without a
session, which also reports errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import gevent
from gevent import Timeout

from gpufleet.on_node.remote.session import MOST, READY
from gpufleet.remote import payload
from gpufleet.remote.payload import Payload

# The loader is visible in the node's process list. The program that it runs, and all queries, are
# not visible. With -S, the node's own packages are not searched or used.
LOADER = "import sys; b = sys.stdin.buffer; exec(b.read(int(b.readline())))"
COMMAND = f"command -v python3 >/dev/null && exec python3 -IS -c '{LOADER}'"

_CHUNK = 1 << 16
# The maximum number of bytes that a login may print before the session's output. A banner has some
# kilobytes.
_MOST_BEFORE = 1 << 18
# The start takes 0.1 s on an idle node. After this limit, most of a probe's time limit remains to
# query a silent node without a session, which shows the problem.
_GREETS_SECONDS = 10


class BrokenError(Exception):
    """The session does not answer, or its answer is invalid."""


class Streams(Protocol):
    """A command running on a node, with binary streams."""

    @property
    def write(self) -> Callable[[bytes], None]: ...

    @property
    def read(self) -> Callable[[int], bytes]: ...


class Session:
    """A running session. It ends with `close`."""

    def __init__(self, streams: Streams, close: Callable[[], None]) -> None:
        self.close = close
        self._streams = streams
        self._read = bytearray()
        self.busy = False
        """Whether a greenlet waits for an answer of this session."""
        self._begun = False
        self._keeps = True
        """
        Whether the node may have stored compiled code.

        If so, a request is first sent without the source.
        """

    def run(self, program: str, seconds: float) -> tuple[int | None, bytes, bytes]:
        """
        Run a program on the node.

        Return its status and both outputs. The status is None if the program was killed at its time
        limit, or because it printed too much. Raises `BrokenError`, and the connection's own
        exceptions.
        """
        brief = program.brief if self._keeps and isinstance(program, Payload) else None
        if brief is not None:
            found = self._asked(brief, seconds)
            if found[0] not in {payload.LACKS, payload.KEEPS_NOTHING}:
                return found
            self._keeps = found[0] == payload.LACKS
        return self._asked(program, seconds)

    def _asked(self, program: str, seconds: float) -> tuple[int | None, bytes, bytes]:
        text = program.encode()
        asked = b"%d %f\n%b" % (len(text), seconds, text)
        if not self._begun:
            own = payload.program("remote/session").encode()
            asked = b"%d\n%b%b" % (len(own), own, asked)
        # The request is sent while the answer is read, because a node may print before it reads its
        # input.
        sender = gevent.spawn(self._send, asked)
        gevent.sleep(0)
        try:
            return self._answer()
        finally:
            sender.kill(timeout=1)

    def _send(self, asked: bytes) -> None:
        """
        Write a request. Errors are ignored, because the node's output or silence shows the reason.
        """
        with suppress(Exception):
            self._streams.write(asked)

    def _answer(self) -> tuple[int | None, bytes, bytes]:
        with Timeout(_GREETS_SECONDS, BrokenError):
            before = 0
            while not self._begun:
                line = self._line(_MOST_BEFORE)
                before += len(line)
                self._begun = line == READY.encode()
                if before > _MOST_BEFORE:
                    raise BrokenError
        try:
            about = json.loads(self._line(200))
            status, out, error = about["status"], int(about["out"]), int(about["error"])
        except (ValueError, KeyError, TypeError) as problem:
            raise BrokenError from problem
        if out + error > MOST + 2 * _CHUNK:
            raise BrokenError
        return status, self._bytes(out), self._bytes(error)

    def _more(self) -> None:
        chunk = self._streams.read(_CHUNK)
        if not chunk:
            raise BrokenError
        self._read += chunk
        # Received data is read without blocking: yield to other greenlets, such as the deadline's.
        gevent.sleep(0)

    def _line(self, most: int) -> bytes:
        while (end := self._read.find(b"\n")) < 0:
            if len(self._read) > most:
                raise BrokenError
            self._more()
        return self._bytes(end + 1).strip()

    def _bytes(self, count: int) -> bytes:
        while len(self._read) < count:
            self._more()
        found = bytes(self._read[:count])
        del self._read[:count]
        return found
