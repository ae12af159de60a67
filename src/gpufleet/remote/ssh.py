"""Set options of the fleet's SSH connections: TCP_NODELAY, keepalive and limits.

The module also raises the limit of open files, so that enough connections are possible.

It is used through `ssh_paramiko_connect_kwargs`, which pyinfra passes to paramiko's
`SSHClient.connect(transport_factory=...)`.
"""

from __future__ import annotations

import logging
import resource
import socket
from typing import Any

import paramiko

# paramiko does not switch Nagle's algorithm off, so the small packets of a command wait for the
# delayed ACK of the other side. Measured with paramiko 4.0 on loopback, one `sh -c true` on an open
# connection takes 48 ms, but 4 ms with TCP_NODELAY. pyinfra needs this time for every fact and
# command. If the other end of a connection has lost power, it does not answer at all. After
# KEEPALIVE_IDLE_SECONDS of silence, the kernel sends KEEPALIVE_PROBES probes, so the run detects
# the loss within 30 s. UNACKED_MS is the same time limit for data that was just sent and is not
# acknowledged (RFC 5482).
KEEPALIVE_IDLE_SECONDS = 15
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_PROBES = 3
UNACKED_MS = 30_000

# Each connection is an open file until the run ends. By default, a process may open 1024 files on
# Linux and 256 on macOS. If gpufleet used systemd's hard limit, a bug in gpufleet could exhaust the
# machine.
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

    `sock` is a socket, a channel of a different SSH connection (ProxyJump), or the pipes of a
    ProxyCommand. Pipes have no local TCP connection below them.
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
    # These are Linux' names of the options. macOS has only some of them.
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNACKED_MS),
    ):
        if option := getattr(socket, name, None):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
