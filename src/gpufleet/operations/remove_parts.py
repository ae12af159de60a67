"""Remove gpufleet's parts from a node."""

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
# Stages drain, packages wait for each other: on_node/converge/remove.py.
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

    `units`, `packages` and `paths` are shell patterns; `empty` are folders to remove when they are
    empty, and `keep` are paths to keep. At least one of `marks` must exist: otherwise the packages
    are not gpufleet's, and nothing is touched. With `purge=False` packages leave their settings
    and data.
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
    """List everything of a part that exists, and remove it."""
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
    Return the existing items of a part; with `remove`, remove them and return the remaining ones.

    None: the node gave no answer.
    """
    program = payload.program("converge/remove", action=action, **asdict(part))
    seconds = LOOK_SECONDS if action == "look" else REMOVE_SECONDS
    said: dict[str, Any] = host.get_fact(NodeRemains, _stdin=program, _timeout=seconds)
    return said["found"] if said else None


def look_program(parts: Iterable[Part]) -> str:
    """Return the program that detects these parts, only by their marks."""
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
