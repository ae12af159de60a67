"""`gpufleet settings`: show a setting's meaning, unit, default and an example."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import json_option, print_json
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.console import add_row, display, new_table

if TYPE_CHECKING:
    from rich.table import Table

    from gpufleet.settings.lookup import SettingEntry


@click.command(cls=StrictCommand)
@click.argument("key", required=False, shell_complete=completers.setting_keys)
@click.option(
    "--schema",
    "as_schema",
    is_flag=True,
    help="Print the JSON Schema of all settings, which editors can use.",
)
@json_option
def settings(key: str | None, *, as_schema: bool, as_json: bool) -> None:
    """
    Look up the type, unit, default and example of settings.

    \b
    gpufleet settings
    gpufleet settings gateway
    gpufleet settings serving.qwen3-32b.context
    gpufleet settings --schema > settings.schema.json

    Without KEY, list the sections. If KEY is a section, list the settings in it.
    """
    from gpufleet.settings import lookup

    if as_schema:
        click.echo(lookup.schema_text(), nl=False)
        return
    found: Iterable[SettingEntry] = (
        lookup.find_settings(key) if key else lookup.all_settings().values()
    )
    if as_json:
        print_json([entry.as_json() for entry in found])
        return
    entries = tuple(found)
    if not key:
        display(sections_table(entry for entry in entries if "." not in entry.key))
    elif len(entries) == 1:
        _print_one(entries[0])
    else:
        display(settings_table(entries))


def _print_one(entry: SettingEntry) -> None:
    click.echo(f"{entry.key}: {entry.description}\n")
    rows = (
        ("type", entry.type),
        ("unit", entry.unit),
        ("default", entry.default),
        ("example", entry.example),
    )
    for name, value in rows:
        if value:
            click.echo(f"  {name:8} {value}")


def sections_table(entries: Iterable[SettingEntry]) -> Table:
    """Return one line per top-level key."""
    table = new_table("key", "description", whole={"key"})
    for entry in entries:
        add_row(table, entry.key, entry.description)
    return table


def settings_table(entries: Iterable[SettingEntry]) -> Table:
    """Return one line per setting."""
    table = new_table("key", "value", "unit", "default", "description", whole={"key"})
    for entry in entries:
        value = "" if entry.type == "section" else entry.type
        add_row(table, entry.key, value, entry.unit, entry.default, entry.description)
    return table
