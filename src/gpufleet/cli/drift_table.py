"""What has moved on nodes, as `gpufleet drift` prints it."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from gpufleet.cli.tables import add_row, with_columns
from gpufleet.fleet.drift import Drift, Stand
from gpufleet.sanitize import printable


def drift(found: Drift) -> RenderableType:
    """Return what has moved and what is unknown of each node, and a line for the fleet."""
    table = with_columns("node", "matters", "what", "says", "remedy")
    for name, node in sorted(found.nodes.items()):
        for moved in node.moved:
            add_row(table, name, moved.matters, moved.what, moved.source, moved.remedy)
        for unread in node.unread:
            add_row(table, name, "unknown", unread.why, unread.source, "", style="magenta")
    stands = Counter(node.stand for node in found.nodes.values())
    line = ", ".join(f"{stands[stand]} {stand}" for stand in Stand if stands[stand])
    refused = [Text(printable(f"a deploy would be refused: {each}")) for each in found.refused]
    return Group(*([table] if table.row_count else []), *refused, Text(f"nodes: {line or 'none'}"))
