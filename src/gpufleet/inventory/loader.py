"""Load the nodes of a fleet and check all their variables before any node is touched.

An inventory file is Python and ends in

    globals().update(inventory.load(__file__, groups={"gpu_h100": ["gpu-01", "gpu-02"]}))

This line gives pyinfra its groups. This module resolves all variables of a node, and hands them to
pyinfra as the node's own data, so that deploys see exactly the checked values. Only `--data`
overrides these values, and the values of `--data` are checked too. For each key, the last of these
layers that sets the key has precedence:

    all < the inventory file's name < groups, outer to inner < host_vars < inline < --data

A group's lock (`lock_file.py`) belongs to its group's layer.
"""

from __future__ import annotations

import ast
import datetime as dt
import runpy
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import click
from pyinfra.api import exceptions

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.gpu_software import lock_check, lock_file
from gpufleet.inventory import invocation
from gpufleet.inventory.exposure import exposure_remarks
from gpufleet.inventory.refusal import Refusal
from gpufleet.remote.ssh import nodelay_transport, raise_open_files_limit
from gpufleet.settings import node_variables, variables
from gpufleet.settings.node_groups import Groups, resolve_groups
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.variables import Origin, Variables

Host: TypeAlias = str | tuple[str, Mapping[str, Any]]
"""A node in an inventory: its name, or (name, variables)."""

_HOW = (
    "write `globals().update(inventory.load(__file__, groups=...))` at its end, see "
    "docs/configure/inventory.md"
)


class InventoryError(Refusal, exceptions.InventoryError):
    """Mistakes in the inventory or its variables; `problems` lists all of them."""


@dataclass(frozen=True)
class Fleet:
    """
    All nodes of one inventory file, in the file's order.

    `inventory` is the file's name in messages. `root` is the parent of the file's directory and has
    `group_vars/` and `host_vars/`. `remarks` are hints about correct inventories, for example
    variable files that no node uses.
    """

    inventory: str
    root: Path
    nodes: Mapping[str, NodeVars]
    groups: Groups
    remarks: tuple[str, ...] = ()
    typed: invocation.Invocation | None = None
    """pyinfra's command line, stored for deploy files, which cannot query it."""

    @property
    def gpu_nodes(self) -> Mapping[str, NodeVars]:
        """Return the nodes with GPUs: all except those with `gpu_node: false`."""
        return {name: node for name, node in self.nodes.items() if node.settings.gpu_node}

    def for_pyinfra(self) -> dict[str, Any]:
        """Return an inventory module's content for pyinfra, with this fleet as `_fleet`."""
        hosts = [(name, node.for_pyinfra(self.root)) for name, node in self.nodes.items()]
        connect = {"transport_factory": nodelay_transport}
        # pyinfra adds a group named after the file, behind all others, unless it is there.
        groups: dict[str, Any] = {Path(self.inventory).stem: list(self.nodes)}
        groups |= {group: list(members) for group, members in self.groups.members.items()}
        return {
            "all": (hosts, {**node_variables.DEFAULTS, "ssh_paramiko_connect_kwargs": connect}),
            **groups,
            "_fleet": self,  # pyinfra ignores it, `read` uses it
        }

    def as_json(self, names: Iterable[str], *, changed: bool = False) -> dict[str, Any]:
        """
        Return nodes with every value and its origin (file and line), as plain data.

        If `changed` is true, only values that differ from the default are returned.

            {"nodes": {"gpu-01": {"values": {"vllm.version": {"value": "0.32.0",
                                             "set_in": "group_vars/prod.yml:30"}}, ...}}, ...}
        """
        return {
            "inventory": self.inventory,
            "nodes": {
                name: {
                    "address": self.nodes[name].address,
                    "groups": list(self.nodes[name].groups),
                    "values": {
                        key: {"value": value, "set_in": str(origin or "default")}
                        for key, value, origin in self.nodes[name].leaves(changed=changed)
                    },
                }
                for name in names
            },
            "remarks": list(self.remarks),
        }


_loaded: list[Fleet] = []  # in this process; a pyinfra run has one inventory


def load(
    inventory_file: str,
    groups: Mapping[str, Sequence[Host]],
    children: Mapping[str, Sequence[str]] | None = None,
    also: Iterable[str | Path] = (),
) -> dict[str, Any]:
    """
    Return an inventory file's groups for pyinfra, with all variables resolved and checked.

    `groups` maps each group to its nodes, and `children` maps each group to its child groups.
    `also` are further directories with `group_vars/` and `host_vars/`, read after the parent of the
    inventory's directory. Raises InventoryError with every mistake of every node.
    """
    invocation.check_invocation()
    raise_open_files_limit()
    typed = invocation.current()
    path = Path(inventory_file).resolve()
    directories = (path.parent.parent, *map(Path, also))
    try:
        fleet = _fleet(
            path, groups, children or {}, directories, typed.overrides() if typed else {}
        )
    except FleetError as error:
        shown = variables.shown_path(path, directories[0])
        raise InventoryError(*error.problems, what=shown) from None
    if typed:
        selected = invocation.selection_problems(typed, tuple(fleet.nodes), _selectable(fleet))
        if problems := tuple(selected):
            raise InventoryError(*problems, what="this command line")
        for remark in exposure_remarks(fleet.nodes.values(), fleet.root):
            click.echo(f"note: {remark}", err=True)
    _loaded.append(replace(fleet, typed=typed))
    return fleet.for_pyinfra()


def read(path: str | Path) -> Fleet:
    """
    Execute an inventory file and return its fleet, outside a pyinfra run.

    Raises FleetError with every mistake, or for a file that is missing or does not call `load`.
    """
    file = Path(path)
    if not _is_file(file):
        others = invocation.list_inventories()
        raise FleetError(f"{str(path)[:200]}: there is no such inventory file{others}")
    if file.suffix in invocation.NOT_PYTHON:
        raise FleetError(
            f"{path}: an inventory is a Python file: `gpufleet import {path} -o NAME.py` "
            "converts an Ansible inventory"
        )
    if str(Path.cwd()) not in sys.path:  # as pyinfra does, for what the inventory imports
        sys.path.append(str(Path.cwd()))
    try:
        module = runpy.run_path(str(file))
    except (Refusal, FleetError) as error:
        raise FleetError(*error.problems) from None
    except Exception as error:
        raise FleetError(_python_error(error, path)) from error
    fleet = module.get("_fleet")
    if not isinstance(fleet, Fleet):
        raise FleetError(f"{path}: the inventory does not load its variables with gpufleet: {_HOW}")
    return fleet


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def current() -> Fleet:
    """
    Return the fleet of this pyinfra run's inventory.

    Raises InventoryError if that inventory did not call `load`.
    """
    if not _loaded:
        raise InventoryError(
            (
                "the inventory does not load its variables with gpufleet, so gpufleet "
                f"cannot deploy it: {_HOW}"
            ),
            what="this inventory",
        )
    return _loaded[-1]


# -- resolving -------------------------------------------------------------------------------------


def _fleet(
    path: Path,
    groups: Mapping[str, Sequence[Host]],
    children: Mapping[str, Sequence[str]],
    directories: Sequence[Path],
    overrides: Mapping[str, Any],
) -> Fleet:
    root = directories[0]
    shown = variables.shown_path(path, root)
    hosts, inline = _hosts(shown, path, groups)
    nested = resolve_groups(hosts, children)
    if locks := [name for name in (path.stem, *nested.members) if name.endswith(".lock")]:
        raise FleetError(
            *(
                f"{shown}: {name!r} cannot be the name of a group, because "
                f"group_vars/{name}.yml is the lock of the group "
                f"{name.removesuffix('.lock')!r}: choose a different name"
                for name in locks
            )
        )
    names = tuple(dict.fromkeys(host for members in hosts.values() for host in members))
    if not names:
        raise FleetError(f"{shown}: has no nodes: write the names of hosts in `groups`")
    stem = () if path.stem in nested.members else (path.stem,)
    typed: Variables = {
        key: (value, Origin("--data")) for key, value in overrides.items() if "." not in key
    }

    problems: list[str] = []

    @cache
    def of(kind: str, name: str) -> Variables:
        folders = [each / kind for each in directories]
        try:
            found = variables.load(folders, name, root)
            return lock_file.overlay(found, folders, name, root) if kind == "group_vars" else found
        except FleetError as error:
            problems.extend(error.problems)
            return {}

    merged = {
        name: variables.merge(
            *(of("group_vars", group) for group in ("all", *stem, *nested.groups_of(name))),
            of("host_vars", name),
            inline.get(name, {}),
            typed,
        )
        for name in names
    }
    for key, value in overrides.items():
        if "." in key:
            into = {name: variables.set_below(each, key, value) for name, each in merged.items()}
            merged |= {name: each for name, each in into.items() if each is not None}
            if not any(each is not None for each in into.values()):
                parts = key.split(".")
                problems.append(
                    f"--data {key}: no node has the setting "
                    f"`{'.'.join(parts[: min(2, len(parts) - 1)])}`, in which this key "
                    "would be set: write the whole setting as JSON, or change group_vars/"
                )
    if problems:  # checking the readable rest would only report false mistakes
        raise FleetError(*problems)
    known = {"group_vars": ("all", *stem, *nested.members), "host_vars": names}
    checked = node_variables.check(
        merged, {name: (*stem, *nested.groups_of(name)) for name in names}
    )
    nodes = {name: each.from_root(root) for name, each in checked.items()}
    judged = lock_check.check_locks(nodes, today=dt.date.today())  # noqa: DTZ011  # the operator's day
    if judged.problems:
        raise FleetError(*judged.problems)
    return Fleet(
        inventory=shown,
        root=root,
        nodes=nodes,
        groups=nested,
        remarks=(
            *_unknown_keys(nodes.values(), root),
            *exposure_remarks(nodes.values(), root),
            *_unread(directories, root, known),
            *judged.remarks,
        ),
    )


def _hosts(
    shown: str, path: Path, groups: Mapping[str, Sequence[Host]]
) -> tuple[dict[str, list[str]], dict[str, dict[str, tuple[Any, Origin]]]]:
    """Return {group: its host names} and {host: the variables in its inventory entry}."""
    lines = _inline_lines(path)
    hosts: dict[str, list[str]] = {group: [] for group in groups}
    inline: dict[str, dict[str, tuple[Any, Origin]]] = {}
    problems = [
        f"{shown}: {group!r} cannot be the name of a group: `all` stands for every node, "
        "and pyinfra ignores names that start with _: choose a different name"
        for group in groups
        if group == "all" or group.startswith("_")
    ]
    for group, members in groups.items():
        if isinstance(members, str):
            problems.append(
                f"{shown}: group {group} is a text, but must be a list: write [{members!r}]"
            )
            continue
        for member in members:
            name, data = (member, {}) if isinstance(member, str) else _pair(member)
            if not isinstance(name, str) or not name or name.split() != [name]:
                problems.append(
                    f"{shown}: group {group} has {member!r}: a node is its name, or "
                    '("name", {its variables})'
                )
                continue
            if name in hosts[group]:
                problems.append(
                    f"{shown}: group {group} contains {name} twice: remove one of the two"
                )
            hosts[group].append(name)
            for key, value in data.items():
                first, _ = inline.setdefault(name, {}).get(key, (value, None))
                if first != value:
                    problems.append(
                        f"{shown}: {name} has two different values for {key}, in different "
                        "groups: remove one of the two"
                    )
                inline[name][key] = (value, Origin(shown, lines.get((name, key), 0)))
    if problems:
        raise FleetError(*problems)
    return hosts, inline


def _pair(member: Any) -> tuple[Any, Mapping[str, Any]]:
    match member:
        case (name, dict(data)):
            return name, data
        case _:
            return None, {}


def _inline_lines(path: Path) -> dict[tuple[str, str], int]:
    """Return the line numbers of the keys in literal `("host", {"key": ...})` entries."""
    lines = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(host)), ast.Dict(keys=keys)]):
                for key in keys:
                    if isinstance(key, ast.Constant):
                        lines[host, str(key.value)] = key.lineno
    return lines


def _unread(
    directories: Iterable[Path], root: Path, known: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """
    Yield a remark for each variable file that no host or group of this inventory uses.

    The name of such a file is often a spelling mistake. A file is skipped if a different inventory
    has the same name, or mentions the name.
    """
    files = sorted((root / "inventories").glob("*.py"))
    others = {path.stem for path in files}
    others_text = "\n".join(path.read_text(errors="replace") for path in files)
    for directory in directories:
        for kind, names in known.items():
            folder = directory / kind
            read = {file for name in names for file in variables.files_of(folder, name, root)}
            if kind == "group_vars":
                read |= {lock_file.lock_path(folder, name) for name in names}
            for file in variables.all_files(folder):
                name = lock_file.group_name(Path(file.relative_to(folder).parts[0]))
                if file not in read and name not in others and f'"{name}"' not in others_text:
                    yield (
                        f"{variables.shown_path(file, root)} is not read, because this "
                        f"inventory has no group or node {name!r}{suggestion(name, names)}"
                    )


def _unknown_keys(nodes: Iterable[NodeVars], root: Path) -> Iterator[str]:
    """
    Yield a remark for each missing file of host keys, without which gpufleet connects to no node.
    """
    files = dict.fromkeys(
        node.for_pyinfra(root)["ssh_known_hosts_file"]
        for node in nodes
        if "ssh_known_hosts_file" in node.variables
    )
    for file in files:
        if not Path(file).is_file():
            yield (
                f"{variables.shown_path(Path(file), root)} (ssh_known_hosts_file) does not "
                "exist, so gpufleet connects to no node: docs/configure/inventory.md shows "
                "how to create the file"
            )


def _selectable(fleet: Fleet) -> dict[str, tuple[str, ...]]:
    """Return the groups that --limit and --exclude accept. pyinfra has no group `all`."""
    return {Path(fleet.inventory).stem: tuple(fleet.nodes), **fleet.groups.members}


def _python_error(error: Exception, path: str | Path) -> str:
    """Return the message of a Python error in an inventory file, with its line."""
    if isinstance(error, SyntaxError):
        if error.msg.startswith("(unicode error)") and "codec" in error.msg:
            return f"{error.filename}:{error.lineno}: is not Python, because it is not UTF-8 text"
        return f"{error.filename}:{error.lineno}: is not Python: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((each.lineno for each in reversed(frames) if each.filename == str(path)), 0)
    return f"{path}:{line}: {type(error).__name__}: {error}"
