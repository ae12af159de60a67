"""`gpufleet preflight`: show whether each condition for letting users in is met, with proof."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet.cli.common_options import (
    ca_file_option,
    fleet_command,
    inventory_argument,
    json_option,
    key_file_option,
    print_json,
)
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.console import add_row, display, new_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpufleet.preflight.line import Preflight

_STYLES = {"OK": "green", "WARN": "yellow", "UNKNOWN": "magenta", "FAIL": "bold red"}


@fleet_command()
@inventory_argument
@key_file_option
@ca_file_option
@click.option(
    "--test-alert",
    is_flag=True,
    help="Send one test alert to the person on call. This takes up to 50 s longer.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the result as an HTML page to this file.",
)
@json_option
def preflight(
    inventory_file: str,
    *,
    key_file: str | None,
    ca_file: str | None,
    test_alert: bool,
    output: Path | None,
    as_json: bool,
) -> int:
    """
    Show what is not ready for users, with proof. Read-only.

    \b
    gpufleet preflight inventories/prod.py
    gpufleet preflight inventories/prod.py --key-file secrets/bench-key -o preflight.html
    gpufleet preflight inventories/prod.py --test-alert

    The command changes nothing. Only --test-alert sends one alert. The command takes at most a
    minute.

    Exit status: 0: all results are OK or WARN. 1: a result is FAIL. 2: a result is UNKNOWN and none
    is FAIL, or error.
    """
    use_gevent()
    from gpufleet.cli.preflight_session import PreflightOptions, Session

    interactive = sys.stdin.isatty() and sys.stderr.isatty()
    found = Session(
        inventory_file, PreflightOptions(key_file, ca_file, test_alert, interactive)
    ).look()
    if output is not None:
        from gpufleet.paths import write_whole
        from gpufleet.preflight.preflight_page import preflight_page

        write_whole(output, preflight_page(found))
    if as_json:
        print_json(found.as_json())
    else:
        display(preflight_table(found))
    return found.exit_status


def preflight_table(found: Preflight) -> RenderableType:
    """Return one line per finding, then the number of findings of each status."""
    from rich.console import Group
    from rich.text import Text

    from gpufleet.preflight.line import Status

    table = new_table("", "line", "about", "found", "proof", "what to do")
    for line in found.lines:
        of = line.verdict
        status = Text(str(line.status), style=_STYLES[line.status])
        add_row(table, status, line.check, line.subject, of.what, of.proof, of.remedy)
    counts = ", ".join(f"{found.counts[each]} {each}" for each in reversed(Status))
    return Group(table, Text(), Text(counts))
