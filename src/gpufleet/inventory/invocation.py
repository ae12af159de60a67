"""Parse pyinfra's arguments, and refuse those that would give a wrong exit code.

Exit code 0 must mean that every requested operation succeeded on every requested node. pyinfra 3.10
also answers 0 when the inventory does not exist, when --limit or --exclude match nothing, when
operations fail under --no-wait, and when the run is interrupted. This module refuses each of these
cases before a node is touched. `config.py` calls `check_invocation()` before the inventory is read.
`inventory.load` calls it again, for runs without gpufleet's `config.py`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from gpufleet.formatting import suggestion
from gpufleet.inventory.refusal import Refusal
from gpufleet.sanitize import printable

SERIES = "~=3.10.0"
"""The pyinfra release on whose internals this package relies; the same as in pyproject.toml."""

_NAMED = 4
"""Maximum number of nodes that an interruption message lists for each operation."""
NOT_PYTHON = frozenset({".yml", ".yaml", ".ini", ".json", ".toml"})
"""File endings of other tools' inventories."""


@dataclass(frozen=True)
class Invocation:
    """pyinfra's command line. The fields have the names of pyinfra's parameters."""

    inventory: str
    operations: tuple[str, ...]
    data: tuple[str, ...]
    limit: tuple[str, ...]
    exclude: tuple[str, ...]
    group_data: tuple[str, ...]
    serial: bool
    no_wait: bool
    yes: bool
    dry: bool

    @property
    def deploys(self) -> bool:
        """
        Return whether the operations are deploy files, which need variables.

        `exec`, `fact` and other operations need none.
        """
        return bool(self.operations) and all(name.endswith(".py") for name in self.operations)

    def overrides(self) -> dict[str, Any]:
        """Return the variables of `--data`, parsed as pyinfra parses them."""
        from pyinfra_cli.util import parse_cli_arg

        pairs = (item.split("=", 1) for item in self.data)
        return {key: parse_cli_arg(value) for key, value in pairs}


def current() -> Invocation | None:
    """
    Return the command line of the current pyinfra command, or None outside pyinfra.

    Raises Refusal for a different series of pyinfra, whose command line has different options.
    """
    context = click.get_current_context(silent=True)
    if context is None or getattr(context.command.callback, "__module__", "") != "pyinfra_cli.cli":
        return None
    typed = context.params
    names = tuple(Invocation.__dataclass_fields__)
    if lacking := [name for name in names if name not in typed]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in lacking)
        raise Refusal(
            f"pyinfra {version('pyinfra')} has no {options}, but gpufleet needs to read "
            f"these options: use pyinfra {SERIES}, which `uv sync` installs",
            what="this pyinfra",
        )
    return Invocation(**{name: typed[name] for name in names})


def check_invocation() -> None:
    """
    Refuse a command line that could give a wrong exit code. Outside pyinfra, do nothing.

    Also replaces pyinfra's SIGINT handler, which exits with 0. Raises Refusal with all problems.
    """
    invocation = current()
    if invocation is None:
        return
    signal.signal(signal.SIGINT, _interrupted)  # pyinfra's own handler exits with 0
    if problems := [*option_problems(invocation), *_inventory_problems(invocation)]:
        raise Refusal(*problems, what="this command line")


def list_inventories() -> str:
    """Return `; there are inventories/lab.py, ...` for a message, or "" if there are none."""
    found = sorted(str(path) for path in Path("inventories").glob("*.py"))
    return f"; there are {', '.join(found)}" if found else ""


def option_problems(invocation: Invocation) -> Iterator[str]:
    """Yield the problems of the options, without the inventory."""
    if invocation.no_wait:
        yield (
            "--no-wait: with this option, pyinfra exits with status 0 although operations "
            "failed: remove --no-wait"
        )
    if invocation.yes and invocation.dry:
        yield (
            "--dry with -y: with both options, pyinfra neither detects nor shows changes: "
            "to see what would change, remove -y (PYINFRA_YES may have set it)"
        )
    if invocation.group_data:
        yield (
            "--group-data: gpufleet checks only variables in group_vars/ and host_vars/: "
            "move the variables there, or set a single variable with --data KEY=VALUE"
        )
    for item in invocation.data:
        if "=" not in item:
            yield f"--data {item}: has no value: write --data {item}=VALUE"


def selection_problems(
    invocation: Invocation, hosts: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """
    Yield the problems of --limit and --exclude for these nodes.

    Patterns match as in pyinfra: a group name, otherwise a shell pattern of host names.
    """
    known = [*(group for group in groups if groups[group]), *hosts]

    def matched(option: str, patterns: Sequence[str]) -> Iterator[str | tuple[str, ...]]:
        for pattern in patterns:
            found = tuple(groups.get(pattern, ())) or tuple(
                host for host in hosts if fnmatchcase(host, pattern)
            )
            yield found or (
                f"{option} {pattern}: matches no host and no group"
                f"{suggestion(pattern, known) or '; there are ' + ', '.join(known[:20])}"
            )

    limits = list(matched("--limit", invocation.limit))
    excludes = list(matched("--exclude", invocation.exclude))
    problems = [found for found in (*limits, *excludes) if isinstance(found, str)]
    yield from problems
    wanted = {host for found in limits for host in found} if invocation.limit else set(hosts)
    if hosts and not problems and not wanted - {host for found in excludes for host in found}:
        yield "--limit and --exclude together match no host"


def _inventory_problems(invocation: Invocation) -> Iterator[str]:
    name = invocation.inventory
    path = Path(name)
    if path.is_dir():
        yield f"{name} is a directory: write the name of one inventory file{list_inventories()}"
    elif path.is_file():
        if path.suffix in NOT_PYTHON:
            yield (
                f"{name} is not a Python file, but an inventory is, for example "
                "inventories/local.py; variables belong in group_vars/"
            )
        elif error := _syntax_error(path):
            yield f"{name}:{error.lineno}: is not Python: {error.msg}"
    elif (path.suffix == ".py" or "/" in name) and not _is_host_list(name):
        yield f"{name}: there is no such inventory file{list_inventories()}"
    elif invocation.deploys:
        hosts = json.dumps(name.split(","))
        yield (
            f"{name} is not an inventory file, but deploys need the variables of an "
            "inventory: write inventories/NAME.py with\nfrom gpufleet import "
            'inventory\nglobals().update(inventory.load(__file__, groups={"gpu": '
            f"{hosts}}}))\n(only `exec` and `fact` work with a list of hosts)"
        )
    elif not _pyinfra_knows(name, invocation):
        yield f"{name} is neither an inventory file nor a host that resolves{list_inventories()}"


def _syntax_error(path: Path) -> SyntaxError | None:
    try:
        compile(path.read_bytes(), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    return None


def _is_host_list(name: str) -> bool:
    return "," in name or "@" in name


def _pyinfra_knows(name: str, invocation: Invocation) -> bool:
    # Use pyinfra's own functions, in its order, so that both agree.
    from pyinfra_cli.inventory import _resolves_to_host
    from pyinfra_cli.util import try_import_module_attribute

    return (
        _is_host_list(name)
        or any(item.startswith("ssh_hostname=") for item in invocation.data)
        or try_import_module_attribute(name, raise_for_none=False) is not None
        or _resolves_to_host(name)
    )


def _interrupted(_signal: int, _frame: FrameType | None) -> NoReturn:
    click.echo(printable(interruption_message(under_way())), err=True)
    sys.exit(128 + signal.SIGINT)  # what a shell reports for a command ended by SIGINT


def interruption_message(operations: Mapping[str, Sequence[str]]) -> str:
    """
    Return the message after Ctrl-C. It has the commands that may still run, and the next step.

    `operations` maps each operation to the nodes that run it.
    """
    left = "; ".join(
        f"{', '.join(nodes[:_NAMED])}{' and more' if len(nodes) > _NAMED else ''}: {name}"
        for name, nodes in operations.items()
    )
    running = f"These commands may continue to run on the nodes: {left}. " if left else ""
    return (
        f"Interrupted: gpufleet sends no further command. {running}To continue, run the "
        "same command again: it does what is not yet done."
    )


def under_way() -> dict[str, list[str]]:
    """Return the operations of pyinfra's run that are in progress, each with its nodes."""
    from pyinfra.context import ctx_state

    found: dict[str, list[str]] = {}
    if not ctx_state.isset():
        return found
    state = ctx_state.get()
    for host in state.inventory:
        if begun := host.executing_op_hash:
            name = ", ".join(sorted(state.get_op_meta(begun).names))
            found.setdefault(name, []).append(host.name)
    return found
