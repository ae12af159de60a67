"""`gpufleet reach`: test whether the nodes of a replica reach each other."""

from __future__ import annotations

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
    probe_live,
    select_names,
    use_gevent,
)
from gpufleet.console import add_row, display, new_table
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from gpufleet.planning.multinode.reachability import ReachabilityResult, Route


@fleet_command()
@inventory_argument
@click.argument("replica", required=False, shell_complete=completers.replicas)
@json_option
def reach(inventory_file: str, replica: str | None, *, as_json: bool) -> int:
    """
    Test that the nodes of a replica reach each other.

    \b
    gpufleet reach inventories/prod.py
    gpufleet reach inventories/prod.py llama-0 --json

    The command runs the test that a deploy runs before it starts a replica. It tests connections
    between all nodes on the replica's ports, packets of full size, the clocks, the release and the
    model's files. It skips ports that are in use, and installs nothing.

    Exit status: 0: all nodes reach each other. 1: some nodes do not. 2: error.
    """
    use_gevent()
    from gpufleet.fleet import live
    from gpufleet.fleet.assessment import plan_fleet
    from gpufleet.operations import check_reachability

    answers, declared = probe_live(inventory_file)
    plan = plan_fleet(answers, declared, unfit_stops=False).plan
    spanning = {stage.id: stage for stage in plan.stages if stage.group}
    wanted = select_names(
        list(spanning), (replica,) if replica else (), f"the plan over {inventory_file}"
    )
    settings = {name: each.settings for name, each in declared.items()}
    replicas = [check_reachability.describe_replica(spanning[name], settings) for name in wanted]
    if not replicas:
        click.echo("no replica spans nodes")
        return 0
    nodes = tuple(sorted({node for each in replicas for node in each.nodes}))
    with live.connect(inventory_file, nodes) as ask:
        found = [check_reachability.probe_reachability(each, ask) for each in replicas]
    if as_json:
        print_json([each.as_json() for each in found])
    else:
        for each in found:
            display(reach_table(each))
    return int(any(each.problems for each in found))


def reach_table(found: ReachabilityResult) -> RenderableType:
    """Return one line per node with its paths to the other nodes, then the problems."""
    from rich.console import Group
    from rich.text import Text

    by_ends = {(way.start, way.end): way for way in found.ways}
    nodes = found.replica.nodes
    table = new_table(f"{found.replica.id}, from", *(f"to {node}" for node in nodes))
    for start in nodes:
        cells = [_way(by_ends.get((start, end)), start == end) for end in nodes]
        add_row(table, start, *cells)
    said = [*found.problems, *found.remarks]
    parts: list[RenderableType] = [table]
    if said:
        parts += [Text(), *(Text(printable(line)) for line in said)]
    verdict = Text(
        f"the nodes of the replica reach each other (tested in {found.seconds:.1f} s)",
        style="green",
    )
    if found.problems:
        verdict = Text("a deploy would not start this replica", style="bold red")
    return Group(*parts, Text(), verdict, Text())


def _way(way: Route | None, itself: bool) -> Text:
    """Return the text for the measured path from one node to another, with a colour."""
    from rich.text import Text

    if itself:
        return Text("")
    if way is None:
        return Text("unknown", style="red")
    if way.is_dead:
        return Text("nothing", style="red")
    said = [f"{way.ports - len(way.failed)}/{way.ports} ports"]
    if way.bytes is not None:
        said.append(f"{way.bytes} B")
    if way.ahead is not None:
        said.append(f"{way.ahead:+.3f} s")
    return Text(", ".join(said), style="green" if way.is_good else "red")
