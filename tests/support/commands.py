"""The commands of the command line, as click has them."""

from __future__ import annotations

from collections.abc import Iterator

import click


def commands(group: click.Group, words: str = "gpufleet") -> Iterator[tuple[str, click.Command]]:
    """Yield the words of every command that has none below it, and the command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{words} {name}")
        elif command is not None:
            yield f"{words} {name}", command
