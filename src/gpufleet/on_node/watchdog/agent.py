"""RUNS ON THE NODE: answer HAProxy's agent checks with the state of stages.

The client sends one line with the name of a stage. The agent answers with one line:
  up            the stage runs and is not known to be stalled
  down #stalled the stage is stalled (without the space, HAProxy would read an unknown word)
  (empty)       the stage's state is unknown, so HAProxy keeps the state of the last answer
These words set the operational state. The agent never sends the words that change the
administrative state (`ready`, `drain`, `maint`), because only the gateway drains servers (HAProxy's
manual, `agent-check`).

The agent never blocks. Each client must finish within `CALLER_SECONDS`. The number of concurrent
clients, the connections per second and the bytes that are read from each client are limited.
Clients above a limit wait in the kernel's queue. If a check fails there, HAProxy's state does not
change.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Callable

CALLER_SECONDS = 2.0
CALLERS = 64
# A gateway checks each server once in 2 s. Two gateways with 64 servers make 64 checks per second.
TAKEN = 256
"""Maximum number of connections per second, so that no client blocks the loop."""
LINE_BYTES = 256
"""Maximum bytes of a question. A stage's name has at most 50 characters."""
LISTEN_AGAIN_SECONDS = 10.0
"""
Seconds between two attempts to listen, if the port is in use or the address does not exist yet.
"""


class Caller:
    """A connection whose question has not been answered."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.got = b""

    def question(self) -> str | None:
        """
        Return the gateway's question, "" if it is invalid, or None if it is incomplete.
        """
        try:
            piece = self.connection.recv(LINE_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return ""
        self.got += piece
        line, ended, _ = self.got.partition(b"\n")
        if ended:
            return line.decode("ascii", "replace").strip()
        return None if piece and len(self.got) < LINE_BYTES else ""


class Agent:
    """The listening port and its connections."""

    def __init__(
        self,
        address: str,
        port: int,
        word: Callable[[str], str],
        say: Callable[[str, int], None],
    ) -> None:
        """Prepare an agent. `word` is a function that returns the answer for a stage's name."""
        self.place = (address, port)
        self.callers: dict[int, Caller] = {}
        """Open connections, by file descriptor."""
        self._word = word
        self._say = say
        self._told = ""
        self._listening: socket.socket | None = None
        self._next_try = 0.0
        self._left = TAKEN

    def descriptors(self) -> list[int]:
        """Return the sockets to wait on for reading."""
        ours = [*self.callers]
        if self._listening is not None and self._left > 0 and len(self.callers) < CALLERS:
            ours.append(self._listening.fileno())
        return ours

    def turn(self, now: float) -> None:
        """
        Listen if the agent does not listen yet, and close connections whose deadline has passed.

        The loop calls this function every second.
        """
        self._left = TAKEN
        for each in [*self.callers.values()]:
            if now >= each.deadline:
                self._end(each)
        if self._listening is None and now >= self._next_try:
            self._next_try = now + LISTEN_AGAIN_SECONDS
            self._listen()

    def advance(self, ready: set[int], now: float) -> None:
        """Answer received questions, and accept new connections."""
        for descriptor in ready & set(self.callers):
            caller = self.callers[descriptor]
            asked = caller.question()
            if asked is not None:
                self._answer(caller, asked)
        if self._listening is not None and self._listening.fileno() in ready:
            self._take(now)

    def close(self) -> None:
        """Close the port."""
        for each in [*self.callers.values()]:
            self._end(each)
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _listen(self) -> None:
        address, port = self.place
        try:
            listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            self._once("cannot listen for gateways: %s" % error)
            return
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if address == "::":
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.setblocking(False)
            listening.bind((address, port))
            listening.listen(TAKEN)
        except (OSError, OverflowError) as error:
            listening.close()
            self._once("cannot listen for gateways at %s, port %d: %s" % (address, port, error))
            return
        self._listening = listening
        self._told = ""
        self._say("tells gateways at %s, port %d" % (address, port), 6)

    def _take(self, now: float) -> None:
        """Accept the waiting connections, up to the limits."""
        assert self._listening is not None
        while self._left > 0 and len(self.callers) < CALLERS:
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # the client has closed the connection already
            except OSError as error:  # for example no file descriptor is left; try in the next turn
                self._left = 0
                self._once("cannot accept connections of gateways: %s" % error)
                return
            self._left -= 1
            connection.setblocking(False)
            self.callers[connection.fileno()] = Caller(connection, now + CALLER_SECONDS)

    def _answer(self, caller: Caller, asked: str) -> None:
        with contextlib.suppress(OSError):  # the client may not wait for the answer any more
            caller.connection.send(self._word(asked).encode() + b"\n")
        self._end(caller)

    def _end(self, caller: Caller) -> None:
        del self.callers[caller.connection.fileno()]
        caller.connection.close()

    def _once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(text, 4)
