"""An SSH server on this machine, by paramiko's own server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import paramiko
import pytest

from gpufleet.setup.hosts import Host


@pytest.fixture
def key() -> paramiko.PKey:
    return paramiko.ECDSAKey.generate()


@pytest.fixture
def server(key: paramiko.PKey) -> Iterator[Host]:
    """A server that shows `key`, and lets nobody in."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def serve() -> None:
            connection, _ = listening.accept()
            # Who asks for the key alone goes away as soon as it is shown.
            with (
                paramiko.Transport(connection) as transport,
                suppress(EOFError, OSError, paramiko.SSHException),
            ):
                transport.add_server_key(key)
                transport.start_server(server=paramiko.ServerInterface())
                transport.join(timeout=10)

        threading.Thread(target=serve, daemon=True).start()
        yield Host("gpu-01", "127.0.0.1", "root", port)
