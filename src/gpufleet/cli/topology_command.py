"""`gpufleet topology`: show how a node's GPUs are linked, from a node, a probe or a matrix.

The kind of a file is recognised by its content, so a file may have any name. Only the name of an
inventory must end in `.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import json_option, print_json
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.console import display
from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.node.interconnect import Interconnect, from_matrix, from_probe
from gpufleet.node.probe_document import parse_documents
from gpufleet.node.smi_topology import parse

STDIN = "-"

# A probe of 16 GPUs has 0.3 MB, so this is enough for 300 nodes. A larger file is a wrong file.
MOST_BYTES = 100_000_000

_WANTED = (
    "give the output of `nvidia-smi topo -m`, a recorded probe (`gpufleet probe INVENTORY --json`) "
    "or an inventory and a node"
)


@click.command(cls=StrictCommand)
@click.argument("source", shell_complete=completers.inventories)
@click.argument("node", required=False)
@click.option("--svg", "svg_file", metavar="FILE", help="Also draw the links to this file.")
@json_option
def topology(source: str, node: str | None, svg_file: str | None, as_json: bool) -> None:
    """
    Show how a node's GPUs are linked, for tensor parallelism.

    \b
    nvidia-smi topo -m | gpufleet topology -
    gpufleet topology topo.txt --svg node.svg
    gpufleet topology probes.json gpu-01
    gpufleet topology inventories/prod.py gpu-01

    SOURCE is an inventory, the output of `gpufleet probe --json` or `nvidia-smi topo -m`, or - for
    standard input. NODE is required if SOURCE has several nodes.
    """
    if inventory_of(source):
        use_gevent()
    found = look(source, node)
    if svg_file:
        from gpufleet.node.topology_svg import svg

        try:
            Path(svg_file).write_text(svg(found), encoding="utf-8")
        except OSError as error:
            raise FleetError(f"{svg_file}: cannot be written: {error.strerror}") from None
    if as_json:
        print_json(found.as_json())
        return
    from gpufleet.node import topology_text

    display(topology_text.render_topology(found))


def inventory_of(source: str) -> tuple[str, str | None] | None:
    """
    Return (inventory file, node or None) if `source` is an inventory, else None.

    >>> inventory_of("inventories/prod.py:gpu-01"), inventory_of("topo.txt")
    (('inventories/prod.py', 'gpu-01'), None)
    """
    file, colon, node = source.rpartition(":")
    if colon and file.endswith(".py"):
        return file, node
    return (source, None) if source.endswith(".py") else None


def look(source: str, node: str | None) -> Interconnect:
    """
    Return the links between the GPUs of one node of `source`.

    If `source` has several nodes, `node` selects one. For a matrix, `node` is the name to show.
    Raises `FleetError` if `source` is neither an inventory, a probe nor a matrix. If it is an
    inventory, gevent must already have patched sockets, as for `fleet.live.probe`.
    """
    if live := inventory_of(source):
        file, named = live
        return _live(file, node or named)
    where = "stdin" if source == STDIN else source
    text = _text(source, where)
    if not text.strip():
        raise FleetError(f"{where}: is empty: {_WANTED}")
    if text.lstrip().startswith("{"):
        return _recorded(where, text, node)
    return from_matrix(node or Path(where).stem, parse(text, where))


def _live(file: str, node: str | None) -> Interconnect:
    from gpufleet.fleet import live
    from gpufleet.inventory.loader import read

    name = _one(file, read(file).nodes, node)
    return _answered(name, live.probe(file, (name,))[name])


def _answered(name: str, answer: Mapping[str, Any] | str) -> Interconnect:
    """Return the links of a node from its probe. Raises `FleetError` if the probe is missing."""
    if isinstance(answer, str):
        raise FleetError(f"{name}: {answer}")
    return from_probe(name, answer)


def _recorded(where: str, text: str, node: str | None) -> Interconnect:
    answers = parse_documents(text, where, node or Path(where).stem)
    name = _one(where, answers, node)
    return _answered(name, answers[name])


def _one(where: str, names: Collection[str], node: str | None) -> str:
    if node is None and len(names) == 1:
        return next(iter(names))
    if node is None:
        raise FleetError(f"{where} has several nodes: write one of {', '.join(names)}")
    if node not in names:
        raise FleetError(
            f"{where} has no {node!r}{suggestion(node, list(names))}; it has {', '.join(names)}"
        )
    return node


def _text(source: str, where: str) -> str:
    try:
        if source == STDIN:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise FleetError(f"{where}: cannot be read: {error.strerror or error}: {_WANTED}") from None
    if len(data) > MOST_BYTES:
        raise FleetError(f"{where}: is larger than {MOST_BYTES >> 20} MiB: {_WANTED}")
    # In PowerShell, `>` writes UTF-16 with a byte order mark.
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        raise FleetError(f"{where}: is not UTF-8 text: {_WANTED}") from None
