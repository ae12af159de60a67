"""`gpufleet check`: check whether nodes are fit to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import json_option, limit_option, print_json, record_option
from gpufleet.cli.fleet_inputs import (
    load_probes,
    load_variables,
    probe_live,
    select_names,
    write_records,
)
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.console import add_row, display, new_table
from gpufleet.inventory.pyinfra_command import default_inventory

if TYPE_CHECKING:
    from rich.table import Table


@click.command(cls=StrictCommand)
@click.argument(
    "inventory_file",
    metavar="[INVENTORY]",
    required=False,
    shell_complete=completers.inventories,
)
@limit_option
@click.option(
    "--from",
    "files",
    multiple=True,
    metavar="FILE",
    help="Check recorded probes instead of live nodes.",
)
@click.option(
    "--vars",
    "vars_file",
    metavar="FILE",
    help="With --from: file with variables that apply to all nodes.",
)
@click.option("--all", "everything", is_flag=True, help="Also show checks that passed.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=60,
    show_default=True,
    help="Most seconds to wait for the answer of each node.",
)
@click.option("--list", "listing", is_flag=True, help="List all checks and exit.")
@record_option
@json_option
def check(
    inventory_file: str | None,
    *,
    limit: tuple[str, ...],
    files: tuple[str, ...],
    vars_file: str | None,
    everything: bool,
    seconds: float,
    listing: bool,
    record: bool,
    as_json: bool,
) -> int:
    """
    Check whether the nodes are fit to serve. Read-only.

    \b
    gpufleet check inventories/prod.py
    gpufleet check inventories/prod.py --json > report.json
    gpufleet check inventories/prod.py --record
    gpufleet check --from report.json

    --record writes the results of each node to a small file on that node. Alerts use the file.

    Exit status: 0: all nodes are fit. 1: a check blocks or could not run. 2: error.
    """
    from gpufleet.fleet.assessment import check_nodes

    if listing:
        display(checks_table())
        return 0
    if not (inventory_file or files):
        inventory_file = default_inventory()
    if inventory_file and files:
        raise click.UsageError(
            "INVENTORY and --from exclude each other: give one INVENTORY, or recorded probes "
            "with --from."
        )
    if inventory_file:
        if vars_file:
            raise click.UsageError(
                "--vars works only with --from, because an inventory has its own variables: "
                "remove --vars."
            )
        answers, declared = probe_live(inventory_file, limit, seconds)
    else:
        if record:
            raise click.UsageError(
                "--record works only with live nodes: remove --record or --from."
            )
        recorded = load_probes(files)
        names = select_names(list(recorded), limit, ", ".join(files))
        answers = {name: recorded[name] for name in names}
        declared = load_variables(vars_file, names) if vars_file else {}
    report = check_nodes(answers, declared)
    if as_json:
        print_json(report.as_json())
    else:
        from gpufleet.checks.table import report_table

        display(report_table(report, everything=everything))
    if inventory_file and record:
        import time

        from gpufleet.fleet import node_records

        now = time.time()
        write_records(
            inventory_file,
            node_records.CHECK,
            {
                name: node_records.check_record(
                    report.node_findings[name], node_records.probed_at(answer, now)
                )
                for name, answer in answers.items()
            },
        )
    return int(report.verdict().stops)


def checks_table() -> Table:
    """Return one line per check: its name, its question, and which of its parts need root."""
    from gpufleet.catalog.checks import CHECKS

    table = new_table("check", "question", "needs root for")
    for each in CHECKS.values():
        add_row(table, each.id, each.question, each.root or "")
    return table
