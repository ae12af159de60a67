"""Remove from a node what gpufleet has installed."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, operation

from gpufleet.operations.converge import announce, refuse
from gpufleet.remote import payload
from gpufleet.remote.facts import NodeRemains
from gpufleet.sanitize import printable

LOOK_SECONDS = 60
# on_node/converge/remove.py waits until stages are drained, and until other package managers have
# finished.
REMOVE_SECONDS = 2 * 3700 + 900

Commands = Generator[StringCommand | FunctionCommand]

_WORDS = {
    "units": "stop and remove unit",
    "packages": "remove package",
    "tables": "remove table of nftables",
    "paths": "remove",
    "accounts": "remove account",
}


@dataclass(frozen=True)
class Part:
    """
    Everything that one purpose installs on a node.

    `units`, `packages` and `paths` are shell patterns. `empty` are folders that are removed if they
    are empty. `keep` are paths that stay. At least one of the paths in `marks` must exist.
    Otherwise the packages were not installed by gpufleet, and nothing is changed. With
    `purge=False`, the settings and data of packages stay.
    """

    marks: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    purge: bool = True


@operation()
def remove_part(part: Part) -> Commands:
    """List the items of a part that exist on the node, and remove them."""
    found = ask_remains(part)
    if found is None:
        yield from refuse(("the node's parts could not be read",))
        return
    changes = tuple(removal_lines(found))
    if not changes:
        host.noop("nothing of this part exists on the node")
        return
    for change in changes:
        announce(change)
    yield FunctionCommand(_remove, (part,), {})


def ask_remains(part: Part, action: str = "look") -> Mapping[str, list[str]] | None:
    """
    Return the items of a part that exist on the node, or None if the node did not answer.

    With the action `remove`, the node first removes the items, and the result has those that still
    exist.
    """
    program = payload.program("converge/remove", action=action, **asdict(part))
    seconds = LOOK_SECONDS if action == "look" else REMOVE_SECONDS
    said: dict[str, Any] = host.get_fact(NodeRemains, _stdin=program, _timeout=seconds)
    return said["found"] if said else None


def look_program(parts: Iterable[Part]) -> str:
    """Return the program that detects which of these parts exist. It checks only their marks."""
    marks = tuple(mark for part in parts for mark in part.marks)
    return payload.program("converge/remove", action="look", **asdict(Part(marks, paths=marks)))


def removal_lines(found: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a line for each item to remove."""
    for kind, words in _WORDS.items():
        yield from (f"{words} {printable(name)}" for name in found[kind])


def _remove(state: State, host: Host, part: Part) -> bool:  # noqa: ARG001
    left = ask_remains(part, "remove")
    if left is None:
        return False
    still = tuple(removal_lines(left))
    for each in still:
        logger.error("%scould not %s", host.print_prefix, each)
    return not still
