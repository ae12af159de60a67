"""RUNS ON THE NODE: send a non-blocking HTTP request, for a loop that handles several requests.

    exchange = Exchange("http://127.0.0.1:8000", "/metrics", deadline=now + 5)
    while exchange.answer is None:
        select on exchange; exchange.advance(now)

A server may accept a connection and send nothing, or send its answer byte by byte or without end.
Such a server uses only one file descriptor until the deadline. Addresses must be IP addresses,
because names are not resolved.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from typing import Any, NamedTuple

# vLLM's answer for 72 engines has about 10 MB. No known server sends a larger answer than this.
ANSWER_BYTES = 64 << 20
HEAD_BYTES = 64 << 10
PIECE_BYTES = 1 << 18
# The most pieces that are read in one turn, so that an endless answer does not block the loop.
PIECES = 64


class Answer(NamedTuple):
    """Result of an HTTP request."""

    status: int
    """HTTP status, or 0 if there was no response."""
    body: bytes
    why: str
    """Reason for a missing response, in words."""
    silent: bool
    """True if the request timed out, false if the server refused it."""


class Exchange:
    """One HTTP request, from its connection to its answer."""

    def __init__(
        self,
        url: str,
        path: str,
        deadline: float,
        *,
        body: Any = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.deadline = deadline
        self.answer: Answer | None = None
        self._unsent = request(url, path, body, headers)
        self._got = bytearray()
        host, port = address_and_port(url)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        code = self._socket.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            self._fail(errno.errorcode.get(code, str(code)))

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Return True if the request waits to send data, False if it waits to read data."""
        return bool(self._unsent)

    def advance(self, now: float) -> None:
        """Advance the request as far as possible without blocking. Set `answer` at its end."""
        if self.answer is not None:
            return
        try:
            self._send()
            if not self._unsent:
                self._receive()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._fail(error.strerror or str(error))
        if self.answer is None and now >= self.deadline:
            self._fail("no answer in time", silent=True)

    def close(self) -> None:
        """Close the connection. A server that notices the closed connection drops the request."""
        self._socket.close()

    def _send(self) -> None:
        while self._unsent:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, errno.errorcode.get(error, str(error)))
            try:
                sent = self._socket.send(self._unsent)
            except OSError as failed:
                if failed.errno == errno.ENOTCONN:  # still connecting
                    raise BlockingIOError from failed
                raise
            self._unsent = self._unsent[sent:]

    def _receive(self) -> None:
        for _ in range(PIECES):
            piece = self._socket.recv(PIECE_BYTES)
            if not piece:
                self._take(ended=True)
                return
            self._got += piece
            if len(self._got) > ANSWER_BYTES:
                self._fail("an answer above %d MiB" % (ANSWER_BYTES >> 20))
                return
        # A server may keep the connection open although the request forbids it.
        self._take(ended=False)

    def _take(self, *, ended: bool) -> None:
        head, found, body = bytes(self._got).partition(b"\r\n\r\n")
        if not found:
            if ended or len(self._got) > HEAD_BYTES:
                self._fail("no HTTP")
            return
        status, length = read_head(head)
        if not status:
            self._fail("no HTTP")
        elif length is not None and len(body) >= length:
            self._end(Answer(status, body[:length], "", silent=False))
        elif ended and length is not None:
            self._fail("the answer was cut off")
        elif ended:
            self._end(Answer(status, body, "", silent=False))

    def _fail(self, why: str, *, silent: bool = False) -> None:
        self._end(Answer(0, b"", why, silent))

    def _end(self, answer: Answer) -> None:
        self.answer = answer
        with contextlib.suppress(OSError):
            self._socket.close()


def address_and_port(url: str) -> tuple[str, int]:
    """
    Return the address and the port of `http://ADDRESS:PORT`.

    >>> address_and_port("http://[::1]:8000")
    ('::1', 8000)
    """
    host, _, port = url.partition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)


def request(url: str, path: str, body: Any, headers: tuple[tuple[str, str], ...]) -> bytes:
    """
    Return the bytes of an HTTP/1.0 request.

    With HTTP/1.0 the response is not chunked, and the connection ends with it. If the body is
    bytes, it is sent unchanged, and `headers` must have its type. Any other body is sent as JSON.
    """
    raw = isinstance(body, bytes)
    content = b"" if body is None else body if raw else json.dumps(body).encode()
    lines = [
        "%s %s HTTP/1.0" % ("GET" if body is None else "POST", path),
        "Host: %s" % url.partition("://")[2],
        "Connection: close",
        *("%s: %s" % header for header in headers),
    ]
    if body is not None:
        lines += [] if raw else ["Content-Type: application/json"]
        lines += ["Content-Length: %d" % len(content)]
    return "\r\n".join([*lines, "", ""]).encode() + content


def read_head(head: bytes) -> tuple[int, int | None]:
    """
    Return the response's status and its length.

    The status is 0 if the response is not HTTP. The length is None if the head does not have it.
    """
    first, *lines = head.split(b"\r\n")
    words = first.split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return 0, None
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(words[1]), int(value)
    return int(words[1]), None
