"""RUNS ON THE NODE: start load clients, and transfer their lines over one connection.

Takes (`PARAMETERS`):
  loader          Python code that reads a program from standard input and runs the program
  silent_seconds  the group ends if the controller sends nothing for this time

A level of a load test has up to 64 clients, but sshd allows only ten sessions for a connection
(`MaxSessions`). So all clients share one session. Each message, in either direction, is a line
`WORD NUMBER LENGTH` followed by LENGTH bytes. The controller sends:
  open N   the program of client N, which the group starts; the client's input stays open
  say N    more input for client N
  end N    the end of the input of client N; the group kills the client if it has not ended after
           ENDS_SECONDS
  alive 0  no bytes; the controller sends this message every few seconds
The group sends the line GREETING, and then:
  ready 0  {"cores": the number of cores that this process may use}
  out N    bytes that client N has printed
  over N   {"status": the process' status, "said": the last line of its errors}; this is the last
           message about client N

A program goes from pipe to pipe, so it is in no argument, environment or file. When the controller
ends for any reason, its connection closes, and so does the input of this process. Then all clients
are killed, and this process ends. A controller that lost power does not close its connection, so
this process also ends if the controller is silent. If this process is killed, the clients' inputs
end, and therefore the clients end too. The program needs only Python 3.8 and the standard library.
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
"""
Line that marks the beginning of the messages, because a login may have printed other lines before.
"""
PIECE_BYTES = 1 << 16
"""Maximum bytes of a message to the controller."""
UNSENT_BYTES = 1 << 20
"""
If more bytes than this wait for the controller, no output of clients is read.
"""
ENDS_SECONDS = 2.0
_ERROR_BYTES = 2048
_LOOK_SECONDS = 0.5


class Child:
    """A client, and the data that wait to be written to the client."""

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
        Write as much as the client's pipe accepts. If the pipe fails, the client has ended.
        """
        try:
            while self.unsent:
                del self.unsent[: os.write(self.input, self.unsent[:PIECE_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self.unsent.clear()

    def end(self) -> None:
        """Close the client's input, and set the time by which the client must end."""
        self.kill_at = time.monotonic() + ENDS_SECONDS
        self.unsent.clear()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill the client and all processes in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the ends of the client's pipes that this process holds."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def read(self, descriptor: int) -> bytes:
        """
        Return the client's new output.

        Record the end of the output. Keep the last bytes of the error output.
        """
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
    """All clients, and the connection to the controller in both directions."""

    def __init__(self, loader: str, silent_seconds: float) -> None:
        self._loader, self._silent = loader, silent_seconds
        self._children: Dict[int, Child] = {}
        self._unsent = bytearray()
        self._unread = bytearray()
        self._heard = time.monotonic()

    def run(self) -> None:
        """Transfer messages until the controller disconnects."""
        for descriptor in (0, 1):
            os.set_blocking(descriptor, False)
        # Bytes after this program's text that the reader of the text has already read.
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
        """
        Wait for the next event and handle it. Return whether the controller is still connected.
        """
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
        """Execute all messages that have arrived completely."""
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
                self._tell_over(number, 1, "the client cannot be started: %s" % error.strerror)
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
        """Report the clients that have ended. Kill the clients whose deadline has passed."""
        for number, child in list(self._children.items()):
            if time.monotonic() > child.kill_at:
                child.kill()
            # The end of the process is sufficient, because a different process may keep its outputs
            # open.
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
