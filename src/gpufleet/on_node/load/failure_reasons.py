"""RUNS ON THE NODE: the words for why a request failed.

An HTTP status other than 200 is its own word: "429". None contains a server's text.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl

TIMEOUT = "timeout"
"""Not done after `give_up_seconds`, counted from its intended arrival."""
CLIENT_LIMIT = "client limit"
"""This client has no connection, port or descriptor left: says nothing about the server."""
REFUSED = "refused"
UNREACHABLE = "unreachable"
NO_ADDRESS = "no address"
CERTIFICATE = "certificate"
TLS = "TLS"
RESET = "reset"
CLOSED = "closed"
"""By the server, before it answered."""
CUT_OFF = "cut off"
"""It ended without its end mark."""
IN_STREAM = "error in the answer"
WRONG = "wrong answer"
"""Not a valid answer for the model's kind, such as numbers that are not finite."""
NOT_HTTP = "not HTTP"
NOT_A_STREAM = "not a stream"
EMPTY = "empty answer"
TOO_LARGE = "too large"
STOPPED = "stopped"
"""Cut off by the controller while in flight: neither served nor failed."""

_CLIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
_UNREACHABLE_ERRNOS = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


def reason_of(problem: BaseException) -> str:
    """
    Return in one of this module's words why a connection failed.

    >>> reason_of(ConnectionRefusedError())
    'refused'
    """
    if isinstance(problem, ssl.SSLCertVerificationError):
        return CERTIFICATE
    if isinstance(problem, ssl.SSLError):
        return TLS
    if isinstance(problem, ConnectionRefusedError):
        return REFUSED
    if isinstance(problem, (asyncio.TimeoutError, TimeoutError)):
        return TIMEOUT
    if isinstance(problem, socket.gaierror):
        return NO_ADDRESS
    code = getattr(problem, "errno", None)
    if code in _CLIENT_ERRNOS:
        return CLIENT_LIMIT
    if code in _UNREACHABLE_ERRNOS:
        return UNREACHABLE
    return RESET
