"""Send requests of a batch over persistent HTTP connections. Border.

Calls block. Callers use gevent, so other greenlets continue meanwhile. The key is only in a header.
Errors contain no text of a request or an answer.
"""

from __future__ import annotations

import socket
import ssl
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from gpufleet.batch.replies import Reply
from gpufleet.errors import FleetError
from gpufleet.sanitize import printable

CONNECT_SECONDS = 10.0
MOST_ANSWER_BYTES = 64 << 20
REUSE_SECONDS = 2.0
"""Seconds after which an idle connection is not used again.

vLLM's server closes idle connections after 5 s. A request over such a connection would look lost.
"""
_MOST_KEPT = 512


class Asker:
    """The HTTP client that sends a batch's lines to a server."""

    def __init__(
        self,
        url: str,
        prefix: str,
        key: str,
        *,
        ca_file: str | None,
        seconds: float,
    ) -> None:
        """
        Set the server. `prefix` is put before every path. `seconds` is the time limit of an answer.
        """
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._prefix, self._seconds = prefix, seconds
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._tls = _context(ca_file) if parts.scheme == "https" else None
        self._kept: list[tuple[HTTPConnection, float]] = []

    def ask(self, path: str, body: bytes) -> Reply:
        """
        Send a request, and return its outcome.

        Raises `FleetError` if the server's certificate is not trusted.
        """
        try:
            connection = self._connection()
        except (OSError, HTTPException) as error:
            if isinstance(error, ssl.SSLCertVerificationError):
                said = printable(error.verify_message)
                raise FleetError(
                    f"https://{self._host}:{self._port}: the server's certificate is not trusted "
                    f"({said}): check `gateway.tls`, or give the certificate authority with "
                    "`--ca-file`"
                ) from None
            return Reply(problem="refused")
        whole = False
        try:
            connection.request("POST", self._prefix + path, body=body, headers=self._headers)
            reply, whole = _read(connection.getresponse())
        except TimeoutError:
            return Reply(problem="timeout")
        except (OSError, HTTPException, ValueError):
            return Reply(problem="connection lost")
        finally:
            if whole and len(self._kept) < _MOST_KEPT:
                self._kept.append((connection, time.monotonic()))
            else:
                connection.close()
        return reply

    def close(self) -> None:
        """Close all connections."""
        while self._kept:
            self._kept.pop()[0].close()

    def _connection(self) -> HTTPConnection:
        """Return a recently used connection, or a new one."""
        while self._kept:
            connection, used = self._kept.pop()
            if time.monotonic() - used < REUSE_SECONDS:
                return connection
            connection.close()
        made = (
            HTTPSConnection(self._host, self._port, timeout=CONNECT_SECONDS, context=self._tls)
            if self._tls
            else HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
        )
        try:
            made.connect()
            made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.sock.settimeout(self._seconds)
        except BaseException:
            made.close()
            raise
        return made


def _read(response: HTTPResponse) -> tuple[Reply, bool]:
    """Return an answer, and whether its connection can be used again."""
    body = response.read(MOST_ANSWER_BYTES + 1)
    if len(body) > MOST_ANSWER_BYTES:
        return Reply(problem="answer too large"), False
    reply = Reply(
        response.status,
        body,
        printable(response.getheader("x-request-id") or "")[:200],
        _seconds(response.getheader("retry-after")),
    )
    return reply, not response.will_close


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0  # for a date, the batch's own back-off is sufficient


def _context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise FleetError(f"{ca_file}: the certificate cannot be read: {error}") from None
