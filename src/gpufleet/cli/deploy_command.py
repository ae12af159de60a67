"""`gpufleet deploy NAME`: run pyinfra with a deploy of this directory, or with gpufleet's own.

The process becomes pyinfra: output, exit status, questions and signals are pyinfra's.
"""

from __future__ import annotations

import os
import shlex

import click

from gpufleet.cli import completers
from gpufleet.errors import FleetError
from gpufleet.inventory.pyinfra_command import (
    default_inventory,
    deploy_file,
    deploy_names,
    names_inventory,
    pyinfra_command,
)


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="The deploys: " + ", ".join(deploy_names()) + ".",
)
@click.argument("name", metavar="NAME", required=False, shell_complete=completers.deploys)
@click.argument(
    "words", metavar="[INVENTORY] [OPTIONS OF pyinfra]...", nargs=-1, type=click.UNPROCESSED
)
@click.option("--show", is_flag=True, help="Only print the pyinfra command, and do not run it.")
def deploy(name: str | None, words: tuple[str, ...], *, show: bool) -> None:
    """
    Run a deploy: vllm, node, gateway, monitoring ...

    \b
    gpufleet deploy vllm --dry --diff                # what would change
    gpufleet deploy vllm                             # asks before it changes anything
    gpufleet deploy vllm inventories/prod.py -y --limit gpu-01

    The command runs `pyinfra INVENTORY deploys/NAME.py`. If the current directory has the file
    deploys/NAME.py, pyinfra uses that file; otherwise it uses gpufleet's own file. The exit status
    is that of pyinfra.
    """
    if not name:
        raise FleetError(
            f"NAME is missing: write the name of a deploy: {', '.join(deploy_names())}"
        )
    deploy_file(name)  # report a wrong NAME before a wrong INVENTORY
    inventory = () if names_inventory(words) else (default_inventory(),)
    command = pyinfra_command(name, *inventory, *words)
    if show:
        click.echo(shlex.join(command))
        return
    os.execv(command[0], command)  # noqa: S606  # a list, never a shell string
