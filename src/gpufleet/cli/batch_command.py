"""`gpufleet batch`: send a file of requests beside users' traffic, and resume stopped runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from gpufleet.formatting import count_of, format_duration
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.cli.batch_session import Summary


@fleet_command()
@inventory_argument
@click.argument("model")
@click.argument(
    "requests", metavar="INPUT", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write answers to this file. If the file is from an earlier run, continue that run.",
)
@click.option(
    "--replica",
    metavar="ID",
    help="Send the requests to this replica's own server, for example tiny-0.",
)
@click.option("--gateway", metavar="NODE", help="Send the requests through this node's gateway.")
@key_file_option
@ca_file_option
@click.option(
    "--guest",
    "share",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.5,
    show_default=True,
    metavar="SHARE",
    help="Use at most this share of the idle capacity.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Most requests at once.  [default: as many as the idle capacity allows]",
)
@click.option(
    "--patience",
    type=click.IntRange(min=1),
    default=3600,
    show_default=True,
    help="Stop if no answer arrives for this many seconds.",
)
@click.option("--retry-failed", is_flag=True, help="Send the lines that failed again.")
@json_option
def batch(inventory_file: str, requests: Path, *, as_json: bool, **given: Any) -> int:
    """
    Send a file of requests beside users' traffic.

    INPUT has one request on each line, in OpenAI's batch format. The command uses a share of the
    idle capacity, and sends nothing while users' requests wait. If the command was stopped or
    killed, run it again to resume.

    \b
    gpufleet batch inventories/prod.py llama in.jsonl -o out.jsonl --key-file secrets/batch-key
    gpufleet batch inventories/prod.py llama in.jsonl -o out.jsonl --key-file key --guest 0.2
    gpufleet batch inventories/prod.py llama in.jsonl -o out.jsonl --key-file key --retry-failed

    Exit status: 0: all lines are answered. 1: some lines failed or are left. 2: the command was
    refused.
    """
    use_gevent()
    from gpufleet.cli.batch_session import BatchOptions, Session

    found = Session(inventory_file, BatchOptions(input=requests, **given)).run()
    if as_json:
        print_json(found.as_json())
    else:
        click.echo("\n".join(map(printable, summary_lines(found))))
    if found.left:
        again = shlex.join(each for each in sys.argv[1:] if each != "--retry-failed")
        click.echo(
            printable(f"{found.stopped or 'ended'}: to continue, run: gpufleet {again}"), err=True
        )
    if found.signal:
        return 128 + found.signal
    return int(bool(found.left or found.totals.failed))


def summary_lines(found: Summary) -> list[str]:
    """Return the counts of lines by outcome, as text."""
    totals = found.totals
    failed = totals.failed.total()
    lines = [
        f"{found.output}: {totals.answered} of {count_of(found.lines, 'line')} answered, "
        f"{failed} failed, {found.left} left; {totals.prompt_tokens} prompt and "
        f"{totals.completion_tokens} completion tokens; {format_duration(found.seconds)}"
    ]
    lines += [f"failed: {count} with {code}" for code, count in totals.failed.most_common()]
    return lines
