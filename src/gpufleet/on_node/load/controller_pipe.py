"""RUNS ON THE NODE: exchange lines with the controller without blocking an event loop.

Output is buffered, because a slow controller must not delay requests or their times. When the
controller ends for any reason, its pipes close, and this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
from typing import Callable

UNREAD_BYTES = 256 << 20
"""Maximum bytes of lines that wait for the controller. If more bytes wait, the process ends."""
PIPE_BYTES = 1 << 20
"""The default of fs.pipe-max-size in Linux, which is the limit for unprivileged users."""
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ of linux/fcntl.h; Python has this constant from 3.10 on
_CHUNK = 1 << 16


class LineWriter:
    """A writer of lines to standard output, which writes as soon as the controller reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int = 1) -> None:
        self._loop, self._descriptor = loop, descriptor
        self._unwritten = bytearray()
        self.drained = asyncio.Event()
        """An event that is set while no lines wait for the controller."""
        enlarge(descriptor)
        os.set_blocking(descriptor, False)

    def write(self, line: bytes) -> None:
        """Write one complete line."""
        if self._unwritten:
            self._unwritten += line
            if len(self._unwritten) > UNREAD_BYTES:
                os._exit(1)
            return
        self._unwritten += line
        self._flush()
        if self._unwritten:
            self.drained.clear()
            self._loop.add_writer(self._descriptor, self._flush)

    def _flush(self) -> None:
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self._descriptor, self._unwritten)]
        except BlockingIOError:
            return
        except OSError:  # the controller has ended
            os._exit(1)
        if not self.drained.is_set():
            self._loop.remove_writer(self._descriptor)
            self.drained.set()


class CommandReader:
    """A reader that passes on each line of standard input. At its end, the process ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""
        os.set_blocking(0, False)
        # Bytes after the program's text that the reader of the text has already read.
        buffered = sys.stdin.buffer.peek() if hasattr(sys.stdin.buffer, "peek") else b""
        if buffered:
            self._lines(sys.stdin.buffer.read(len(buffered)))
        loop.add_reader(0, self._read)

    def _read(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            # The process' connections are closed too, so the server stops computing the answers.
            os._exit(0)
        self._lines(data)

    def _lines(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode("ascii", "replace"))


def enlarge(descriptor: int) -> None:
    """Enlarge the buffer of a pipe, if `descriptor` is a pipe and the system allows this."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, _SET_PIPE_SIZE, PIPE_BYTES)
