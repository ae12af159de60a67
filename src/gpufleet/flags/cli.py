"""`gpufleet flags ...`: what vLLM of each release takes. Changes nothing, asks no node.

Thin: reads files, calls the modules that know, prints. Whatever is only needed by one command is
imported by it: `check` has to answer in 300 ms from a cold start.
"""

from __future__ import annotations

import json
import sys

import click


@click.group()
def flags() -> None:
    """Say what vLLM's flags are in each release, and judge a command line by it."""


@flags.command()
@click.argument("source")
@click.option(
    "--python",
    default=sys.executable,
    metavar="PATH",
    help="The Python to read with, and whose own vLLM `installed` is. Needs 3.10 or newer.",
)
@click.option("--help-texts", is_flag=True, help="Keep what vLLM's --help says of each flag.")
@click.option("--metrics", is_flag=True, help="Read the Prometheus metrics, too.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=120,
    show_default=True,
    help="Deadline.",
)
def extract(source: str, python: str, *, help_texts: bool, metrics: bool, seconds: float) -> None:
    """
    Read from SOURCE which flags and variables that release of vLLM takes, and print it as JSON.

    SOURCE is a source tree, a source distribution (.tar.gz), a wheel, or `installed`. Neither torch
    nor a GPU is needed, and nothing of SOURCE is installed or imported.

    \b
    gpufleet flags extract vllm-0.32.0.tar.gz > 0.32.0.json
    gpufleet flags extract installed --python /opt/vllm/releases/ID/bin/python
    """
    from gpufleet.flags import extract as extractor

    document = extractor.document(
        source, python=python, seconds=seconds, helps=help_texts, metrics=metrics
    )
    click.echo(json.dumps(document, indent=1, ensure_ascii=False))
    click.echo(
        f"vLLM {document['vllm'] or 'of a version it does not say'}: {len(document['flags'])} "
        f"flags, {len(document['env'])} variables, {len(document['unresolved'])} names not found",
        err=True,
    )


@flags.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="FLAG|VARIABLE", type=click.UNPROCESSED)
@click.option("--vllm", "version", metavar="VERSION", help="As this release has it; else newest.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def explain(name: str, version: str | None, *, as_json: bool) -> None:
    """
    Say what a flag or an environment variable does, when it pays and what it costs.

    \b
    gpufleet flags explain --max-num-batched-tokens
    gpufleet flags explain VLLM_ATTENTION_BACKEND --vllm 0.32.0

    Exit status: 0 explained, 2 no such name or no such release.
    """
    import shutil

    from gpufleet.flags import explain as explanations
    from gpufleet.flags import schema

    found = explanations.explain(name, schema.load(version) if version else None)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        click.echo(explanations.page(found, min(shutil.get_terminal_size().columns, 100)))
