"""`gpufleet inventory`: show each node's declared values, and where they are set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import (
    fleet_command,
    inventory_argument,
    json_option,
    print_json,
)
from gpufleet.cli.fleet_inputs import (
    select_names,
)
from gpufleet.console import add_row, display, new_table, show_value

if TYPE_CHECKING:
    from rich.table import Table

    from gpufleet.inventory.loader import Fleet


@fleet_command()
@inventory_argument
@click.argument("node", required=False, shell_complete=completers.nodes)
@click.option("--changed", is_flag=True, help="Show only settings that differ from their defaults.")
@json_option
def inventory(inventory_file: str, node: str | None, *, changed: bool, as_json: bool) -> None:
    """Show every variable of the nodes, and where it is set."""
    from gpufleet.inventory.loader import read

    fleet = read(inventory_file)
    names = select_names(list(fleet.nodes), (node,) if node else (), inventory_file)
    if as_json:
        print_json(fleet.as_json(names, changed=changed))
        return
    display(nodes_table(fleet, names))
    click.echo()
    display(values_table(fleet, names, changed=changed))
    for remark in fleet.remarks:
        click.echo(f"note: {remark}", err=True)


def nodes_table(fleet: Fleet, names: Iterable[str]) -> Table:
    """Return one line per node: its address, its groups and its declared models."""
    table = new_table("node", "address", "groups", "models")
    for node in (fleet.nodes[name] for name in names):
        add_row(
            table, node.name, node.address, " ".join(node.groups), " ".join(node.settings.serving)
        )
    return table


def values_table(fleet: Fleet, names: Iterable[str], *, changed: bool = False) -> Table:
    """
    Return every value with its origin and its nodes.

    With `changed`, return only values that are set and differ from the default.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    total = 0
    for name in names:
        total += 1
        for key, value, origin in fleet.nodes[name].leaves(changed=changed):
            where = str(origin or "default")
            found.setdefault((key, show_value(value), where), []).append(name)
    table = new_table(
        "setting", "value", "set in", *(["nodes"] if total > 1 else []), whole={"setting"}
    )
    for (key, value, where), nodes in sorted(found.items(), key=lambda item: item[0][0]):
        which = ["all" if len(nodes) == total else _some(nodes)] if total > 1 else []
        add_row(table, key, value, where, *which, style="dim" if where == "default" else "")
    return table


def _some(names: list[str]) -> str:
    shown = " ".join(names[:3])
    return f"{shown} +{len(names) - 3}" if len(names) > 3 else shown
