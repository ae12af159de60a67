"""`gpufleet import FILE`: convert launch scripts and manifests to settings. Contacts no node.

Thin: reads one text, calls the library, prints. The settings go to standard output or to a file.
For each part that was dropped or renamed, a sentence with the reason goes to standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from gpufleet.cli.default_release import default_release
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError, file_fault
from gpufleet.paths import write_whole

_MOST = 1 << 24
"""The maximum number of characters to read. It is far above the limit that `detect` enforces."""


@click.command("import", cls=StrictCommand)
@click.argument("file")
@click.option(
    "--vllm",
    "version",
    metavar="VERSION",
    help="vLLM release for which the flags are written.  [default: the release of the "
    "project's lock]",
)
@click.option(
    "--engine",
    type=click.Choice(["vllm"]),
    help="vllm: also convert servers of SGLang to settings of vLLM.",
)
@click.option("--name", help="Name for a server that has no name.  [default: the name of the file]")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    default="-",
    help="Write the settings to this new file.",
)
@click.option("--force", is_flag=True, help="Overwrite OUT if it exists.")
def import_(
    file: str,
    version: str | None,
    engine: str | None,
    name: str | None,
    output: str,
    *,
    force: bool,
) -> int:
    """
    Convert scripts, manifests and charts to settings.

    The command converts FILE to settings for group_vars. It prints them as YAML, or writes them to
    OUT.

    FILE (- is standard input) is a list of models with a `command` each, a script or a line with
    `vllm serve ...` or `docker run ... vllm/vllm-openai ...`, a compose file, vLLM's --config file,
    LiteLLM's config.yaml, Kubernetes workloads, Helm values of vLLM's production-stack, a recipe of
    sparkrun, a Dockerfile, or supervisord's programs. Servers of SGLang become entries with
    `engine: sglang`; those of TensorRT-LLM and TGI become entries of vLLM. An Ansible inventory,
    YAML or INI, becomes an inventory file. On standard error, the command prints what it dropped,
    renamed or rewrote, and why. It never prints keys or tokens.

    \b
    gpufleet import models.yml --vllm 0.33.0 -o group_vars/gpu.yml
    gpufleet import start.sh
    gpufleet import docker-compose.yml
    gpufleet import hosts.ini -o inventories/prod.py
    history | tail -1 | cut -c 8- | gpufleet import - --name chat

    Exit status: 0: imported. 1: imported, but some decisions are left to you. 2: FILE cannot be
    read.
    """
    import yaml

    from gpufleet import redact
    from gpufleet.flags import schema
    from gpufleet.importer.convert import convert
    from gpufleet.importer.detect import read
    from gpufleet.importer.other_engines import on_vllm
    from gpufleet.sanitize import printable

    target = None if output == "-" else _target(output, file, force=force)
    release = version or default_release()
    text = _text(file)
    source = read(text, file, name or _name(file))
    launches = tuple(on_vllm(each) if engine else each for each in source.launches)
    imported = convert(launches, schema.load(release), source.names)
    settings = source.inventory or yaml.safe_dump(
        dict(imported.settings), sort_keys=False, allow_unicode=True, width=100
    )
    if target is None:
        click.echo(settings, nl=False)
    else:
        _target(output, file, force=force)  # the file may have been created meanwhile
        write_whole(target, settings)
    everything = (*source.notes, *imported.notes)
    for note in everything:
        mark = "to decide: " if note.decide else ""
        click.echo(printable(redact.hide_secrets(f"{mark}{note}", ())), err=True)
    engines = {launch.engine for launch in launches}
    if "vllm" in engines:
        click.echo(f"flags are written for vLLM {release}", err=True)
    if "sglang" in engines:
        from gpufleet.engines.sglang import sglang_check

        click.echo(f"flags are written for SGLang {sglang_check.newest()}", err=True)
    if target is not None:
        click.echo(f"{output} written", err=True)
    return int(any(note.decide for note in everything))


def _target(output: str, file: str, *, force: bool) -> Path:
    """Return the file to write. Raises `FleetError` if it exists, unless `force` is set."""
    target = Path(output)
    if target.is_dir():
        raise FleetError(f"{output}: is a directory: write the name of a file")
    if file != "-" and target.exists() and target.samefile(file):
        raise FleetError(f"{output}: is the file to import: write the name of a different file")
    if os.path.lexists(target) and not force:
        raise FleetError(
            f"{output}: already exists and would be overwritten: write the name of a "
            "different file, or add --force"
        )
    return target


def _text(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read(_MOST)
        with Path(file).open(encoding="utf-8") as opened:
            return opened.read(_MOST)
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{file}: cannot be read: {file_fault(error)}") from None


def _name(file: str) -> str:
    return "model" if file == "-" else Path(file).stem
