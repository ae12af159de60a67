"""`gpufleet completion SHELL`: print a shell's completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError

# The names that click uses (click/shell_completion.py).
SHELLS = ("bash", "fish", "zsh")
VARIABLE = "_GPUFLEET_COMPLETE"


@click.command(cls=StrictCommand)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """
    Print the script that completes commands in a shell.

    The shell then completes commands, options, inventories, nodes, replicas, groups, presets, GPUs,
    hardware and settings.

    \b
    gpufleet completion bash > ~/.local/share/bash-completion/completions/gpufleet
    gpufleet completion zsh > ~/.zfunc/_gpufleet       # a directory of fpath, before compinit
    gpufleet completion fish > ~/.config/fish/completions/gpufleet.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise FleetError(
            f"{shell}: click has no completion for this shell, only for {', '.join(SHELLS)}"
        )
    # click's own function would run the shell to get its version, but it may not be installed.
    source = kind(ctx.find_root().command, {}, "gpufleet", VARIABLE)
    click.echo(source.source_template % source.source_vars(), nl=False)
