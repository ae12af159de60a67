"""`gpufleet lock INVENTORY`: lock the versions that a group's nodes run.

Thin: probes the nodes, calls the library, writes one file. The command changes no node.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet.cli.common_options import fleet_command, inventory_argument
from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.gpu_software import lock_file
from gpufleet.gpu_software.lock_file import lock_text
from gpufleet.paths import write_whole
from gpufleet.settings import variables
from gpufleet.settings.variables import Origin

if TYPE_CHECKING:
    from gpufleet.inventory.loader import Fleet
    from gpufleet.settings.gpu_lock import GpuLock

CHANGED = 1
"""The exit status of `--dry` if the command would change the file."""


@fleet_command("lock")
@inventory_argument
@click.option(
    "--group",
    help="Lock this group.  [default: all nodes, in the group with the name of INVENTORY]",
)
@click.option(
    "--set", "set_", metavar="NAME", help="Lock this known set of versions, and query no node."
)
@click.option("--models", is_flag=True, help="Lock the files of the models, and query no node.")
@click.option("--dry", is_flag=True, help="Print the file, and do not write it.")
def lock(
    inventory_file: str, group: str | None, set_: str | None, *, models: bool, dry: bool
) -> int:
    """
    Record the versions that a group's nodes must keep.

    The command writes the versions that run on the nodes of INVENTORY to group_vars/GROUP.lock.yml.

    The command lists problems and writes nothing if the nodes have different versions, if a node is
    between two versions, or if the versions contradict `cuda`, `dcgm` or `vllm`. With --set, the
    versions come from a set of versions that are known to work together: r580-lts, r595, r615.

    With --models, the command writes to models.lock.json the hashes that the Hub reports for all
    files of the models that INVENTORY serves. Nodes then accept no other files, whether they
    download or copy them.

    \b
    gpufleet lock inventories/prod.py                               # every node runs the same
    gpufleet lock inventories/prod.py --group gpu_h100
    gpufleet lock inventories/prod.py --group gpu_h100 --set r580-lts
    gpufleet lock inventories/prod.py --models

    Exit status: 0: written or unchanged. 1: with --dry, the file would be written. 2: refused.
    """
    if models:
        if group or set_:
            raise FleetError("--models locks the files of all models: remove --group and --set")
        from gpufleet.cli.model_lock_command import lock_models

        return lock_models(inventory_file, dry=dry)
    if set_ is None:
        from gpufleet.cli.fleet_inputs import use_gevent

        use_gevent()  # before pyinfra is imported
    from gpufleet.inventory.loader import read

    fleet = read(inventory_file)
    name = group or Path(inventory_file).stem
    nodes = _members(fleet, name)
    found, source, why = _set(set_) if set_ else _read(inventory_file, fleet, name, nodes)
    file = lock_file.lock_path(fleet.root / "group_vars", name)
    shown = variables.shown_path(file, fleet.root)
    if problems := tuple(_refused(fleet, nodes, found, file)):
        raise FleetError(*dict.fromkeys(problems))
    # Only values are compared, so that comments in the file stay while its values are correct.
    if _there(file, fleet.root) == found:
        click.echo(f"{shown} already has these versions", err=True)
        return 0
    written = lock_text(found, source, why)
    if dry:
        click.echo(written, nl=False)
        click.echo(f"would be written to {shown}", err=True)
        return CHANGED
    write_whole(file, written)
    click.echo(f"{shown} is written: {len(nodes)} nodes, driver {found.driver}", err=True)
    return 0


def _members(fleet: Fleet, group: str) -> tuple[str, ...]:
    """Return the nodes of a group. `all` and the inventory's name mean all GPU nodes."""
    if group in {"all", Path(fleet.inventory).stem}:
        return tuple(fleet.gpu_nodes)
    if members := fleet.groups.members.get(group):
        return members
    known = ["all", Path(fleet.inventory).stem, *fleet.groups.members]
    raise FleetError(
        f"--group {group}: {fleet.inventory} has no group with this name that contains "
        f"nodes{suggestion(group, known)}"
    )


def _set(name: str) -> tuple[GpuLock, str, dict[str, str]]:
    from gpufleet.gpu_software.version_sets import release_set

    found = release_set(name)
    return found.lock, f"The set {name}: {found.title}.", dict(found.why)


def _read(
    inventory_file: str, fleet: Fleet, group: str, nodes: tuple[str, ...]
) -> tuple[GpuLock, str, dict[str, str]]:
    from gpufleet.fleet.live import probe
    from gpufleet.gpu_software import lock_from_nodes

    answers = probe(inventory_file, nodes)
    if silent := [f"{name}: {said}" for name, said in answers.items() if isinstance(said, str)]:
        raise FleetError(
            *silent, "a lock needs the versions of every node in its group: nothing is locked"
        )
    documents = {name: said for name, said in answers.items() if not isinstance(said, str)}
    settings = {name: fleet.nodes[name].settings for name in nodes}
    found = lock_from_nodes.build_lock(documents, settings)
    return found, f"The versions that every node of {group} runs.", {}


def _there(file: Path, root: Path) -> GpuLock | None:
    """Return the lock in a file, or None if the file does not exist or its lock is invalid."""
    from pydantic import ValidationError

    from gpufleet.settings.gpu_lock import GpuLock

    if not file.is_file():
        return None
    found = variables.load_file(file, root)
    try:
        return GpuLock.model_validate(found[lock_file.KEY][0]) if found else None
    except ValidationError:
        return None


def _refused(fleet: Fleet, nodes: tuple[str, ...], found: GpuLock, file: Path) -> Iterator[str]:
    """Yield the mistakes that the group's variables would have with this lock."""
    import datetime as dt

    from gpufleet.gpu_software import lock_check
    from gpufleet.settings import node_variables

    shown = variables.shown_path(file, fleet.root)
    new = (found.model_dump(mode="json", exclude_none=True), Origin(shown))
    merged, groups = {}, {}
    for name in nodes:
        node = fleet.nodes[name]
        there = node.variables.get(lock_file.KEY)
        if there and there[1].file != shown:
            yield (
                f"{there[1]}: {lock_file.KEY}: is already set in this file for {name}: "
                "remove it from the file, or lock the group of the file"
            )
            continue
        merged[name] = {**node.variables, lock_file.KEY: new}
        groups[name] = node.groups
    try:
        checked = node_variables.check(merged, groups)
    except FleetError as error:
        yield from error.problems
    else:
        # Problems that depend on today's date are no reason to refuse.
        yield from lock_check.check_locks(checked, dt.date.max).problems
