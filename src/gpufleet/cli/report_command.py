"""`gpufleet report`: write a fleet as a page or as a manifest, and compare two manifests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import json_option, print_json
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError, file_fault
from gpufleet.inventory.pyinfra_command import default_inventory
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.report.fleet_document import Document, Form

    AnyForm = TypeVar("AnyForm", bound=Form)

MOST_BYTES = 64 << 20
"""
The maximum size in bytes of a document or manifest. Those of 14 nodes have some hundred kilobytes.
"""
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=StrictCommand)
@click.argument(
    "inventory_file", metavar="[INVENTORY]", required=False, shell_complete=completers.inventories
)
@click.option("-o", "--output", type=_FILE, help="Write the page to this file.")
@click.option(
    "--manifest",
    type=_FILE,
    help="Write everything that is needed to rebuild the fleet to this file, as JSON.",
)
@click.option(
    "--drift",
    "deploys",
    is_flag=True,
    help="Also compare the nodes with the deploys. This takes minutes.",
)
@click.option(
    "--from",
    "from_file",
    type=_FILE,
    help="Read the output of --json from this file instead of querying nodes.",
)
@click.option(
    "--compare", "compared", type=_FILE, nargs=2, help="Show the differences between two manifests."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=20,
    show_default=True,
    help="Most seconds to wait for the answers of nodes.",
)
@json_option
def report(
    inventory_file: str | None,
    *,
    output: Path | None,
    manifest: Path | None,
    deploys: bool,
    from_file: Path | None,
    compared: tuple[Path, Path] | None,
    seconds: float,
    as_json: bool,
) -> int:
    """
    Describe the fleet on one page, for people without access.

    \b
    gpufleet report inventories/prod.py -o report.html
    gpufleet report inventories/prod.py -o report.html --manifest fleet.json
    gpufleet report inventories/prod.py --json > document.json
    gpufleet report --from document.json -o report.html
    gpufleet report --compare january.json march.json

    The page shows nodes, plan, capacity, versions, findings, drift, upgrades and certificates, but
    no secrets. The command is read-only. The same document always gives the same page, byte for
    byte.

    Exit status: 0: written. 1: written, but parts are unknown. 2: error. With --compare: 0: there
    is no difference. 1: there are differences. 2: error.
    """
    if compared:
        if inventory_file or output or manifest or deploys or from_file:
            raise click.UsageError(
                "--compare needs two manifests, and works with no other option than --json."
            )
        return _compare(*compared, as_json=as_json)
    if not (output or manifest or as_json):
        raise click.UsageError("The output is missing: give -o FILE, --manifest FILE or --json.")
    if from_file:
        if inventory_file or deploys:
            raise click.UsageError("--from works without INVENTORY and --drift: remove both.")
        document = _read_document(from_file)
    else:
        document = _ask(inventory_file or default_inventory(), seconds, deploys=deploys)
    _write(document, output, manifest, as_json=as_json)
    return document.exit_status


def _ask(inventory_file: str, seconds: float, *, deploys: bool) -> Document:
    use_gevent()
    from gpufleet.cli.report_session import read_fleet

    return read_fleet(inventory_file, seconds, deploys=deploys)


def _read_document(file: Path) -> Document:
    from gpufleet.report.fleet_document import Document

    return _read(Document, file, "gpufleet report --json")


def _write(
    document: Document, output: Path | None, manifest: Path | None, *, as_json: bool
) -> None:
    from gpufleet.paths import write_whole
    from gpufleet.report.fleet_document import form_text
    from gpufleet.report.fleet_manifest import manifest_of
    from gpufleet.report.fleet_page import fleet_page

    if output:
        write_whole(output, fleet_page(document))
    if manifest:
        write_whole(manifest, form_text(manifest_of(document)))
    if as_json:
        click.echo(form_text(document), nl=False)
    for file in filter(None, (output, manifest)):
        click.echo(f"written: {file}", err=True)
    for each in document.unknown:
        click.echo(printable(f"not known: {each}"), err=True)


def _compare(before: Path, after: Path, *, as_json: bool) -> int:
    from gpufleet.report.fleet_manifest import Manifest, compare

    made_by = "gpufleet report --manifest"
    found = compare(*(_read(Manifest, each, made_by) for each in (before, after)))
    if as_json:
        print_json(found.as_json())
    else:
        for line in found.lines():
            click.echo(printable(line))
    return found.status


def _read(kind: type[AnyForm], file: Path, made_by: str) -> AnyForm:
    from gpufleet.report.fleet_document import read_form

    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise FleetError(f"{file}: cannot be read: {file_fault(error)}") from None
    if len(data) > MOST_BYTES:
        raise FleetError(
            f"{file}: is larger than {MOST_BYTES >> 20} MiB: give a file that `{made_by}` wrote"
        )
    return read_form(kind, text, str(file), made_by)
