"""`gpufleet logs`: show the logs of a replica's ranks, merged by time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import (
    fleet_command,
    inventory_argument,
    limit_option,
)
from gpufleet.cli.fleet_inputs import (
    select_limit,
    use_gevent,
)
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.serving.logs import Journals, Line


# Seconds between two queries of followed journals. A query costs a node one short Python process.
FOLLOW_SECONDS = 2


@fleet_command()
@inventory_argument
@click.argument("replica", shell_complete=completers.replicas)
@limit_option
@click.option(
    "--since",
    metavar="TIME",
    help="Show lines from this time on: 10m, 2h or 1d ago, or a time such as "
    "2026-11-21T19:40 (UTC).",
)
@click.option(
    "--lines", default=200, show_default=True, help="Show at most this number of lines, the newest."
)
@click.option("--follow", "-f", is_flag=True, help="Continue to print new lines as they appear.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=30,
    show_default=True,
    help="Most seconds to wait for the answer of each node.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on each line.")
def logs(
    inventory_file: str,
    replica: str,
    *,
    limit: tuple[str, ...],
    since: str | None,
    lines: int,
    follow: bool,
    seconds: float,
    as_json: bool,
) -> int:
    """
    Show the logs of a replica's ranks, merged by time.

    The nodes remove secrets from the logs before they send them.

    \b
    gpufleet logs inventories/prod.py llama-0
    gpufleet logs inventories/prod.py llama-0 --since 10m --lines 2000
    gpufleet logs inventories/prod.py llama-0 --follow

    Exit status: 0: complete. 1: lines of a node are missing. 2: error.
    """
    use_gevent()
    import gevent

    from gpufleet.fleet import live
    from gpufleet.inventory.loader import read
    from gpufleet.serving.logs import Journals, parse_since

    wanted = select_limit(read(inventory_file), limit)
    reading = Journals(replica, lines, parse_since(since))
    with live.connect(inventory_file, wanted) as ask:
        while True:
            found = reading.take(ask(reading.program, seconds, "the query of the journal"))
            _print_lines(reading, found, as_json=as_json)
            if not follow:
                return int(not reading.whole)
            gevent.sleep(FOLLOW_SECONDS)


def _print_lines(reading: Journals, found: list[Line], *, as_json: bool) -> None:
    """Print lines in the given order, and remarks about them on stderr."""
    from gpufleet.serving.logs import format_lines

    if as_json:
        for line in found:
            click.echo(json.dumps(line.as_json()))
    else:
        for text in format_lines(found, reading.nodes):
            click.echo(text)
    for note in reading.notes:
        click.echo(f"note: {printable(note)}", err=True)
    reading.notes.clear()
