"""`gpufleet bundle`: write a static mirror of the downloads of an inventory's nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpufleet.bundle.requirements import KINDS
from gpufleet.cli.common_options import (
    fleet_command,
    inventory_argument,
    limit_option,
)
from gpufleet.cli.fleet_inputs import load_probes, probe_live, select_limit
from gpufleet.errors import FleetError
from gpufleet.paths import import_from_project

if TYPE_CHECKING:
    from gpufleet.bundle.requirements import NodeNeeds
    from gpufleet.converge.desired import Package


@fleet_command()
@inventory_argument
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    required=True,
    help="Directory of the bundle. An existing bundle is updated.",
)
@click.option(
    "--nodes",
    multiple=True,
    metavar="FILE",
    help="File with saved probes. Can be repeated.  [default: probe the nodes]",
)
@limit_option
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(KINDS),
    help="Bundle only this kind of files. Can be repeated.",
)
@click.option(
    "--index-url",
    metavar="URL",
    envvar="PIP_INDEX_URL",
    help="Package index if `vllm.index_url` is not set.  [default: PyPI]",
)
def bundle(
    inventory_file: str,
    *,
    output: str,
    nodes: tuple[str, ...],
    limit: tuple[str, ...],
    only: tuple[str, ...],
    index_url: str | None,
) -> int:
    """
    Mirror all downloads, for networks without internet access.

    The bundle contains everything that the nodes of INVENTORY download.

    \b
    gpufleet probe inventories/prod.py --json > probes.json     # inside
    gpufleet bundle inventories/prod.py -o bundle --nodes probes.json

    The bundle contains packages with their dependencies and signed indexes, the wheels in the lock
    files, models at their revisions, and programs with a known hash. A second run downloads only
    what has changed. docs/gpu-nodes/air-gap.md explains how to use a bundle.

    Exit status: 0: the bundle is complete. 2: the bundle is not complete.
    """
    from gpufleet.bundle import apt, collect, wheels
    from gpufleet.bundle.download import open_folder
    from gpufleet.bundle.requirements import needs

    wanted = needs(_nodes(inventory_file, nodes, limit), index_url or wheels.PYPI, only or KINDS)
    for remark in wanted.remarks:
        click.echo(f"note: {remark}", err=True)
    if wanted.packages:
        apt.require_tools()
    with open_folder(Path(output).resolve()) as folder:
        done = collect.collect(folder, wanted, click.echo)
        old = collect.stale_files(folder, done.paths)
        for kind, paths in (
            ("packages", done.packages),
            ("wheels", done.wheels),
            ("models", done.models),
            ("programs", done.programs),
        ):
            size = sum((folder.root / path).stat().st_size for path in paths)
            click.echo(f"{kind}: {len(paths)} files, {size / 1e6:.1f} MB")
        click.echo(f"downloaded in this run: {folder.downloaded / 1e6:.1f} MB")
        if old:
            click.echo(
                f"note: the bundle contains {len(old)} files of earlier runs that are no longer "
                "needed",
                err=True,
            )
    return 0


def _nodes(inventory_file: str, files: tuple[str, ...], limit: tuple[str, ...]) -> list[NodeNeeds]:
    """
    Return what each node needs, from its settings and its probe.

    Raises FleetError with every node whose probe is missing.
    """
    from gpufleet.bundle.requirements import NodeNeeds
    from gpufleet.inventory.loader import read
    from gpufleet.node.machine import from_probe
    from gpufleet.settings.node_settings import NodeSettings
    from gpufleet.settings.parse import parse_written

    if files:
        fleet = read(inventory_file)
        declared, answers = fleet.gpu_nodes, load_probes(files)
        wanted = select_limit(fleet, limit) or tuple(declared)
    else:
        answers, declared = probe_live(inventory_file, limit)
        wanted = tuple(answers)
    probes: dict[str, Mapping[str, Any]] = {}
    problems = []
    for name in wanted:
        answer = answers.get(name, "none of the --nodes files has a probe of this node")
        if isinstance(answer, str):
            problems.append(f"{name}: {answer}")
        else:
            probes[name] = answer
    if problems:
        raise FleetError(
            *problems,
            "gpufleet needs a probe of each node to know what the node downloads: if this "
            "machine cannot reach the nodes, run `gpufleet probe INVENTORY --json` on a "
            "machine that can, and give the output here with --nodes",
        )
    packages = _packages()
    found = []
    for name, document in probes.items():
        values = declared[name].values
        ours = {key: value for key, value in values.items() if key in NodeSettings.model_fields}
        settings = parse_written(ours)
        system, machine = from_probe(document)
        python = document.get("python")
        needed = packages(settings, system, machine)
        found.append(
            NodeNeeds(name, settings, system, python if isinstance(python, str) else "", needed)
        )
    return found


def _packages() -> Callable[..., tuple[Package, ...]]:
    """
    Return the function `packages` of roles/package_list.py. It lists the packages that roles
    install.
    """
    bundled = import_from_project(
        "roles.package_list", needed_by="gpufleet bundle", run="the command"
    )
    packages: Callable[..., tuple[Package, ...]] = bundled.packages
    return packages
