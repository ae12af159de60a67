"""`gpufleet presets`: show the values of a preset, and the reason for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import json_option, print_json
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.console import add_row, display, new_table, show_value

if TYPE_CHECKING:
    from rich.table import Table

    from gpufleet.catalog.presets import Choice, Preset


@click.command(cls=StrictCommand)
@click.argument("name", required=False, shell_complete=completers.presets)
@json_option
def presets(name: str | None, as_json: bool) -> None:
    """Show all presets, or the values of one with reasons."""
    from gpufleet.catalog import presets

    wanted = {each: presets.load(each) for each in ((name,) if name else presets.names())}
    if as_json:
        print_json({each: preset.model_dump(mode="json") for each, preset in wanted.items()})
    elif name:
        click.echo(wanted[name].situation + "\n")
        display(preset_table(wanted[name]))
    else:
        display(presets_table(wanted))


def presets_table(found: Mapping[str, Preset]) -> Table:
    """Return one line per preset."""
    table = new_table("preset", "objective", "for", whole={"preset"})
    for name, preset in found.items():
        add_row(table, name, preset.objective, preset.situation)
    return table


def preset_table(preset: Preset) -> Table:
    """Return one line for each value that a preset may set."""
    table = new_table("flag", "value", "where", "because", whole={"flag"})
    for flag, choices in preset.flags.items():
        for each in choices:
            value = (
                f"by the model's family ({each.value})" if each.table else show_value(each.value)
            )
            add_row(table, f"--{flag}", value, _where_it_holds(each), each.because)
    for need in preset.needs:
        add_row(table, f"--{need.flag}", "yours", "", need.what)
    return table


def _where_it_holds(choice: Choice) -> str:
    return "; ".join(
        [
            *([f"vLLM {choice.since} or newer"] if choice.since else []),
            *([f"compute capability {choice.capability} or newer"] if choice.capability else []),
            *([f"no {' or '.join(choice.without)} cache"] if choice.without else []),
            *([", ".join(choice.architectures)] if choice.architectures else []),
        ]
    )
