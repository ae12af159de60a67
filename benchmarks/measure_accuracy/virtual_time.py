"""
An event loop whose clock jumps to the next timer, and a load client that runs in it.

Server and client share one loop and exchange real HTTP over loopback; only waiting is left out, so
a level of 900 s takes as long as its requests cost the processor. A byte that is sent over loopback
is there when the next poll looks. Where the system was later than that, a time would be wrong:
`VirtualLink.deviation` compares each request's times with those of the server's own record.

The controller (`client_process.run_level`) is not in the loop: it is given `VirtualClients.start`
for its transport and `VirtualClients.sleep` for its pause.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import gc
import json
import re
import selectors
import socket
import zlib
from collections.abc import Coroutine
from typing import Any

from gpufleet.on_node.load.client import Load
from gpufleet.remote.payload import Payload
from tests.support.queue_server import QueueServer

_POLLS = 2
"""Looks at the sockets before the clock jumps."""
_STEP_SECONDS = 1e-9
"""That each look takes: a timer whose own clock rounds it to just before it is due comes again,
for ever if time stood still."""
_STUCK_SECONDS = 20.0
"""Real seconds without an event or a timer."""
_PARAMETERS = re.compile(r'"PARAMETERS": json\.loads\(text\("([^"]*)"\)\)')
_EXACT = 2e-6
"""Seconds: the client prints microseconds."""


class _Jumping(selectors.DefaultSelector):
    """Moves the clock of its loop instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += _STEP_SECONDS
        for _ in range(_POLLS):
            if events := super().select(0):
                return events
        if timeout is None:
            if not (events := super().select(_STUCK_SECONDS)):
                raise RuntimeError("the loop waits for nothing: no timer and no event")
            return events
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop without waiting. Its time begins at 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now

    async def getaddrinfo(self, *about: Any, **more: Any) -> Any:
        """Look a name up at once: a thread would be waited for in real time."""
        return socket.getaddrinfo(*about, **more)

    def cancel_timers(self, owner: object) -> None:
        """Cancel what is to call methods of an object, as the end of a process would."""
        for handle in self._scheduled:  # type: ignore[attr-defined]
            if getattr(handle._callback, "__self__", None) is owner:  # noqa: SLF001
                handle.cancel()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run until a coroutine is done; return what it returned."""
        return self.run_until_complete(work)


class VirtualClients:
    """Load clients in a virtual loop, each beside the server that it puts load on."""

    def __init__(self, loop: VirtualLoop, server: QueueServer) -> None:
        self._loop, self._server = loop, server
        self._spoken = asyncio.Event()
        self.links: list[VirtualLink] = []
        """Of all levels so far."""

    @property
    def now(self) -> float:
        """Return the virtual seconds since the server began."""
        return self._loop.time()

    def start(self, program: Payload) -> VirtualLink:
        """Start a client: a `Transport`."""
        packed = _PARAMETERS.search(program[:])
        assert packed is not None, "the form of a program's parameters has changed"
        given = json.loads(zlib.decompress(binascii.a2b_base64(packed[1])))
        link = VirtualLink(self._loop, self._server, self._spoken)
        self._loop.run(link.open(given))
        self.links.append(link)
        return link

    def sleep(self, _seconds: float) -> None:
        """Let time pass until a client has printed what the controller acts on: no outcome."""
        self._loop.run(self._spoken.wait())


class VirtualLink:
    """`on_node/load/client.py` without its process: a `Link`, and a writer of lines."""

    def __init__(self, loop: VirtualLoop, server: QueueServer, spoken: asyncio.Event) -> None:
        self._loop, self._server, self._spoken = loop, server, spoken
        self._printed = bytearray()
        self._first_request = len(server.record)
        self._times: list[tuple[float, float | None]] = []
        self._ended = self._closed = False
        self.deviation: float | None = None
        """The largest difference between client's and server's times, in seconds; None: their
        requests do not match. Known once it is closed."""

    async def open(self, given: dict[str, Any]) -> None:
        """Make the client; it begins when it is told."""
        self._load = Load(given, self)  # type: ignore[arg-type]
        await self._load.pool.address.resolve()
        self._load.over.add_done_callback(lambda _: self._end())
        self.write(b'{"ready":1,"connections":%d}\n' % self._load.pool.limit)

    def write(self, line: bytes) -> None:
        """Print a line, as the client's own writer does."""
        self._printed += line
        if line.startswith(b"["):
            _, sent, _, done, *_ = json.loads(line)
            self._times.append((sent, done))
        else:
            self._spoken.set()

    def send(self, data: bytes) -> None:
        """Hand the controller's lines over. Raises `BrokenPipeError` after the client's end."""
        if self._ended:
            raise BrokenPipeError

        async def command() -> None:
            for line in data.decode().splitlines():
                self._load.command(line)

        self._loop.run(command())

    def receive(self) -> bytes | None:
        """Return what it has printed."""
        if not self._printed:
            return b"" if self._ended else None
        data = bytes(self._printed)
        self._printed.clear()
        self._spoken.clear()
        return data

    def close(self) -> str:
        """End it as the end of its process would: its timers and connections go."""
        if not self._closed:
            self._closed = True
            self._end()
            self.deviation = self.compare()
        return ""

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self.write(json.dumps(self._load.totals()).encode() + b"\n")
        self._unfinished = self._load.totals()["unfinished"]
        self._loop.cancel_timers(self._load)
        for connection in list(self._load.pool._connections):  # noqa: SLF001  # it ends with its process
            connection.drop()
        gc.unfreeze()

    def compare(self) -> float | None:
        """Return the largest difference of a request's times here and in the server's record."""
        here = sorted([*self._times, *((due, None) for due in self._unfinished)])
        there = self._server.record[self._first_request :]
        if len(here) != len(there):
            return None
        zero, worst = self._load.zero, 0.0
        for (sent, done), seen in zip(here, there, strict=True):
            worst = max(worst, abs(zero + sent - seen.arrived))
            if done is not None and seen.ended is not None:
                worst = max(worst, abs(zero + done - seen.ended))
        return 0.0 if worst <= _EXACT else worst


@contextlib.contextmanager
def virtual_clients(server: QueueServer) -> Any:
    """Serve in a new virtual loop; yield what puts load on it."""
    loop = VirtualLoop()
    try:
        loop.run(server.__aenter__())
        yield VirtualClients(loop, server)
        loop.run(server.__aexit__())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run(asyncio.sleep(1.0))
        loop.close()
