"""Run load clients on this machine, or on a node over one SSH session.

Border: `NodeClients` exchanges data with a command on a node. A node's output is untrusted,
so this module limits the length of a message, the unread bytes and the total number of bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import gevent
from gevent import Timeout
from gevent.lock import RLock

from gpufleet.errors import FleetError
from gpufleet.load_test.client_transport import (
    ENDS_SECONDS,
    Transport,
    failure_text,
    local_client,
)
from gpufleet.on_node.load.client_group import GREETING, PIECE_BYTES
from gpufleet.remote import payload
from gpufleet.remote.payload import Payload
from gpufleet.remote.session import LOADER
from gpufleet.sanitize import last_lines, printable

CONTROLLER = "controller"
"""This machine's name in results."""
SILENT_SECONDS = 60.0
"""
If a node receives no message for this time in seconds, its clients end.

This covers a controller that loses power, because it then does not close its connections.
"""
ALIVE_SECONDS = 5.0
MOST_PROCESSES = 16
"""
The maximum number of client processes if `--processes` is not given.

These clients together send about 3,000 requests per second with answers of 200 tokens.
"""
SERVING_SHARE = 4
"""
On a node that also runs vLLM, clients use at most the number of cores divided by this number.

While the clients' highest rate is measured, all clients are busy, but vLLM's processes still need
cores for every token.
"""
MOST_CORES = 4096
MOST_UNREAD_BYTES = 64 << 20
MOST_LEVEL_BYTES = 2 << 30
"""
The maximum output of all clients during a level, in bytes.

15 minutes of 1,000 requests a second with 200 tokens each are 1.3 GB.
"""
_GREETS_SECONDS = 15.0
_TAKES_SECONDS = 300.0
"""
Time limit in seconds to send a client's program to a node.

It is enough for prompts of 20 MB at 1 Mbit/s.
"""
_MOST_BEFORE = 1 << 18
"""
The maximum number of bytes that a login may print before the program starts.

A banner has some kilobytes.
"""
_MOST_HEAD = 64
_ERROR_BYTES = 1 << 14
_WAIT_SECONDS = 0.02


class Streams(Protocol):
    """A command running on a node, with binary streams."""

    @property
    def write(self) -> Callable[[bytes], None]: ...

    @property
    def read(self) -> Callable[[int], bytes]: ...

    @property
    def read_error(self) -> Callable[[int], bytes]: ...


@dataclass(frozen=True)
class ClientPlace:
    """A machine that runs load clients."""

    name: str
    """`controller`, or the node's name."""
    cores: int
    """The number of cores that clients may use."""
    transport: Transport
    serves: bool = False
    """Whether the machine also runs vLLM servers."""

    @property
    def is_node(self) -> bool:
        """Return whether the place is a node, not this machine."""
        return self.name != CONTROLLER

    @property
    def processes(self) -> int:
        """
        Return the number of client processes if `--processes` is not given.

        >>> [ClientPlace("a", n, local_client).processes for n in (1, 2, 8, 128)]
        [1, 1, 7, 16]
        >>> ClientPlace("a", 32, local_client, serves=True).processes
        8
        """
        free = self.cores // SERVING_SHARE if self.serves else self.cores - 1
        return max(1, min(MOST_PROCESSES, free))


def this_machine() -> ClientPlace:
    """Return this machine as a place for clients."""
    return ClientPlace(CONTROLLER, len(os.sched_getaffinity(0)), local_client)


class NodeLink:
    """A client on a node. The class implements `client_transport.Link`."""

    def __init__(self, clients: NodeClients, number: int) -> None:
        self._clients, self._number = clients, number
        self.unread = bytearray()
        self.over: tuple[int, str] | None = None
        """The exit status and the last error line of the client, once it has ended."""
        self._why: str | None = None

    def send(self, data: bytes) -> None:
        """Write to the client's input (`Link.send`)."""
        if self.over is not None:
            raise BrokenPipeError
        self._clients.tell("say", self._number, data)

    def receive(self) -> bytes | None:
        """Return the client's output (`Link.receive`)."""
        if not self.unread and self.over is None and not self._clients.lost:
            gevent.sleep(0)  # another greenlet reads what has arrived
        if self.unread:
            found = bytes(self.unread)
            self.unread.clear()
            return found
        return b"" if self.over is not None or self._clients.lost else None

    def close(self) -> str:
        """End the client (`Link.close`)."""
        if self._why is not None:
            return self._why
        self._why = ""
        if self.over is not None:
            status, said = self.over
            self._why = failure_text(status, said) if status else ""
        elif self._clients.lost:
            self._why = self._clients.lost
        else:
            with suppress(OSError):
                self._clients.tell("end", self._number, b"")
            self._clients.wait(lambda: self.over is not None, ENDS_SECONDS + ALIVE_SECONDS)
        self._clients.forget(self._number)
        return self._why


class NodeClients:
    """All load clients on one node. The method `start` is a `Transport`."""

    def __init__(self, node: str, streams: Streams) -> None:
        """
        Start the parent process of the clients.

        `streams` are those of `session.COMMAND` on the node. All clients end when the streams are
        closed. Raises `FleetError` if the process cannot start, for example without python3, or
        answers unexpectedly.
        """
        self.node = node
        self.lost = ""
        """Why the connection ended, or "" while it is open."""
        self.cores = 0
        self._streams = streams
        self._links: dict[int, NodeLink] = {}
        self._number = 0
        self._lock = RLock()
        self._unread = bytearray()
        self._taken = 0
        self._errors = bytearray()
        self._tasks = [
            gevent.spawn(self._run, task) for task in (self._read, self._read_errors, self._stay)
        ]
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def place(self, *, serves: bool) -> ClientPlace:
        """
        Return the node as a place for clients. `serves` is whether the node runs vLLM servers.
        """
        return ClientPlace(self.node, self.cores, self.start, serves)

    def start(self, program: Payload) -> NodeLink:
        """Start a client on the node."""
        if not self._links:
            self._taken = 0
        self._number += 1
        link = self._links[self._number] = NodeLink(self, self._number)
        # The connection has ended; `lost` has the reason.
        with suppress(OSError):
            self.tell("open", self._number, program.encode())
        return link

    def close(self) -> None:
        """Stop reading and writing. The clients end when the caller closes the streams."""
        self.lost = self.lost or "closed"
        gevent.killall(self._tasks, block=False)

    def tell(self, word: str, number: int, data: bytes) -> None:
        """Send a message. Raises `OSError` if the node accepts no more input."""
        if self.lost:
            raise BrokenPipeError
        self._write(b"%b %d %d\n%b" % (word.encode(), number, len(data), data))

    def forget(self, number: int) -> None:
        """Ignore a client's further output."""
        self._links.pop(number, None)

    def wait(self, reached: Callable[[], bool], seconds: float) -> None:
        """Wait until `reached` returns True, at most `seconds`."""
        until = time.monotonic() + seconds
        while not reached() and not self.lost and time.monotonic() < until:
            gevent.sleep(_WAIT_SECONDS)

    def _greet(self) -> None:
        """Send the program of the parent process to the node, and wait for its answer."""
        own = payload.program("load/client_group", loader=LOADER, silent_seconds=SILENT_SECONDS)
        text = own.encode()
        with suppress(OSError):  # the reason is in its output, if there is any
            self._write(b"%d\n%b" % (len(text), text))
        self.wait(lambda: bool(self.cores), _GREETS_SECONDS)
        if not self.cores:
            raise FleetError(
                f"{self.node}: gpufleet cannot start load clients on this node: {self._silence()}"
            )

    def _silence(self) -> str:
        """Return why the node did not answer."""
        if self._errors:
            return last_lines(self._errors.decode("utf-8", "replace").splitlines())
        why = self.lost.removeprefix(f"{self.node}: ")
        return why or f"the node did not answer within {_GREETS_SECONDS:.0f} s"

    def _write(self, data: bytes) -> None:
        try:
            # After a truncated message the following ones would be unreadable.
            with Timeout(_TAKES_SECONDS, TimeoutError()), self._lock:
                self._streams.write(data)
        except Exception as error:
            self._lose(
                f"the node accepts no more input: {printable(str(error)) or type(error).__name__}"
            )
            raise BrokenPipeError from error

    def _run(self, task: Callable[[], None]) -> None:
        """
        Run the task of a greenlet. All exceptions are caught, because gevent would print them.
        """
        try:
            task()
        except (ValueError, KeyError, TypeError, RecursionError):
            self._lose("the node printed a message that a load client does not print")
        except Exception as error:  # noqa: BLE001  # paramiko's readers may raise anything
            self._lose(f"the connection ended: {printable(str(error)) or type(error).__name__}")

    def _lose(self, why: str) -> None:
        self.lost = self.lost or f"{self.node}: {why}"

    def _stay(self) -> None:
        while not self.lost:
            gevent.sleep(ALIVE_SECONDS)
            self.tell("alive", 0, b"")

    def _read_errors(self) -> None:
        while data := self._streams.read_error(PIECE_BYTES):
            self._errors += data
            del self._errors[:-_ERROR_BYTES]
            gevent.sleep(0)

    def _read(self) -> None:
        """Read messages until the connection ends."""
        before = 0
        while (line := self._line(_MOST_BEFORE)) != GREETING.encode():
            before += len(line) + 1
            if before > _MOST_BEFORE:
                raise ValueError
        while not self.lost:
            word, number, length = self._line(_MOST_HEAD).decode("ascii").split(" ")
            if not (number + length).isdigit() or int(length) > PIECE_BYTES:
                raise ValueError
            self._take(word, int(number), self._bytes(int(length)))

    def _take(self, word: str, number: int, data: bytes) -> None:
        if word == "ready":
            self.cores = _whole(json.loads(data)["cores"], 1, MOST_CORES)
            return
        if word not in ("out", "over"):
            raise ValueError
        link = self._links.get(number)
        if link is None:
            return  # closed meanwhile
        if word == "out":
            link.unread += data
            return
        about: Mapping[str, Any] = json.loads(data)
        link.over = _whole(about["status"], -255, 255), printable(str(about["said"]))[:200]

    def _line(self, most: int) -> bytes:
        while (end := self._unread.find(b"\n")) < 0:
            if len(self._unread) > most:
                raise ValueError
            self._more()
        if end > most:
            raise ValueError
        found = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return found

    def _bytes(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._more()
        found = bytes(self._unread[:count])
        del self._unread[:count]
        return found

    def _more(self) -> None:
        while sum(len(each.unread) for each in self._links.values()) > MOST_UNREAD_BYTES:
            gevent.sleep(_WAIT_SECONDS)  # backpressure: the node waits while its output is not read
        data = self._streams.read(PIECE_BYTES)
        if not data:
            raise EOFError("the node closed it")
        self._taken += len(data)
        if self._taken > MOST_LEVEL_BYTES:
            raise OSError(f"the node sent more than {MOST_LEVEL_BYTES >> 30} GiB for one level")
        self._unread += data
        # Received data is read without blocking: yield to other greenlets, such as the level.
        gevent.sleep(0)


def _whole(value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError
    return value
