"""What commands share: options, exit statuses, and how they print JSON and mistakes."""

from __future__ import annotations

import getpass
import json
import signal
import socket
from typing import Any

import click

from gpufleet.errors import FleetError
from gpufleet.sanitize import printable

INTERRUPTED = 128 + signal.SIGINT  # as a shell has it

limit_option = click.option(
    "--limit", multiple=True, help="Only this node or group; may be repeated."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
record_option = click.option(
    "--record", is_flag=True, help="Write on each node what was found there, for alerts."
)


def print_json(value: Any) -> None:
    """Print a value as JSON, for programs."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_error(error: FleetError) -> None:
    """Print every problem of an error on stderr, each of its lines as `error: ...`."""
    for problem in error.problems:
        for line in problem.splitlines():
            click.echo(f"error: {printable(line)}", err=True)


def operator_name() -> str:
    """Return who runs this command, and where: `ada@control`."""
    return f"{getpass.getuser()}@{socket.gethostname()}"
