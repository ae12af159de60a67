"""RUNS ON THE NODE: define the words that say why a request failed.

For an HTTP status other than 200, the word is the status, for example "429". No word contains text
from a server.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl

TIMEOUT = "timeout"
"""The request was not done `give_up_seconds` after it was due."""
CLIENT_LIMIT = "client limit"
"""
This client has no connection, port or file descriptor left. The server is not the cause.
"""
REFUSED = "refused"
UNREACHABLE = "unreachable"
NO_ADDRESS = "no address"
CERTIFICATE = "certificate"
TLS = "TLS"
RESET = "reset"
CLOSED = "closed"
"""The server closed the connection before the server answered."""
CUT_OFF = "cut off"
"""The answer ended without its end mark."""
IN_STREAM = "error in the answer"
WRONG = "wrong answer"
"""
The answer is not valid for the model's kind. For example, it has numbers that are not finite.
"""
NOT_HTTP = "not HTTP"
NOT_A_STREAM = "not a stream"
EMPTY = "empty answer"
TOO_LARGE = "too large"
STOPPED = "stopped"
"""
The controller ended the request in flight, so the request counts neither as served nor as failed.
"""

_CLIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
_UNREACHABLE_ERRNOS = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


def reason_of(problem: BaseException) -> str:
    """
    Return the word for the reason why a connection failed.

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
