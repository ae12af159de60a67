"""Set options of the fleet's SSH connections: TCP_NODELAY, keepalive and limits.

The module also limits the number of connections.

It is used through `ssh_paramiko_connect_kwargs`, which pyinfra passes to paramiko's
`SSHClient.connect(transport_factory=...)`.
"""

from __future__ import annotations

import logging
import resource
import socket
from typing import Any

import paramiko

# paramiko leaves Nagle's algorithm on, so that the small packets of a command wait for the other
# side's delayed ACK. Measured with paramiko 4.0 on loopback, one `sh -c true` on an open
# connection: 48 ms, and 4 ms with TCP_NODELAY; pyinfra pays that for every fact and command.
# A connection whose other end has lost power answers nothing at all: after KEEPALIVE_IDLE_SECONDS
# of silence the kernel asks KEEPALIVE_PROBES times, so the run knows within 30 s. UNACKED_MS is the
# same bound for the case that something had just been sent (RFC 5482).
KEEPALIVE_IDLE_SECONDS = 15
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_PROBES = 3
UNACKED_MS = 30_000

# Each connection is a file, and stays open until the run ends. 1024 is what Linux grants a process
# that does not ask, macOS 256; as many as systemd's own hard limit allows would let a bug in
# gpufleet exhaust the machine.
OPEN_FILES = 4096


# pyinfra reports a failed connection in one sentence. Without a handler, logging would also print
# paramiko's traceback on stderr; --debug-all still shows it.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def raise_open_files_limit() -> None:
    """Raise the limit of open files to `OPEN_FILES`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def nodelay_transport(sock: Any, **options: Any) -> paramiko.Transport:
    """
    Return paramiko's transport over `sock`, with a tuned TCP connection below it.

    `sock` is a socket, a channel of another SSH connection (ProxyJump), or the pipes of a
    ProxyCommand, which have no local TCP connection below.
    """
    below = sock
    while isinstance(below, paramiko.Channel):
        below = below.get_transport().sock
    if isinstance(below, socket.socket):
        _tune(below)
    return paramiko.Transport(sock, **options)


def _tune(sock: socket.socket) -> None:
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Names as Linux has them; macOS knows some of them only.
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNACKED_MS),
    ):
        if option := getattr(socket, name, None):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
