"""`gpufleet probe`: read the nodes' hardware and software."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpufleet.cli.common_options import (
    fleet_command,
    inventory_argument,
    json_option,
    limit_option,
    print_json,
)
from gpufleet.cli.fleet_inputs import (
    select_limit,
    use_gevent,
)
from gpufleet.console import add_row, display, new_table
from gpufleet.formatting import ranges

if TYPE_CHECKING:
    from rich.table import Table

    from gpufleet.node.topology import Node


@fleet_command()
@inventory_argument
@limit_option
@json_option
def probe(inventory_file: str, limit: tuple[str, ...], as_json: bool) -> None:
    """Read the nodes' hardware and software. Installs nothing."""
    use_gevent()
    from gpufleet.fleet import live
    from gpufleet.fleet.assessment import require_documents
    from gpufleet.inventory.loader import read
    from gpufleet.node.topology import node_from_probe

    wanted = select_limit(read(inventory_file), limit)
    documents = require_documents(live.probe(inventory_file, wanted))
    if as_json:
        print_json(documents)
        return
    nodes = [node_from_probe(name, document) for name, document in documents.items()]
    display(probe_table(nodes))


def probe_table(nodes: Iterable[Node]) -> Table:
    """Return one line per node with the probe's findings."""
    table = new_table("node", "driver", "CUDA", "GPUs", "NVLink islands")
    for node in nodes:
        kinds: dict[str, int] = {}
        for gpu in node.gpus:
            kinds[gpu.name] = kinds.get(gpu.name, 0) + 1
        add_row(
            table,
            node.name,
            node.driver or "none",
            ".".join(map(str, node.cuda)) if node.cuda else "none",
            ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none",
            " | ".join(ranges(island) for island in node.islands if len(island) > 1) or "none",
        )
    return table
