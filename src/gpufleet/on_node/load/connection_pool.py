"""RUNS ON THE NODE: reuse connections to one server, up to a limit."""

from __future__ import annotations

import asyncio
import collections
import resource
import ssl
from typing import Any, Callable, Deque, Dict, Optional, Set
from urllib.parse import urlsplit

from gpufleet.on_node.load.failure_reasons import CLIENT_LIMIT, reason_of
from gpufleet.on_node.load.http_stream import Connection, Exchange
from gpufleet.on_node.load.request_draws import Prepared
from gpufleet.on_node.serving import questions

IDLE_SECONDS = 4.0
"""Maximum idle time in seconds of a connection that is used again.

uvicorn, which runs vLLM, closes an idle connection after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). At
that moment, a request may already be on its way.
"""
RESOLVE_SECONDS = 2.0
SPARE_DESCRIPTORS = 64


class Address:
    """The server's address, and the first bytes of every request."""

    def __init__(self, given: Dict[str, Any]) -> None:
        """Create the address from a client's parameters."""
        parts = urlsplit(given["url"])
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._to = self._host
        self._tls: Optional[ssl.SSLContext] = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cadata=given.get("certificate"))
        path = parts.path.rstrip("/") + given["path"]
        self.chat = given["path"].endswith("/chat/completions")
        lines = ["POST %s HTTP/1.1" % path, "Host: %s" % parts.netloc.rpartition("@")[2]]
        kind = questions.FORM if given["path"] == questions.SPEECH else "application/json"
        lines += ["Content-Type: " + kind, "Accept: text/event-stream"]
        lines += ["%s: %s" % item for item in given["headers"].items()]
        self._head = "\r\n".join([*lines, ""]).encode("latin-1")

    def request(self, prepared: Prepared) -> bytes:
        """Return the bytes of a complete request."""
        length = b"Content-Length: %d\r\n\r\n" % len(prepared.body)
        return b"".join((self._head, prepared.header, length, prepared.body))

    async def resolve(self) -> None:
        """
        Resolve the server's name once, and keep the first address that answers.

        The name is not resolved for each connection, because each lookup needs a thread.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=1)  # SOCK_STREAM
        except OSError:
            return  # each request will fail with the same error and report it
        for *_, place in found:
            self._to = str(place[0])
            if len(found) == 1:
                return
            opening = asyncio.open_connection(self._to, self._port)
            try:
                _, writer = await asyncio.wait_for(opening, RESOLVE_SECONDS)
            except (OSError, asyncio.TimeoutError):
                continue
            writer.close()
            return

    async def connect(self, factory: Callable[[], Connection]) -> Connection:
        """Return a new connection."""
        loop = asyncio.get_running_loop()
        name = self._host if self._tls else None
        _, connection = await loop.create_connection(
            factory, self._to, self._port, ssl=self._tls, server_hostname=name
        )
        return connection


class Pool:
    """Connections that send exchanges. `finished` is called at the end of each exchange."""

    def __init__(
        self,
        address: Address,
        limit: int,
        clock: Callable[[], float],
        finished: Callable[[Exchange], None],
    ) -> None:
        self.address, self.limit = address, connection_limit(limit)
        self.connects = 0
        """Number of connections that were opened or that this pool tried to open."""
        self._clock, self._finished = clock, finished
        self._loop = asyncio.get_running_loop()
        self._idle: Deque[Connection] = collections.deque()
        self._connections: Set[Connection] = set()
        self._opening = 0

    @property
    def open(self) -> int:
        """Return the number of connections that are open or being opened."""
        return self._opening + len(self._connections)

    def send(self, exchange: Exchange, prepared: Prepared) -> None:
        """Send a request over the idle connection that was used last, or over a new connection."""
        data = self.address.request(prepared)
        while self._idle:
            connection = self._idle.pop()
            if self._loop.time() - connection.idle_since < IDLE_SECONDS:
                connection.send(exchange, data)
                return
            self._connections.discard(connection)
            connection.drop()
        if self.open >= self.limit:
            exchange.error = CLIENT_LIMIT
            self._finished(exchange)
            return
        self.connects += 1
        self._opening += 1
        exchange.holder = self._loop.create_task(self._connect(exchange, data))

    def give_up(self, exchange: Exchange, why: str) -> None:
        """End an exchange without waiting for its answer, and close its connection."""
        if isinstance(exchange.holder, Connection):
            exchange.holder.give_up(why)
            return
        if exchange.holder is not None:
            exchange.holder.cancel()
        exchange.error = why
        self._finished(exchange)

    def made(self, connection: Connection) -> None:
        """Add an established connection."""
        self._connections.add(connection)

    def released(self, connection: Connection, exchange: Exchange, reusable: bool) -> None:
        """Keep the connection of a finished exchange if the connection can be used again."""
        if reusable:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        self._finished(exchange)

    def lost(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect(self, exchange: Exchange, data: bytes) -> None:
        try:
            connection = await self.address.connect(lambda: Connection(self._clock, self))
        except (OSError, asyncio.TimeoutError) as problem:
            exchange.error = reason_of(problem)
            self._finished(exchange)
        else:
            connection.send(exchange, data)
        finally:
            self._opening -= 1


def connection_limit(wanted: int) -> int:
    """Raise this process' own limit; return how many connections the process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - SPARE_DESCRIPTORS)
