"""`gpufleet plan`: which GPUs would serve what, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import click

from gpufleet.cli.common_options import (
    json_option,
    print_json,
)
from gpufleet.cli.fleet_inputs import (
    load_probes,
    load_variables,
    probe_live,
)
from gpufleet.console import add_row, display, new_table, show_value
from gpufleet.formatting import ranges
from gpufleet.inventory.pyinfra_command import default_inventory
from gpufleet.redact import find_secrets, hide_secrets
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from rich.table import Table

    from gpufleet.node.topology import Node
    from gpufleet.planning.explanation import Change
    from gpufleet.planning.flag_layers import LayeredFlag
    from gpufleet.planning.planner import FleetPlan
    from gpufleet.planning.stage import Stage
    from gpufleet.settings.node_variables import NodeVars


@click.command()
@click.argument("targets", metavar="[INVENTORY]", nargs=-1)
@click.option(
    "--nodes", multiple=True, metavar="FILE...", help="Plan for saved probes, not for live nodes."
)
@click.option("--vars", "vars_file", metavar="FILE", help="With --nodes: the variables of all.")
@click.option(
    "--explain", "explained", is_flag=True, help="Show every candidate, and why it was not taken."
)
@click.option("--diff", "compared", is_flag=True, help="Show what changes against what runs now.")
@json_option
def plan(
    targets: tuple[str, ...],
    *,
    nodes: tuple[str, ...],
    vars_file: str | None,
    explained: bool,
    compared: bool,
    as_json: bool,
) -> None:
    """
    Show which GPUs of which node would serve what, and why. Changes nothing.

    \b
    gpufleet plan inventories/prod.py
    gpufleet plan inventories/prod.py --explain
    gpufleet plan inventories/prod.py --diff
    gpufleet plan --vars serving.yml --nodes probes.json

    The files of --nodes are what `gpufleet probe --json` prints, or one node's probe each, named
    after the node.
    """
    if nodes or vars_file:
        files = (*nodes, *targets)
        if not (files and vars_file):
            raise click.UsageError("--nodes and --vars belong together: give both.")
        answers = load_probes(files)
        declared: Mapping[str, NodeVars] = load_variables(vars_file, answers)
    elif len(targets) <= 1:
        answers, declared = probe_live(targets[0] if targets else default_inventory())
    else:
        raise click.UsageError("Give one INVENTORY, or --nodes and --vars.")

    from gpufleet.fleet.assessment import plan_fleet
    from gpufleet.planning.explanation import explain

    found = plan_fleet(answers, declared)
    for remark in found.remarks:
        click.echo(printable(f"note: {remark}"), err=True)
    if as_json:
        print_json(found.as_json())
        return
    if explained:
        click.echo(printable(explain(found.plan, found.nodes.values())), nl=False)
    if compared:
        display(changes_table(found.changes))
    if explained or compared:
        return
    display(plan_table(found.plan, found.nodes))
    if found.layers:
        click.echo()
        display(layers_table(found.layers))
    click.echo()
    for reason in found.plan.reasons:
        click.echo(printable(reason))


def plan_table(plan: FleetPlan, nodes: Mapping[str, Node]) -> Table:
    """Return one line a stage: where it runs and on what."""
    table = new_table("model", "replica", "node", "GPUs", "NVLink island", "TP", "port")
    for stage in plan.stages:
        add_row(
            table,
            stage.model,
            str(stage.replica),
            stage.node,
            ranges(stage.gpus),
            _island(stage, nodes[stage.node]),
            str(stage.tensor_parallel),
            ranges(stage.ports) or "-",
        )
    return table


def _island(stage: Stage, node: Node) -> str:
    for island in node.islands:
        if set(stage.gpus) <= set(island):
            return ranges(island) if len(island) > 1 else "-"
    return "several: PCIe between them"


def layers_table(layers: Mapping[tuple[str, str], Iterable[LayeredFlag]]) -> Table:
    """Return one line a flag of each model that somebody set, and who did."""
    table = new_table("model", "flag", "value", "set by", "because")
    for (model, _), flags in layers.items():
        for each in flags:
            because = each.because if len(each.because) < 60 else each.because[:57] + "..."
            value = hide_secrets(show_value(each.value), find_secrets(each.value))
            add_row(table, model, f"--{each.name}", value, each.layer, because)
    return table


def changes_table(changes: Iterable[Change]) -> Table:
    """Return one line a replica: what a deploy would do with it."""
    from gpufleet.planning.explanation import Action

    table = new_table("replica", "", "runs now", "is to run", "why")
    for each in changes:
        after = "" if each.action is Action.STAY else each.after
        add_row(table, each.replica, str(each.action), each.before, after, each.why)
    return table
