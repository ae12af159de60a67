"""RUNS ON THE NODE: answer HAProxy's agent checks with the state of stages.

A connection brings one line, the name of a stage, and gets one line:
  up            the stage runs and is not known to be stalled
  down #stalled it is stalled (without the space HAProxy would read one unknown word)
  (empty)       its state is unknown: HAProxy keeps the state of the last answer
These words set the operational state. The agent never sends the words that change the
administrative state (`ready`, `drain`, `maint`): only the gateway drains (HAProxy's manual,
`agent-check`).

Nothing here blocks. A client has `CALLER_SECONDS`. There are limits to concurrent clients, to
connections a second, and to the bytes read from each client. Clients above a limit wait in the
kernel's queue, and a check that fails there changes nothing for HAProxy.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Callable

CALLER_SECONDS = 2.0
CALLERS = 64
# A gateway asks once in 2 s for each server: two gateways and 64 servers are 64 in a second.
TAKEN = 256
"""Maximum connections in a second, so that no client blocks the loop."""
LINE_BYTES = 256
"""Maximum bytes of a question; a stage's name has at most 50 characters."""
LISTEN_AGAIN_SECONDS = 10.0
"""Seconds between attempts to listen while the port is taken or the address does not exist yet."""


class Caller:
    """An unanswered connection."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.got = b""

    def question(self) -> str | None:
        """Return the gateway's question, "" for an invalid one, or None if it is incomplete."""
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
        """Prepare an agent; `word` returns the answer for a stage by its name."""
        self.place = (address, port)
        self.callers: dict[int, Caller] = {}
        """Connections by descriptor."""
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
        Listen if not yet listening, and close connections past their deadline; called every second.
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
                continue  # it is gone already
            except OSError as error:  # no descriptor, say: not again before the next turn
                self._left = 0
                self._once("accepts no connection: %s" % error)
                return
            self._left -= 1
            connection.setblocking(False)
            self.callers[connection.fileno()] = Caller(connection, now + CALLER_SECONDS)

    def _answer(self, caller: Caller, asked: str) -> None:
        with contextlib.suppress(OSError):  # it does not wait for it any more
            caller.connection.send(self._word(asked).encode() + b"\n")
        self._end(caller)

    def _end(self, caller: Caller) -> None:
        del self.callers[caller.connection.fileno()]
        caller.connection.close()

    def _once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(text, 4)
