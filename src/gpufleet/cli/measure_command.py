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
    """The command `measure`, which needs no inventory if it compares two results."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default inventory, unless the command compares two results."""
        if "--compare" in args:
            return click.Command.parse_args(self, ctx, ["-", *args])
        return super().parse_args(ctx, args)


@click.command(cls=MeasureCommand)
@inventory_argument
@click.argument("model", required=False)
@click.option(
    "--replica", metavar="ID", help="Measure this replica's own server, for example tiny-0."
)
@click.option("--gateway", metavar="NODE", help="Measure the model through this node's gateway.")
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
    help="Preset with the lengths of prompts and answers.  [default: the first preset for "
    "the model's kind]",
)
@click.option(
    "--lengths",
    metavar="IN,OUT",
    help="Lengths instead of a preset. For text: tokens of prompt and answer, for example "
    "1000,200. With a picture: WORDS,TOKENS,PIXELS. For an embedding model: tokens, for "
    "example 256. For a reranker: QUERY,DOCUMENT,COUNT. For sound: seconds.",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False),
    help="File with your own requests, one JSON object on each line. gpufleet never prints "
    "their contents.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False),
    help="Replay this trace once. Each line of the file is a JSON object with `timestamp` "
    "and lengths.",
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Measure only this rate.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Measure a closed loop with this many clients.",
)
@click.option(
    "--closed-loop",
    is_flag=True,
    help="Also find the concurrency at which a closed loop meets the objectives.",
)
@click.option(
    "--most",
    type=click.FloatRange(min=0, min_open=True),
    help="Do not try a higher rate than this.",
)
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
    help="Time limit for each level of load. At levels at which few requests arrive, a "
    "search takes longer.",
)
@click.option(
    "--guest",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="SHARE",
    help="Measure while users send requests, and use at most this share of the idle capacity.",
)
@click.option("--processes", type=click.IntRange(min=1, max=64), help="Number of client processes.")
@click.option(
    "--seed",
    type=int,
    default=1,
    show_default=True,
    help="Seed of the random arrival times and lengths.",
)
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
    help="Measure nothing, and compare two results. B can be a result of vllm bench serve, "
    "guidellm or aiperf.",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Try settings on one drained replica, and propose the best settings. Afterwards, "
    "the replica is deployed with the declared settings again.",
)
@click.option(
    "--try",
    "tries",
    multiple=True,
    metavar="NAME=V,V",
    help="With --tune: values to try for max-num-seqs, max-num-batched-tokens or "
    "tensor_parallel.  [default: half and twice the running value, and the values of "
    "tensor_parallel that fit]",
)
@json_option
def measure(inventory_file: str, *, compare: tuple[Path, Path] | None, **given: Any) -> int:
    """
    Measure how many requests per second a model can serve.

    The command finds the highest rate of requests at which the model still meets its `objectives`.

    \b
    gpufleet measure inventories/prod.py llama --gateway lb-01 --key-file secrets/bench-key
    gpufleet measure inventories/prod.py --replica llama-0 --preset rag
    gpufleet measure inventories/prod.py llama --guest 0.3 --gateway lb-01 --key-file key
    gpufleet measure inventories/prod.py llama --gateway lb-01 --key-file key --from load-01
    gpufleet measure inventories/prod.py --replica llama-0 --closed-loop
    gpufleet measure inventories/prod.py llama --tune --try max-num-seqs=128,256
    gpufleet measure --compare measurements/a.json measurements/b.json

    The command puts load on the model. Without --guest it starts only if no other request is
    running. It changes nothing on nodes except with --tune, and leaves nothing there. The results
    are files: JSON, a Benchmark Report for each level of load, and a page.

    Exit status: 0: the rate was found. 1: the rate is unknown, or the objectives were never met
    (with --tune: not by the declared settings). 2: error.
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


# Results with a known rate: the highest that meets the objectives, or the load that was given.
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
