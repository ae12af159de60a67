"""`gpufleet drift`: show where nodes differ from their declaration, and optionally record it."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections import Counter
from typing import TYPE_CHECKING

import click

from gpufleet.cli.common_options import (
    fleet_command,
    inventory_argument,
    json_option,
    limit_option,
    record_option,
)
from gpufleet.cli.fleet_inputs import (
    select_limit,
    use_gevent,
    write_records,
)
from gpufleet.console import add_row, display, new_table
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpufleet.fleet.drift import Drift


@fleet_command()
@inventory_argument
@limit_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=300,
    show_default=True,
    help="Most seconds to wait for the answer of each node.",
)
@record_option
@json_option
def drift(
    inventory_file: str, *, limit: tuple[str, ...], seconds: float, record: bool, as_json: bool
) -> int:
    """
    Show where nodes differ from their declaration. Read-only.

    \b
    gpufleet drift inventories/prod.py
    gpufleet drift inventories/prod.py --limit gpu-07
    gpufleet drift inventories/prod.py --json > drift.json
    gpufleet drift inventories/prod.py --record

    --record writes the drift of each node to a small file on that node. Alerts use the file.

    The command shows what the deploys of nodes, vLLM, gateways, LiteLLM and monitoring would
    change. It also shows what works now but would fail after the next reboot or upgrade.

    Exit status: 0: no drift. 1: drift. 2: the drift of a node is unknown, or error.
    """
    use_gevent()
    found = compare_nodes(inventory_file, limit, seconds)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        display(drift_table(found))
    if record:
        from gpufleet.fleet import node_records

        now, refused = time.time(), bool(found.refused)
        write_records(
            inventory_file,
            node_records.DRIFT,
            {
                name: node_records.drift_record(each, now, refused=refused)
                for name, each in found.nodes.items()
            },
        )
    return found.status


def compare_nodes(inventory_file: str, limit: tuple[str, ...], seconds: float) -> Drift:
    """
    Compare the nodes of an inventory with their declaration.

    The function has the same side effects and exceptions as `dry_run`.
    """
    from gpufleet.fleet.drift import Drift, NodeDrift, deploy_files, drift_from_probes
    from gpufleet.fleet.dry_run import dry_run
    from gpufleet.inventory.loader import read

    declared = read(inventory_file)
    settings = {name: each.settings for name, each in declared.nodes.items()}
    files = {name: deploy_files(each) for name, each in settings.items()}
    seen = dry_run(inventory_file, files, select_limit(declared, limit), seconds)
    told = drift_from_probes(seen.answers, settings, dt.datetime.now(dt.UTC).date())
    nodes = {name: told.get(name, NodeDrift()) + found for name, found in seen.nodes.items()}
    return Drift(nodes, seen.refused)


def drift_table(found: Drift) -> RenderableType:
    """
    Return the differences and unknown parts of each node as a table, and the number of nodes by
    state.
    """
    from rich.console import Group
    from rich.text import Text

    from gpufleet.fleet.drift import DriftState

    table = new_table("node", "matters", "what", "says", "remedy")
    for name, node in sorted(found.nodes.items()):
        for moved in node.moved:
            add_row(table, name, moved.matters, moved.what, moved.source, moved.remedy)
        for unread in node.unread:
            add_row(table, name, "unknown", unread.why, unread.source, "", style="magenta")
    stands = Counter(node.state for node in found.nodes.values())
    line = ", ".join(f"{stands[stand]} {stand}" for stand in DriftState if stands[stand])
    refused = [Text(printable(f"gpufleet would refuse a deploy: {each}")) for each in found.refused]
    return Group(*([table] if table.row_count else []), *refused, Text(f"nodes: {line or 'none'}"))
