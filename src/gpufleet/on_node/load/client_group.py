"""RUNS ON THE NODE: start load clients, and carry their lines over one connection.

Takes (`PARAMETERS`):
  loader          Python that reads a program from its standard input and runs it
  silent_seconds  the group ends after this time without a byte from the controller

sshd allows ten sessions of a connection (`MaxSessions`), and a level has up to 64 clients: they
share one session. Each message in either direction is a line `WORD NUMBER LENGTH` and LENGTH bytes:

  open N   program of client N, which this starts; its input stays open
  say N    more of its input
  end N    end of its input; it is killed if it has not ended ENDS_SECONDS later
  alive 0  nothing; the controller sends it every few seconds

and to the controller, after the line GREETING:

  ready 0  {"cores": that this process may use}
  out N    what client N has printed
  over N   {"status": of the process, "said": last line of its errors}; the last message of N

A program passes from pipe to pipe: it is in no argument, environment or file. When the controller
ends for any reason, its connection and the input here close: all clients are killed, and this
process ends. A controller that lost power closes no connection, so silence also ends this
process. If this process is killed, the clients' inputs end with it, and so do they. Python 3.8,
standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, Dict

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}

GREETING = "gpufleet: load clients"
"""First message's mark, because a login may have printed other lines before."""
PIECE_BYTES = 1 << 16
"""Maximum bytes of a message to the controller."""
UNSENT_BYTES = 1 << 20
"""Bytes waiting for the controller above which clients are not read and keep their output."""
ENDS_SECONDS = 2.0
_ERROR_BYTES = 2048
_LOOK_SECONDS = 0.5


class Child:
    """A client, and the data queued for it."""

    def __init__(self, program: bytes, loader: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable or "python3", "-IS", "-c", loader],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.input, self.output, self.errors = [
            pipe.fileno()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr)
            if pipe is not None
        ]
        for descriptor in (self.input, self.output, self.errors):
            os.set_blocking(descriptor, False)
        self.unsent = bytearray(b"%d\n%b" % (len(program), program))
        self.open_ends = {self.output, self.errors}
        self.said = b""
        self.kill_at = float("inf")

    def write(self) -> None:
        """
        Write as much as the client's pipe accepts; a failed pipe means that the client has ended.
        """
        try:
            while self.unsent:
                del self.unsent[: os.write(self.input, self.unsent[:PIECE_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self.unsent.clear()

    def end(self) -> None:
        """Close the client's input, and set the deadline for its end."""
        self.kill_at = time.monotonic() + ENDS_SECONDS
        self.unsent.clear()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill the client and all processes in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close this process' ends of the client's pipes."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def read(self, descriptor: int) -> bytes:
        """Return the client's output; note its end, and keep the last bytes of its errors."""
        try:
            data = os.read(descriptor, PIECE_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self.open_ends.discard(descriptor)
        if descriptor == self.errors:
            self.said = (self.said + data)[-_ERROR_BYTES:]
            return b""
        return data


class Group:
    """All clients, and both directions of the connection to the controller."""

    def __init__(self, loader: str, silent_seconds: float) -> None:
        self._loader, self._silent = loader, silent_seconds
        self._children: Dict[int, Child] = {}
        self._unsent = bytearray()
        self._unread = bytearray()
        self._heard = time.monotonic()

    def run(self) -> None:
        """Carry messages until the controller disconnects."""
        for descriptor in (0, 1):
            os.set_blocking(descriptor, False)
        # What the reader of this program's text has read beyond it.
        self._unread += sys.stdin.buffer.peek() if hasattr(sys.stdin.buffer, "peek") else b""
        self._unsent += ("\n%s\n" % GREETING).encode()
        self._tell("ready", 0, json.dumps({"cores": len(os.sched_getaffinity(0))}).encode())
        try:
            self._take()
            while self._step():
                pass
        finally:
            for child in self._children.values():
                child.kill()

    def _step(self) -> bool:
        """Wait for the next event and handle it; return whether the controller is connected."""
        poll = select.poll()
        of: Dict[int, Child] = {}
        poll.register(0, select.POLLIN)
        if self._unsent:
            poll.register(1, select.POLLOUT)
        for child in self._children.values():
            if child.unsent:
                of[child.input] = child
                poll.register(child.input, select.POLLOUT)
            for descriptor in child.open_ends if len(self._unsent) < UNSENT_BYTES else ():
                of[descriptor] = child
                poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(_LOOK_SECONDS * 1000):
            if descriptor == 0:
                if not self._read():
                    return False
            elif descriptor == 1:
                if not self._flush():
                    return False
            elif descriptor == of[descriptor].input:
                of[descriptor].write()
            else:
                self._carry(of[descriptor], descriptor)
        self._bury()
        return time.monotonic() - self._heard < self._silent

    def _read(self) -> bool:
        try:
            data = os.read(0, PIECE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._heard = time.monotonic()
        self._unread += data
        self._take()
        return bool(data)

    def _take(self) -> None:
        """Execute all complete messages."""
        while True:
            end = self._unread.find(b"\n")
            if end < 0:
                return
            word, number, length = self._unread[:end].decode("ascii").split()
            after = end + 1 + int(length)
            if len(self._unread) < after:
                return
            data = bytes(self._unread[end + 1 : after])
            del self._unread[:after]
            self._do(word, int(number), data)

    def _do(self, word: str, number: int, data: bytes) -> None:
        if word == "open":
            try:
                self._children[number] = Child(data, self._loader)
            except OSError as error:
                self._tell_over(number, 1, "it cannot be started: %s" % error.strerror)
            return
        child = self._children.get(number)
        if child is None or child.kill_at < float("inf"):
            return
        if word == "say":
            child.unsent += data
        elif word == "end":
            child.end()

    def _carry(self, child: Child, descriptor: int) -> None:
        data = child.read(descriptor)
        if data:
            number = next(n for n, each in self._children.items() if each is child)
            self._tell("out", number, data)

    def _bury(self) -> None:
        """Report clients that have ended, and kill those past their deadline."""
        for number, child in list(self._children.items()):
            if time.monotonic() > child.kill_at:
                child.kill()
            # Its end alone is enough where another process keeps its outputs open.
            status = child.process.poll()
            if status is None or (child.open_ends and time.monotonic() <= child.kill_at):
                continue
            lines = child.said.decode("utf-8", "replace").strip().splitlines()
            child.close()
            del self._children[number]
            self._tell_over(number, status, lines[-1] if lines else "")

    def _tell_over(self, number: int, status: int, said: str) -> None:
        about = {"status": status, "said": said[:200]}
        self._tell("over", number, json.dumps(about).encode())

    def _tell(self, word: str, number: int, data: bytes) -> None:
        self._unsent += b"%b %d %d\n%b" % (word.encode(), number, len(data), data)

    def _flush(self) -> bool:
        try:
            while self._unsent:
                del self._unsent[: os.write(1, self._unsent[:PIECE_BYTES])]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


if __name__ == "__main__":
    Group(PARAMETERS["loader"], PARAMETERS["silent_seconds"]).run()
