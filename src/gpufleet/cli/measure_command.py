"""`gpufleet measure`: measure the requests a second that a replica or a fleet can serve."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpufleet.cli.common_options import (
    FleetCommand,
    ca_file_option,
    inventory_argument,
    json_option,
    key_file_option,
    print_json,
)
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.errors import FleetError
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.cli.measure_session import Session
    from gpufleet.cli.measure_wanted import MeasureOptions

PRESETS = (
    "chat", "rag", "code", "batch", "pictures",
    "documents", "queries", "candidates", "recordings",
)  # fmt: skip
"""
The names of all presets.

They are defined in `load_test.workloads`, `load_test.pooled_work` and `load_test.media_work`.
"""


class MeasureCommand(FleetCommand):
    """A command that compares two results without an inventory."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default inventory unless the command compares results."""
        if "--compare" in args:
            return click.Command.parse_args(self, ctx, ["-", *args])
        return super().parse_args(ctx, args)


@click.command(cls=MeasureCommand)
@inventory_argument
@click.argument("model", required=False)
@click.option("--replica", metavar="ID", help="Measure this replica's own server: tiny-0.")
@click.option("--gateway", metavar="NODE", help="Measure the model behind this node's gateway.")
@click.option(
    "--from",
    "from_node",
    metavar="NODE",
    help="Run the load clients on this node of the inventory.  [default: this machine]",
)
@key_file_option
@ca_file_option
@click.option(
    "--preset",
    type=click.Choice(PRESETS),
    help="Lengths of prompts and answers.  [default: the first of the model's kind]",
)
@click.option(
    "--lengths",
    metavar="IN,OUT",
    help="Instead of a preset: 1000,200 tokens; WORDS,TOKENS,PIXELS with a picture; 256 for an "
    "embedder; QUERY,DOCUMENT,COUNT; seconds of sound.",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False),
    help="File of your own requests, one JSON object per line. Their contents are never printed.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False),
    help="Replay a trace once: one JSON object with `timestamp` and lengths per line.",
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="This rate only.")
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="Closed loop with this many clients."
)
@click.option(
    "--closed-loop",
    is_flag=True,
    help="Also find the concurrency at which a closed loop meets the objectives.",
)
@click.option("--most", type=click.FloatRange(min=0, min_open=True), help="Never a higher rate.")
@click.option(
    "--share",
    type=click.FloatRange(min=0.5, max=0.999),
    default=0.95,
    show_default=True,
    help="Share of requests that must meet the objectives.",
)
@click.option(
    "--seconds",
    type=click.IntRange(min=10, max=3600),
    default=120,
    show_default=True,
    help="Time limit for a level of load; a search takes longer where few requests arrive.",
)
@click.option(
    "--guest",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="SHARE",
    help="Measure beside users: use at most this share of the idle capacity.",
)
@click.option("--processes", type=click.IntRange(min=1, max=64), help="Client processes.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of arrivals and lengths.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for results.  [default: measurements/ beside inventories/]",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="A B",
    help="Compare two results instead; B may be of vllm bench serve, guidellm or aiperf.",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Try settings on one drained replica and propose the best; it is deployed as declared "
    "again afterwards.",
)
@click.option(
    "--try",
    "tries",
    multiple=True,
    metavar="NAME=V,V",
    help="With --tune: values of max-num-seqs, max-num-batched-tokens or tensor_parallel.  "
    "[default: half and twice the running value; divisions that fit]",
)
@json_option
def measure(inventory_file: str, *, compare: tuple[Path, Path] | None, **given: Any) -> int:
    """
    Measure how many requests per second a model carries.

    Finds the highest rate of arrivals at which the model's `objectives` are still met.

    \b
    gpufleet measure inventories/prod.py llama --gateway lb-01 --key-file secrets/bench-key
    gpufleet measure inventories/prod.py --replica llama-0 --preset rag
    gpufleet measure inventories/prod.py llama --guest 0.3 --gateway lb-01 --key-file key
    gpufleet measure inventories/prod.py llama --gateway lb-01 --key-file key --from load-01
    gpufleet measure inventories/prod.py --replica llama-0 --closed-loop
    gpufleet measure inventories/prod.py llama --tune --try max-num-seqs=128,256
    gpufleet measure --compare measurements/a.json measurements/b.json

    Puts load on the model: without --guest only if no other request is in flight. Changes nothing
    on nodes except with --tune, and leaves nothing there. Results are files: JSON, a Benchmark
    Report for each level, and a page.

    Exit status: 0 found, 1 unknown or objectives never met (with --tune: by the declared settings),
    2 error.
    """
    if compare:
        return _print_comparison(*compare, as_json=given["as_json"])
    use_gevent()
    from gpufleet.cli.measure_output import print_result, write_result
    from gpufleet.cli.measure_session import Session
    from gpufleet.cli.measure_wanted import MeasureOptions
    from gpufleet.load_test.subjects import measurements_folder

    wanted = MeasureOptions(**given)
    with Session(inventory_file, wanted) as session:
        if wanted.tune:
            return _tune(session, wanted)
        found = session.measure()
    files = write_result(found, wanted.output or measurements_folder(inventory_file))
    if wanted.as_json:
        print_json(found.as_json())
    else:
        print_result(found, files)
    return int(found.found.kept is None or found.found.status not in _FOUND)


def _tune(session: Session, wanted: MeasureOptions) -> int:
    from gpufleet.cli.measure_output import print_tuning
    from gpufleet.cli.tune_session import TuneSession

    found = TuneSession(session, wanted).tune()
    if wanted.as_json:
        print_json(found.as_json())
    else:
        print_tuning(found, session.wanted.model or "")
    declared = found.trials[0].measured
    return int(declared is None or declared.found.status not in _FOUND)


# The rate is known: the highest that meets the objectives, or all of the load that was asked for.
_FOUND = ("found", "ceiling")


def _print_comparison(a: Path, b: Path, *, as_json: bool) -> int:
    from gpufleet.load_test import compare_results, foreign_results, result

    one = result.read(a)
    try:
        found = compare_results.compare(one, result.read(b))
    except FleetError as error:
        try:
            theirs = foreign_results.read_foreign(b)
        except FleetError:
            raise error from None
        found = compare_results.compare_foreign(one, theirs)
    if as_json:
        print_json(asdict(found))
    else:
        click.echo("\n".join(map(printable, found.lines())))
    return 0
