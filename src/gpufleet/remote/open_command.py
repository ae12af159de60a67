"""Run a command on a node as the user of gpufleet's connection, with open streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyinfra.api import Host, State, StringCommand
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import make_unix_command_for_host

from gpufleet.errors import FleetError
from gpufleet.remote.channel import Streams, local_command, remote_command


@contextmanager
def open_command(state: State, host: Host, command: str) -> Iterator[Streams]:
    """
    Run a command on a connected node during the block.

    The command runs as the user of the connection, without `_sudo`, `_su_user` and similar
    arguments. Raises `FleetError` for a node that is reached neither by SSH nor locally, and the
    connection's own exceptions.
    """
    text = make_unix_command_for_host(state, host, StringCommand(command)).get_raw_value()
    connector = host.connector
    if isinstance(connector, SSHConnector):
        with remote_command(connector, text, pty=False) as streams:
            yield streams
    elif isinstance(connector, LocalConnector):
        with local_command(text) as streams:
            yield streams
    else:
        raise FleetError(
            f"{host.name}: gpufleet reaches this node neither by SSH nor as @local: give a "
            "different node"
        )
