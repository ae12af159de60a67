"""`gpufleet plan`: show which GPUs each model would use, and why."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import hardware_option, json_option, models_option, print_json
from gpufleet.cli.fleet_inputs import (
    load_probes,
    load_variables,
    probe_live,
    read_saved,
)
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.console import add_row, display, new_table, show_value
from gpufleet.formatting import ranges
from gpufleet.inventory.pyinfra_command import default_inventory
from gpufleet.redact import find_secrets, hide_secrets
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from rich.table import Table

    from gpufleet.fleet.fleet_plan import Assessment
    from gpufleet.fleet.measured_rates import ModelRate
    from gpufleet.node.topology import Node
    from gpufleet.planning.explanation import Change
    from gpufleet.planning.flag_layers import LayeredFlag
    from gpufleet.planning.planner import FleetPlan
    from gpufleet.planning.stage import Stage
    from gpufleet.remote.query import Answer
    from gpufleet.settings.node_variables import NodeVars


@click.command(cls=StrictCommand)
@click.argument("targets", metavar="[INVENTORY]", nargs=-1, shell_complete=completers.inventories)
@hardware_option
@click.option(
    "--nodes", multiple=True, metavar="FILE", help="Plan for saved probes instead of live nodes."
)
@click.option(
    "--vars",
    "vars_file",
    metavar="FILE",
    help="With --nodes and without an inventory: file with all variables.",
)
@models_option
@click.option(
    "--explain",
    "explained",
    is_flag=True,
    help="Show every way to place a model that was considered, and why it was not chosen.",
)
@click.option(
    "--diff", "compared", is_flag=True, help="Show what a deploy would change on the running fleet."
)
@json_option
def plan(
    targets: tuple[str, ...],
    *,
    hardware: tuple[str, ...],
    nodes: tuple[str, ...],
    vars_file: str | None,
    models_folder: Path | None,
    explained: bool,
    compared: bool,
    as_json: bool,
) -> None:
    """
    Show which GPUs each model would use, and why.

    \b
    gpufleet plan inventories/prod.py
    gpufleet plan inventories/prod.py --explain
    gpufleet plan inventories/prod.py --diff
    gpufleet plan inventories/prod.py --as h100x8
    gpufleet plan inventories/prod.py --as gpu_h100=h100x8,gpu_a100=a100x8
    gpufleet plan inventories/prod.py --nodes probes.json
    gpufleet plan --vars serving.yml --nodes probes.json

    If there are results of `gpufleet measure`, the command also shows the measured rate of the
    replicas.

    A --nodes file is the output of `gpufleet probe --json`, or a file with one probe and the name
    of its node. If you also give --as, all other nodes are planned with that hardware.
    """
    if len(targets) > 1 and not (nodes or vars_file):
        raise click.UsageError("Give either one INVENTORY, or --nodes and --vars.")
    inventory = "INVENTORY" if vars_file else (targets or (default_inventory(),))[0]
    answers, declared = _nodes(inventory, targets, nodes, vars_file, hardware)

    from gpufleet.fleet.assessment import plan_fleet
    from gpufleet.planning.explanation import explain

    found = plan_fleet(answers, declared, models_folder=models_folder, inventory=inventory)
    for remark in found.remarks:
        click.echo(printable(f"note: {remark}"), err=True)
    measured = () if vars_file else _measured(inventory, found, declared)
    if as_json:
        print_json({**found.as_json(), "measured": [each.as_json() for each in measured]})
        return
    if explained:
        click.echo(printable(explain(found.plan, found.usable_nodes)), nl=False)
        _echo_measured(measured)
        click.echo(f"\n{printable(str(found.totals))}")
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
    _echo_measured(measured)
    click.echo(f"\n{printable(str(found.totals))}")


def _measured(
    inventory: str, found: Assessment, declared: Mapping[str, NodeVars]
) -> tuple[ModelRate, ...]:
    """
    Return the measured rates of planned replicas. Print a note for each result that is damaged.
    """
    from gpufleet.fleet.measured_rates import plan_rates, stored_results

    there = stored_results(inventory)
    for problem in there.problems:
        click.echo(printable(f"note: {problem}"), err=True)
    settings = {name: each.settings for name, each in declared.items()}
    return plan_rates(there.measurements, found, settings, dt.datetime.now(dt.UTC))


def _echo_measured(measured: Iterable[ModelRate]) -> None:
    for number, each in enumerate(measured):
        click.echo(("" if number else "\n") + printable(str(each)))


def _nodes(
    inventory: str,
    targets: tuple[str, ...],
    nodes: tuple[str, ...],
    vars_file: str | None,
    hardware: tuple[str, ...],
) -> tuple[Mapping[str, Answer], Mapping[str, NodeVars]]:
    """Return each node's probe and declaration. The options decide where they come from."""
    if vars_file:
        files = (*nodes, *targets)
        if hardware or not files:
            raise click.UsageError("--vars works only with --nodes and without an inventory.")
        answers = load_probes(files)
        return answers, load_variables(vars_file, answers)
    if nodes or hardware:
        return read_saved(inventory, (*nodes, *targets[1:]), hardware)
    return probe_live(inventory)


def plan_table(plan: FleetPlan, nodes: Mapping[str, Node]) -> Table:
    """Return a table of the plan. Nodes with the same stages share one row for each stage."""
    from gpufleet.planning.gpu_totals import equal_nodes, gpus_text

    table = new_table("nodes", "model", "replicas", "GPUs", "NVLink island", "TP", "port")
    for block in equal_nodes(plan, nodes.values()):
        for stage, replicas in zip(block.stages, block.replicas, strict=True):
            add_row(
                table,
                block.names if stage is block.stages[0] else "",
                stage.model if stage.kind == "generate" else f"{stage.model} ({stage.kind})",
                ranges(replicas),
                gpus_text(stage),
                _island(stage, block.nodes[0]),
                str(stage.tensor_parallel),
                ranges(stage.ports) or "-",
            )
    return table


def _island(stage: Stage, node: Node) -> str:
    for island in node.islands:
        if set(stage.gpus) <= set(island):
            return ranges(island) if len(island) > 1 else "-"
    return "several, linked by PCIe"


def layers_table(layers: Mapping[tuple[str, str], Iterable[LayeredFlag]]) -> Table:
    """Return one line for each flag of each model, with the source that has set the flag."""
    table = new_table("model", "flag", "value", "set by", "because", whole={"flag"})
    for (model, _), flags in layers.items():
        for each in flags:
            because = each.because if len(each.because) < 60 else each.because[:57] + "..."
            value = hide_secrets(show_value(each.value), find_secrets(each.value))
            add_row(table, model, f"--{each.name}", value, each.layer, because)
    return table


def changes_table(changes: Iterable[Change]) -> Table:
    """Return one line per replica, with what a deploy would do with the replica."""
    from gpufleet.planning.explanation import Action

    table = new_table("replica", "", "runs now", "should run", "why")
    for each in changes:
        after = "" if each.action is Action.STAY else each.after
        add_row(table, each.replica, str(each.action), each.before, after, each.why)
    return table
