"""`gpufleet flags ...`: look up and check vLLM's flags by release. Contacts no node.

Thin: reads files, calls the library, prints. Each command imports only the modules that it needs,
because `check` must answer within 300 ms after a cold start.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from gpufleet.cli.default_release import default_release
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError, file_fault
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.flags.schema import Schema

_environment_option = click.option(
    "--env",
    "environment",
    multiple=True,
    metavar="NAME=VALUE",
    help="Environment variable of the server. Can be repeated.",
)


@click.group()
def flags() -> None:
    """Look up vLLM's flags, and check a command line."""


@flags.command(cls=StrictCommand)
@click.argument("source")
@click.option(
    "--python",
    default=sys.executable,
    metavar="PATH",
    help="Python interpreter (3.10 or newer) that reads SOURCE. `installed` is the vLLM of "
    "this interpreter.",
)
@click.option("--help-texts", is_flag=True, help="Include vLLM's help text for each flag.")
@click.option("--metrics", is_flag=True, help="Also read the names of the Prometheus metrics.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=120,
    show_default=True,
    help="Deadline.",
)
def extract(source: str, python: str, *, help_texts: bool, metrics: bool, seconds: float) -> None:
    """
    Print the flags and environment variables of the vLLM release in SOURCE, as JSON.

    SOURCE is a source tree, a source distribution (.tar.gz), a wheel, or `installed`. The command
    needs neither torch nor a GPU. It does not install or import SOURCE.

    \b
    gpufleet flags extract vllm-0.32.0.tar.gz > 0.32.0.json
    gpufleet flags extract installed --python /opt/vllm/releases/ID/bin/python
    """
    from gpufleet.flags.extract import flag_document

    document = flag_document(
        source, python=python, seconds=seconds, helps=help_texts, metrics=metrics
    )
    click.echo(json.dumps(document, indent=1))
    click.echo(
        f"vLLM {document['vllm'] or 'of an unknown version'}: {len(document['flags'])} "
        f"flags, {len(document['env'])} variables, {len(document['unresolved'])} names not found",
        err=True,
    )


@flags.command(cls=StrictCommand, context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="FLAG|VARIABLE|WORD", type=click.UNPROCESSED)
@click.option(
    "--vllm",
    "version",
    metavar="VERSION",
    help="vLLM release.  [default: the release of the project's lock]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(name: str, version: str | None, *, as_json: bool) -> None:
    """
    Explain the effect, use and cost of a flag or an environment variable. For any other word, list
    the flags and variables that concern it.

    \b
    gpufleet flags explain --max-num-batched-tokens
    gpufleet flags explain VLLM_ATTENTION_BACKEND --vllm 0.32.0
    gpufleet flags explain lora

    Exit status: 0: explained. 2: there is no such name or no such release.
    """
    import shutil

    from gpufleet.flags.explain import explain_flag, explanation_page, matching, matching_page

    release = _schema(version or default_release())
    width = min(shutil.get_terminal_size().columns, 100)
    try:
        found = explain_flag(name, release)
    except FleetError:
        about = {} if name.startswith("-") or not name.strip() else matching(name, release)
        if not about:
            raise
        page = matching_page(name, about, release, width)
        click.echo(json.dumps(about, indent=2) if as_json else printable(page))
        return
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        click.echo(printable(explanation_page(found, width)))


@flags.command(cls=StrictCommand)
@click.argument("old")
@click.argument("new")
@click.argument("argv", metavar="[-- MODEL --flag ...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--settings",
    "file",
    metavar="FILE",
    help="Settings file, as in group_vars. The command checks the models in this file.",
)
@_environment_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(
    old: str,
    new: str,
    argv: tuple[str, ...],
    *,
    file: str | None,
    environment: tuple[str, ...],
    as_json: bool,
) -> int:
    """
    Show what changes from vLLM OLD to vLLM NEW, for your flags or for all flags.

    \b
    gpufleet flags diff 0.20.2 0.33.0
    gpufleet flags diff 0.20.2 0.33.0 --settings group_vars/gpu.yml
    gpufleet flags diff 0.11.0 0.33.0 --env VLLM_USE_V1=1 -- MODEL --swap-space 4

    Exit status: 0: your flags still work. 1: some of your flags do not work. 2: there is no such
    release.
    """
    import shutil
    from pathlib import Path

    from gpufleet.flags import from_settings, pages, release_diff

    width = min(shutil.get_terminal_size().columns, 100)
    before, after = _schema(old), _schema(new)
    if file and argv:
        raise click.UsageError(
            "--settings and flags after `--` exclude each other: remove one of the two."
        )
    if not (file or argv or environment):
        found = release_diff.overview(before, after)
        if as_json:
            counted = {"old": before.version, "new": after.version, **found.as_json()}
            click.echo(json.dumps(counted, indent=2))
        else:
            click.echo(printable(pages.overview_page(before.version, after.version, found, width)))
        return 0
    if file:
        servers = from_settings.from_file(Path(file))
    else:
        servers = (from_settings.ServerFlags(argv or ("MODEL",), _variables(environment)),)
    changed = [(server, release_diff.diff(before, after, server)) for server in servers]
    if as_json:
        told: dict[str, Any] = {"old": before.version, "new": after.version}
        told["servers"] = [
            {
                "where": server.where,
                "argv": list(server.argv),
                "rewritten": release_diff.rewrite_command_line(server, found, after),
                "differences": [one.as_json() for one in found],
            }
            for server, found in changed
        ]
        click.echo(json.dumps(told, indent=2))
    else:
        blocks = (
            pages.diff_page(
                server, found, release_diff.rewrite_command_line(server, found, after), width
            )
            for server, found in changed
        )
        click.echo(printable("\n\n".join(blocks)))
    return int(any(one.breaks for _, found in changed for one in found))


@flags.command(cls=StrictCommand)
@click.argument("argv", metavar="-- MODEL [--flag ...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--vllm",
    "version",
    metavar="VERSION",
    help="vLLM release, or a file that `gpufleet flags extract` wrote.  [default: the "
    "release of the project's lock]",
)
@click.option(
    "--sglang", metavar="VERSION", help="SGLang release, if the command line starts SGLang."
)
@_environment_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(
    argv: tuple[str, ...],
    version: str | None,
    *,
    sglang: str | None,
    environment: tuple[str, ...],
    as_json: bool,
) -> int:
    """
    Check whether a release of vLLM or SGLang accepts a command line, and show how the release reads
    the flags.

    \b
    gpufleet flags check --vllm 0.33.0 -- meta-llama/Llama-3.3-70B-Instruct -tp 4 --swap-space 4
    gpufleet flags check --vllm 0.33.0 --env VLLM_USE_V1=1 -- MODEL --max-model-len 32k
    gpufleet flags check --sglang 0.5.23 -- sglang serve --model-path MODEL --tp-size 4

    Exit status: 0: accepted. 1: refused. 2: there is no such release.
    """
    import shutil

    from gpufleet.flags import pages
    from gpufleet.flags.check import check_command_line

    command = argv[:1] and argv[0].rpartition("/")[2]
    if sglang or "sglang.launch_server" in argv or command == "sglang":
        from gpufleet.engines.sglang import sglang_check

        if not sglang:
            raise click.UsageError(
                "This command line starts SGLang: give the release, for example --sglang "
                f"{sglang_check.newest()}."
            )
        if version or environment:
            raise click.UsageError(
                "--vllm and --env work only for vLLM: remove them, or remove --sglang."
            )
        verdict = sglang_check.verdict(sglang, argv)
    else:
        words = argv[1:] if argv[:1] == ("vllm",) else argv
        words = words[1:] if words[:1] == ("serve",) and len(words) > 1 else words
        verdict = check_command_line(
            _schema(version or default_release()), words, _variables(environment)
        )
    if as_json:
        click.echo(json.dumps(verdict.as_json(), indent=2))
    else:
        click.echo(
            printable(pages.verdict_page(verdict, min(shutil.get_terminal_size().columns, 100)))
        )
    return int(not verdict.accepted)


def _variables(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    if wrong := ["".join(pair) for pair in pairs if not pair[0].isidentifier() or not pair[1]]:
        raise click.UsageError(f"--env {wrong[0]}: write the variable as NAME=VALUE.")
    return {name: value for name, _, value in pairs}


def _schema(version: str) -> Schema:
    """
    Return the schema of a release that gpufleet ships, or of a file that `extract` has written.
    """
    from pathlib import Path

    from gpufleet.flags import schema

    if not version.endswith(".json"):
        return schema.load(version)
    try:
        return schema.from_document(json.loads(Path(version).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise FleetError(f"{version}: cannot be read: {file_fault(error)}") from None
    except RecursionError:
        raise FleetError(f"{version}: the values are nested too deeply for a flag schema") from None
