"""Run a command over SSH or on this machine, with binary standard streams.

Border: the module uses pyinfra's connections, but not pyinfra's text readers. A caller that
starts a command must also stop it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from gevent import os as gevent_os
from gevent.subprocess import PIPE, Popen
from paramiko import Channel, SSHException, Transport
from pyinfra.connectors.ssh import SSHConnector


@dataclass
class Streams:
    """
    The binary stdin, stdout and stderr of a running command.

    `read` and `read_error` return at most the given number of bytes, and `b""` at the end of the
    output. While a call waits, other greenlets run.
    """

    write: Callable[[bytes], None]
    end: Callable[[], None]
    read: Callable[[int], bytes]
    read_error: Callable[[int], bytes]
    status: Callable[[], int]


def start_command(connector: SSHConnector, command: str, *, pty: bool) -> tuple[Streams, Channel]:
    """
    Start a command on a node.

    Return its streams and its channel, which the caller must close with `close`. Raises `EOFError`
    if there is no connection, and paramiko's own exceptions.
    """
    transport = connector.client.get_transport() if connector.client else None
    if transport is None:
        raise EOFError("the connection is closed")
    channel = transport.open_session()

    def status() -> int:
        code = channel.recv_exit_status()
        if code == -1 and not transport.is_active():
            raise EOFError("the connection was lost before the node answered")
        return code

    try:
        if pty:
            channel.get_pty()
        channel.exec_command(command)
    except BaseException:
        close(channel)
        raise
    streams = Streams(
        write=channel.sendall,
        end=channel.shutdown_write,
        read=channel.recv,
        read_error=channel.recv_stderr,
        status=status,
    )
    return streams, channel


def is_lost(connector: object) -> bool:
    """Return whether the connection to a node is lost. It is not restored in this run."""
    if not isinstance(connector, SSHConnector) or connector.client is None:
        return False
    transport = connector.client.get_transport()
    return transport is None or not transport.is_active()


def close(channel: Channel) -> None:
    """End a command by closing its channel. Errors of a lost connection are ignored."""
    with suppress(SSHException, OSError, EOFError):
        channel.close()


@contextmanager
def remote_command(connector: SSHConnector, command: str, *, pty: bool) -> Iterator[Streams]:
    """Run a command on a node during the block."""
    streams, channel = start_command(connector, command, pty=pty)
    try:
        yield streams
    finally:
        close(channel)


@contextmanager
def local_command(command: str) -> Iterator[Streams]:
    """Run a command on this machine during the block."""
    # The command gets its own process group, so that its child processes are stopped as well. It
    # does not get its own session, because sudo remembers passwords for a terminal.
    process = Popen(
        ["/bin/sh", "-c", command],
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        bufsize=0,
        process_group=0,
    )
    pipes = (process.stdin, process.stdout, process.stderr)
    to, out, error = (pipe.fileno() for pipe in pipes)
    for pipe in (to, out, error):
        gevent_os.make_nonblocking(pipe)

    def write(data: bytes) -> None:
        while data:
            data = data[gevent_os.nb_write(to, data) :]

    try:
        yield Streams(
            write=write,
            end=process.stdin.close,
            read=lambda size: gevent_os.nb_read(out, size),
            read_error=lambda size: gevent_os.nb_read(error, size),
            status=process.wait,
        )
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):  # processes of sudo cannot be ended
                os.killpg(process.pid, signal.SIGKILL)
        for pipe in pipes:
            pipe.close()


def accepts_more(transport: Transport | None) -> bool:
    """
    Return whether a connection can run a second command at the same time.

    If sshd's `MaxSessions` is 1, all other commands of a run would fail while a session is open.
    The test costs no time, because it runs while the node starts Python.
    """
    try:
        if transport:
            transport.open_session().close()
    except (SSHException, OSError, EOFError):
        return False
    return True
