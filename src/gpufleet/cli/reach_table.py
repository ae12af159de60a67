"""What arrives between the nodes of a replica, as `gpufleet reach` prints it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from gpufleet.cli.tables import add_row, with_columns
from gpufleet.planning.multinode.reachability import Reach, Way
from gpufleet.sanitize import printable


def reach(found: Reach) -> RenderableType:
    """Return one line a node, with what arrives at each other one, then what is wrong."""
    by_ends = {(way.start, way.end): way for way in found.ways}
    nodes = found.replica.nodes
    table = with_columns(f"{found.replica.id}, from", *(f"to {node}" for node in nodes))
    for start in nodes:
        cells = [_way(by_ends.get((start, end)), start == end) for end in nodes]
        add_row(table, start, *cells)
    said = [*found.problems, *found.remarks]
    parts: list[RenderableType] = [table]
    if said:
        parts += [Text(), *(Text(printable(line)) for line in said)]
    verdict = Text(f"its nodes reach each other: proven in {found.seconds:.1f} s", style="green")
    if found.problems:
        verdict = Text("it would not be started", style="bold red")
    return Group(*parts, Text(), verdict, Text())


def _way(way: Way | None, itself: bool) -> Text:
    """Say what passes from one node to another."""
    if itself:
        return Text("")
    if way is None:
        return Text("unknown", style="red")
    if way.nothing:
        return Text("nothing", style="red")
    said = [f"{way.ports - len(way.failed)}/{way.ports} ports"]
    if way.bytes is not None:
        said.append(f"{way.bytes} B")
    if way.ahead is not None:
        said.append(f"{way.ahead:+.3f} s")
    return Text(", ".join(said), style="green" if way.good else "red")
