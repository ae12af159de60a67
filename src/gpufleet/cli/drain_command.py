"""`gpufleet cordon`, `uncordon`, `drain` and `undrain`: take a node out of service and back.

Thin: `drain_session.py` drains the node, and `on_node/change/change.py` sets the marks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import (
    fleet_command,
    inventory_argument,
    json_option,
    nodes_argument,
    operator_name,
)
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.errors import FleetError
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.cli.drain_session import NodeDrains
    from gpufleet.inventory.loader import Fleet
    from gpufleet.upgrade.run.node_answers import Marks

_why = click.option(
    "--why", metavar="TEXT", required=True, help="Reason, which gpufleet shows to other operators."
)
_force_mark = click.option(
    "--force", is_flag=True, help="Also remove the mark that an unfinished upgrade set."
)


@fleet_command()
@inventory_argument
@nodes_argument
@_why
@json_option
def cordon(inventory_file: str, names: tuple[str, ...], why: str, *, as_json: bool) -> int:
    """
    Place no more replicas on a node. Running replicas stay.

    \b
    gpufleet cordon inventories/prod.py gpu-07 --why "disk makes noises"

    Upgrades do not remove the cordon. If a node is already cordoned, its reason does not change.

    Exit status: 0: all nodes are cordoned. 2: a node is not cordoned, or its state is unknown.
    """
    from gpufleet.upgrade.run import node_questions

    asked = node_questions.cordon(operator_name(), why)
    return _change_marks(inventory_file, names, lambda _: asked, as_json=as_json)


@fleet_command()
@inventory_argument
@nodes_argument
@_force_mark
@json_option
def uncordon(inventory_file: str, names: tuple[str, ...], *, force: bool, as_json: bool) -> int:
    """
    Allow replicas to be placed on a node again.

    Drained replicas stay drained.

    \b
    gpufleet uncordon inventories/prod.py gpu-07

    Exit status: 0: the nodes are uncordoned. 1: a mark of an upgrade stays (see --force). 2: error.
    """
    from gpufleet.upgrade.run import node_questions

    asked = node_questions.uncordon(force=force)
    return _change_marks(inventory_file, names, lambda _: asked, as_json=as_json)


@fleet_command()
@inventory_argument
@click.argument("name", metavar="NODE", shell_complete=completers.nodes)
@_why
@click.option(
    "--seconds",
    type=click.IntRange(min=0, max=86400),
    help="Most seconds to wait for running requests.  [default: the longest "
    "`drain_seconds` of the node's models]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Drain the node even if no other replica serves one of its models.",
)
@json_option
def drain(
    inventory_file: str, name: str, why: str, *, seconds: int | None, force: bool, as_json: bool
) -> int:
    """
    Cordon a node, and wait for its requests to finish.

    Gateways stop sending requests to the replicas of NODE.

    \b
    gpufleet drain inventories/prod.py gpu-07 --why "new power supply"

    The command stops no process. A replica that spans nodes is drained on all of its nodes.
    Requests that do not finish in time continue, and the command prints their number.

    Exit status: 0: no request is left. 1: some requests are left, or their number is unknown. 2:
    error.
    """
    with _node_drains(inventory_file, name) as drains:
        found = drains.drain(name, why, seconds, force=force)
    _print_result(found, as_json=as_json)
    return int(not found["quiet"])


@fleet_command()
@inventory_argument
@click.argument("name", metavar="NODE", shell_complete=completers.nodes)
@_force_mark
@json_option
def undrain(inventory_file: str, name: str, *, force: bool, as_json: bool) -> int:
    """
    Send requests to a node's replicas again.

    Gateways send requests to the replicas of NODE again, and the cordon of the drain is removed.

    \b
    gpufleet undrain inventories/prod.py gpu-07

    A cordon that is older than the drain stays. `gpufleet uncordon` removes it.

    Exit status: 0: all replicas receive requests. 1: a mark of an upgrade stays (see --force). 2:
    error.
    """
    with _node_drains(inventory_file, name) as drains:
        found = drains.undrain(name, force=force)
    _print_result(found, as_json=as_json)
    return int(bool(found["problems"]))


@contextmanager
def _node_drains(inventory_file: str, name: str) -> Iterator[NodeDrains]:
    """Yield the drain session for a node. Its connections stay open until the session ends."""
    declared = _load_inventory(inventory_file, (name,))
    from gpufleet.cli.drain_session import NodeDrains
    from gpufleet.upgrade.run.connections import open_nodes

    with open_nodes(inventory_file) as nodes:
        yield NodeDrains(declared, nodes)


def _change_marks(
    inventory_file: str,
    names: tuple[str, ...],
    question: Callable[[str], Any],
    *,
    as_json: bool,
) -> int:
    """Set or remove a mark on nodes. Afterwards, print all marks of these nodes."""
    _load_inventory(inventory_file, names)
    from gpufleet.cli.drain_session import mark_json
    from gpufleet.fleet import live
    from gpufleet.upgrade.run.node_answers import Marks

    asked = question(names[0])
    problems: list[str] = []
    found: dict[str, Marks] = {}
    with live.connect(inventory_file, names) as ask:
        answers = ask(lambda _: asked.program, asked.seconds, asked.what)
    for name in dict.fromkeys(names):
        try:
            found[name] = Marks.read(name, answers.get(name, "gpufleet did not query the node"))
        except FleetError as error:
            problems += error.problems
    if as_json:
        shown = {
            name: {"cordon": mark_json(each.cordon), "changed": bool(each.changed)}
            | ({"problem": each.problem} if each.problem else {})
            for name, each in found.items()
        }
        click.echo(json.dumps(shown, indent=2))
    else:
        for name, each in found.items():
            click.echo(_marks_line(name, each))
    if problems:
        raise FleetError(*problems)
    return int(any(each.problem for each in found.values()))


def _marks_line(name: str, marks: Marks) -> str:
    if marks.problem:
        return printable(f"{name}: {marks.problem}")
    if marks.cordon is None:
        return f"{name}: is not cordoned{'' if marks.changed else ', and was not cordoned before'}"
    from gpufleet.cli.drain_session import mark_time

    drained = f"; drained replicas: {', '.join(sorted(marks.drained))}" if marks.drained else ""
    already = "" if marks.changed else " already"
    since = mark_time(marks.cordon)
    return f"{name}: is cordoned{already} by {marks.cordon} (since {since}){drained}"


def _print_result(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    name, replicas = found["node"], ", ".join(found["replicas"]) or "no replica"
    if found["did"] == "undrained":
        click.echo(
            f"{name}: {replicas} {'gets' if len(found['replicas']) == 1 else 'get'} requests again"
        )
        if mark := found["cordon"]:
            click.echo(printable(f"{name}: is still cordoned by {mark['by']}: {mark['why']}"))
    elif found["quiet"]:
        click.echo(f"{name}: {replicas} drained, no request left after {found['seconds']} s")
    else:
        silent = (
            f", and {', '.join(found['unknown'])} did not report its number of requests"
            if found["unknown"]
            else ""
        )
        click.echo(
            f"{name}: {replicas} drained, {found['left']} requests left after "
            f"{found['seconds']} s{silent}. These requests continue; to wait longer, run "
            "`gpufleet drain` again"
        )
    for problem in found["problems"]:
        click.echo(printable(f"note: {problem}"), err=True)


def _load_inventory(inventory_file: str, names: tuple[str, ...]) -> Fleet:
    """Return the inventory. Raises `FleetError` if one of the names is not a GPU node in it."""
    use_gevent()
    from gpufleet.formatting import suggestion
    from gpufleet.inventory.loader import read

    declared = read(inventory_file)
    known = list(declared.gpu_nodes)
    if strange := [name for name in names if name not in known]:
        raise FleetError(
            *(
                f"{inventory_file} has no GPU node {name!r}{suggestion(name, known)}"
                for name in strange
            )
        )
    return declared
