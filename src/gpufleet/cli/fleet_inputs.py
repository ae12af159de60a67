"""Read nodes, probes and settings for commands, and record findings.

Every command loads this module, so its functions contain the slow imports.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpufleet.cli.common_options import INTERRUPTED
from gpufleet.errors import FleetError, file_fault
from gpufleet.formatting import suggestion
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.fleet.node_records import Samples
    from gpufleet.inventory.loader import Fleet
    from gpufleet.remote.query import Answer
    from gpufleet.settings.node_variables import NodeVars

# Time limit of `--record`. Only connecting takes time, because it writes one small file to a node.
RECORD_SECONDS = 30


def use_gevent() -> None:
    """
    Replace sockets by those of gevent, which pyinfra uses. Call this before sockets are imported.
    """
    from gevent import monkey

    monkey.patch_all()
    # If a greenlet raises KeyboardInterrupt, gevent only prints it. SystemExit ends the program.
    signal.signal(signal.SIGINT, _exit_interrupted)


def _exit_interrupted(_signal: int, _frame: FrameType | None) -> NoReturn:
    click.echo("Interrupted.", err=True)
    sys.exit(INTERRUPTED)


def probe_live(
    inventory_file: str, limit: tuple[str, ...] = (), seconds: float = 60
) -> tuple[Mapping[str, Answer], Mapping[str, NodeVars]]:
    """Probe the nodes of an inventory. Return their answers, and the declared GPU nodes."""
    use_gevent()
    from gpufleet.fleet import live
    from gpufleet.fleet.model_configs import probe_paths
    from gpufleet.inventory.loader import read

    declared = read(inventory_file)
    wanted = select_limit(declared, limit)
    paths = probe_paths(declared.gpu_nodes)
    return live.probe(inventory_file, wanted, seconds, paths), declared.gpu_nodes


def read_saved(
    inventory_file: str, files: tuple[str, ...], hardware: tuple[str, ...]
) -> tuple[Mapping[str, Answer], Mapping[str, NodeVars]]:
    """
    Return saved or assumed probes of an inventory's nodes, and the declared GPU nodes.

    `files` have saved probes. `hardware` is the value of --as, from which probes are assumed. If a
    node has a saved probe, it takes precedence.
    """
    from gpufleet.fleet.declared_hardware import hardware_documents, parse_hardware
    from gpufleet.inventory.loader import read

    declared = read(inventory_file).gpu_nodes
    probes = load_probes(files)
    select_names(list(declared), tuple(probes), inventory_file)
    answers: dict[str, Answer] = dict.fromkeys(
        declared, f"there is no probe of this node in {', '.join(files)}"
    )
    if hardware:
        answers |= hardware_documents(declared, parse_hardware(hardware), probes)
    return {**answers, **probes}, declared


def load_probes(files: tuple[str, ...]) -> Mapping[str, Answer]:
    """Return each node's probe in the files, or the reason why the probe is missing."""
    from gpufleet.node.probe_document import parse_documents

    documents: dict[str, Any] = {}
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FleetError(f"{file}: cannot be read: {file_fault(error)}") from None
        documents |= parse_documents(text, file, Path(file).stem)
    return documents


def load_variables(vars_file: str, nodes: Iterable[str]) -> dict[str, NodeVars]:
    """Return nodes that all have the variables in one file."""
    from gpufleet.settings import node_variables, variables

    names = list(nodes)
    given = variables.load_file(Path(vars_file))
    return node_variables.check(dict.fromkeys(names, given), dict.fromkeys(names, ()))


def select_names(known: list[str], wanted: tuple[str, ...], where: str) -> list[str]:
    """
    Return the wanted names, or all known names if none are given. Raises `FleetError` for unknown
    names.
    """
    if missing := [name for name in wanted if name not in known]:
        raise FleetError(*(f"{where} has no {name!r}{suggestion(name, known)}" for name in missing))
    return list(wanted) or known


def select_limit(declared: Fleet, limit: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes and groups in --limit, or an empty tuple without --limit."""
    known = [*declared.nodes, *declared.groups.members]
    return tuple(select_names(known, limit, declared.inventory)) if limit else ()


def write_records(inventory_file: str, name: str, samples: Mapping[str, Samples]) -> None:
    """
    Write each node's findings to the node, and report failures on stderr.

    A failure does not change the exit status. Instead, an alert reports that the node's metrics are
    old.
    """
    from gpufleet.fleet import live, node_records
    from gpufleet.remote import payload

    if not samples:
        return
    programs = {
        node: payload.program("monitoring/record", files={name: found})
        for node, found in samples.items()
    }
    with live.connect(inventory_file, tuple(samples)) as ask:
        answers = ask(programs.get, RECORD_SECONDS, "the record")
    for problem in node_records.record_failures(answers, "its findings are"):
        click.echo(printable(f"note: {problem}"), err=True)
