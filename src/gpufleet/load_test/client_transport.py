"""Start a load client's program locally or on a node, and exchange data with it.

A transport is a function that takes the program and returns a `Link`. `local_client` runs the
program on this machine. `client_places.NodeClients.start` runs the program on a node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from gpufleet.remote.payload import Payload
from gpufleet.remote.session import LOADER
from gpufleet.sanitize import printable

PIECE_BYTES = 1 << 18
ENDS_SECONDS = 2.0
"""
Time limit in seconds for a program to end after its input is closed.

Normally this takes milliseconds.
"""
TAKES_SECONDS = 30.0
"""Time limit in seconds for a program to read its input."""
_WAIT_SECONDS = 0.005


class Link(Protocol):
    """A running program with binary streams."""

    def send(self, data: bytes) -> None:
        """Write to the program's input. Raises `OSError` if it accepts no more input."""

    def receive(self) -> bytes | None:
        """
        Return new output of the program without waiting.

        The result is None if there is none, and b"" after the program's end.
        """

    def close(self) -> str:
        """Close the program's input, end the program, and return why the program failed, or ""."""


Transport = Callable[[Payload], Link]


class LocalLink:
    """A program on this machine, in its own process group, so that Ctrl-C does not reach it."""

    def __init__(self, program: Payload) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the program
        self._why: str | None = None
        """
        None until the program is closed. Afterwards it is the reason why the program failed, or "".
        """
        self._process = subprocess.Popen(
            [sys.executable, "-IS", "-c", LOADER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            process_group=0,
        )
        pipes = [each for each in (self._process.stdin, self._process.stdout) if each is not None]
        self._in, self._out = (pipe.fileno() for pipe in pipes)
        self._pipes = pipes
        # Polled instead of a blocking read, so that gevent's other tasks and clients continue.
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        text = program.encode()
        # The program has ended; its closed output shows that.
        with suppress(OSError):
            self.send(b"%d\n%b" % (len(text), text))

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def send(self, data: bytes) -> None:
        """Write to the program's input (`Link.send`)."""
        until = time.monotonic() + TAKES_SECONDS
        while data:
            try:
                data = data[os.write(self._in, data) :]
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError from None
                time.sleep(_WAIT_SECONDS)

    def receive(self) -> bytes | None:
        """Return the program's output (`Link.receive`)."""
        try:
            return os.read(self._out, PIECE_BYTES)
        except BlockingIOError:
            return None

    def close(self) -> str:
        """End the program (`Link.close`)."""
        if self._why is not None:
            return self._why
        status = self._process.poll()
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        try:
            self._process.wait(timeout=ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._why = self._failure(status) if status else ""
        self._errors.close()
        return self._why

    def _failure(self, status: int) -> str:
        self._errors.seek(0)
        lines = self._errors.read(PIECE_BYTES).decode("utf-8", "replace").split("\n")
        return failure_text(status, next((line for line in reversed(lines) if line.strip()), ""))


def failure_text(status: int, said: str) -> str:
    """
    Return a failed program's status or signal, and the last line of its errors.

    >>> failure_text(1, "MemoryError"), failure_text(-9, "")
    ('status 1: MemoryError', 'signal 9')
    """
    if status < 0:
        return f"signal {-status}"
    return f"status {status}" + (f": {printable(said)[:200]}" if said else "")


def local_client(program: Payload) -> LocalLink:
    """Start a program on this machine."""
    return LocalLink(program)
