"""Shared parts of commands: options, exit statuses, and the output of JSON and errors."""

from __future__ import annotations

import getpass
import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpufleet.cli import completers
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError
from gpufleet.inventory.pyinfra_command import default_inventory, is_inventory
from gpufleet.sanitize import printable

INTERRUPTED = 128 + signal.SIGINT  # the status that shells use

limit_option = click.option(
    "--limit",
    multiple=True,
    shell_complete=completers.nodes_and_groups,
    help="Use only this node or group. Can be repeated.",
)
inventory_argument = click.argument(
    "inventory_file", metavar="[INVENTORY]", shell_complete=completers.inventories
)
nodes_argument = click.argument(
    "names", metavar="NODE...", nargs=-1, required=True, shell_complete=completers.nodes
)
key_file_option = click.option(
    "--key-file",
    type=click.Path(dir_okay=False),
    help="File with the key of one of the gateway's clients.",
)
ca_file_option = click.option(
    "--ca-file",
    type=click.Path(exists=True, dir_okay=False),
    help="File with the certificate authority of the gateway.  [default: the certificate "
    "in `gateway.tls`]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
hardware_option = click.option(
    "--as",
    "hardware",
    multiple=True,
    metavar="HARDWARE",
    shell_complete=completers.hardware,
    help="Plan for this hardware instead of live nodes: h100x8 for all nodes, or "
    "gpu_a100=a100x8 for the nodes of a group.",
)
models_option = click.option(
    "--models",
    "models_folder",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Look for models in DIR (DIR/owner/name/config.json) before the Hub.",
)
record_option = click.option(
    "--record",
    is_flag=True,
    help="Write the results of each node to a file on that node, which alerts use.",
)


class FleetCommand(StrictCommand):
    """A command whose first argument is INVENTORY. The argument may be omitted."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """If the first word is not an inventory, insert the default inventory before it."""
        if not ctx.resilient_parsing and not {"-h", "--help"}.intersection(args):
            typed, _, _ = self.make_parser(ctx).parse_args(list(args))
            word = typed.get("inventory_file")
            if not isinstance(word, str) or (not is_inventory(word) and self._takes_more()):
                args = [default_inventory(), *args]
        return super().parse_args(ctx, args)

    def _takes_more(self) -> bool:
        """
        Return whether the command has more arguments than INVENTORY, such as a node or a replica.
        """
        return sum(isinstance(each, click.Argument) for each in self.params) > 1


def fleet_command(
    name: str | None = None,
) -> Callable[[Callable[..., Any]], FleetCommand]:
    """
    Return the decorator for a command whose first argument is INVENTORY (`inventory_argument`).
    """
    return click.command(name, cls=FleetCommand)


def print_json(value: Any) -> None:
    """Print a value as JSON, for programs."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_error(error: FleetError) -> None:
    """Print every problem of an error on stderr. Each line begins with `error: `."""
    for problem in error.problems:
        for line in problem.splitlines():
            click.echo(f"error: {printable(line)}", err=True)


def operator_name() -> str:
    """Return the user who runs this command and the name of this machine, such as `ada@control`."""
    return f"{getpass.getuser()}@{socket.gethostname()}"
