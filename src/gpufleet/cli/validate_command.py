"""`gpufleet validate`: check an inventory's settings, files, flags and plan without nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet.cli.common_options import (
    fleet_command,
    hardware_option,
    inventory_argument,
    json_option,
    models_option,
    print_error,
    print_json,
)
from gpufleet.errors import FleetError
from gpufleet.formatting import count_of
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.fleet.inventory_check import Validation

MISTAKES, REMARKS = 2, 1


@fleet_command()
@inventory_argument
@hardware_option
@models_option
@click.option(
    "--without-secrets",
    is_flag=True,
    help="Do not check files with secrets, for machines that do not have these files.",
)
@click.option("--strict", is_flag=True, help="Exit with status 1 if there are notes.")
@json_option
def validate(
    inventory_file: str,
    *,
    hardware: tuple[str, ...],
    models_folder: Path | None,
    without_secrets: bool,
    strict: bool,
    as_json: bool,
) -> int:
    """
    Check settings, files, flags and plan without nodes.

    \b
    gpufleet validate inventories/prod.py
    gpufleet validate inventories/prod.py --as gpu_h100=h100x8,gpu_a100=a100x8
    gpufleet validate inventories/prod.py --without-secrets --strict --json

    Deploys and upgrades begin with this check. With --as, or if `gpus.hardware` is set for every
    GPU node, the command also plans the fleet for that hardware.

    Exit status: 0: no mistakes. 1: there are notes (only with --strict). 2: there are mistakes.
    """
    from gpufleet.fleet import inventory_check
    from gpufleet.fleet.declared_hardware import parse_hardware
    from gpufleet.inventory.loader import read

    nodes = models = 0
    try:
        fleet = read(inventory_file)
        nodes = len(fleet.nodes)
        models = len({name for node in fleet.nodes.values() for name in node.settings.serving})
        found = inventory_check.validate(
            fleet,
            hardware=parse_hardware(hardware),
            models_folder=models_folder,
            secret_files=not without_secrets,
        )
    except FleetError as error:
        found = inventory_check.Validation(problems=error.problems)
    if as_json:
        print_json({"inventory": inventory_file, **found.as_json()})
    else:
        _print(found, inventory_file, nodes, models)
    if found.problems:
        return MISTAKES
    return REMARKS if strict and found.remarks else 0


def _print(found: Validation, inventory_file: str, nodes: int, models: int) -> None:
    for remark in found.remarks:
        click.echo(printable(f"note: {remark}"), err=True)
    if found.problems:
        print_error(FleetError(*found.problems))
    counts = count_of(len(found.problems), "mistake") if found.problems else "no mistakes"
    notes = f", {count_of(len(found.remarks), 'note')}" if found.remarks else ""
    size = f"{count_of(nodes, 'node')}, {count_of(models, 'model')}: " if nodes else ""
    click.echo(printable(f"{inventory_file}: {size}{counts}{notes}"))
    if found.totals:
        click.echo(str(found.totals))
