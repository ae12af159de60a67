"""Enter packages into a node's dpkg database without installing them.

A driver's packages contain programs that need a GPU, but the lab needs only the names and versions.
So `enter` writes the entries into dpkg's own database (/var/lib/dpkg: status, info/NAME.list) in
one rename, while it holds the locks of dpkg and apt. Afterwards dpkg, apt and administrators can
hold, upgrade and remove the packages.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpufleet.errors import FleetError
from lab.state import lock

_DATABASE = Path("var/lib/dpkg")
_LOCKS = ("lock-frontend", "lock")  # apt's order
_PATIENCE = 60.0  # seconds that another package manager may take


@dataclass(frozen=True)
class Entry:
    """One package's entry in dpkg's database."""

    version: str
    held: bool
    files: Sequence[str] = ()  # removed together with the package; must exist


def enter(root: Path, packages: Mapping[str, Entry | None], architecture: str) -> None:
    """
    Enter these packages into dpkg's database at `root`; None removes a package.

    `architecture` is dpkg's name, for example "amd64". Raises `FleetError` if a package manager
    runs there for more than a minute.
    """
    if not packages:
        return
    database = root / _DATABASE
    with _hold_locks(database):
        status = database / "status"
        kept = [block for block in _blocks(status.read_text()) if _name(block) not in packages]
        for name, entry in packages.items():
            # The package's files and their contents, usually none. Without these lists dpkg
            # complains.
            listed = "".join(f"{path}\n" for path in ("/.", *(entry.files if entry else ())))
            for suffix, content in (("list", listed), ("md5sums", "")):
                if entry is None:
                    (database / f"info/{name}.{suffix}").unlink(missing_ok=True)
                else:
                    (database / f"info/{name}.{suffix}").write_text(content)
            if entry is not None:
                kept.append(_block(name, entry, architecture))
        draft = status.with_name("status-lab")
        draft.write_text("".join(f"{block}\n\n" for block in kept))
        draft.chmod(0o644)
        draft.rename(status)


def _blocks(text: str) -> Iterator[str]:
    return (block.strip("\n") for block in text.split("\n\n") if block.strip())


def _name(block: str) -> str:
    return block.partition("\n")[0].removeprefix("Package: ")


def _block(name: str, entry: Entry, architecture: str) -> str:
    return "\n".join(
        (
            f"Package: {name}",
            f"Status: {'hold' if entry.held else 'install'} ok installed",
            "Priority: optional",
            "Section: misc",
            "Installed-Size: 1",
            "Maintainer: gpufleet lab <lab@example.invalid>",
            f"Architecture: {architecture}",
            f"Version: {entry.version}",
            f"Description: stand-in for {name}, for rehearsals only",
        )
    )


@contextmanager
def _hold_locks(database: Path) -> Iterator[None]:
    """Hold the locks of running dpkg and apt processes."""
    with ExitStack() as stack:
        for name in _LOCKS:
            file = stack.enter_context((database / name).open("a"))
            if not lock(file, _PATIENCE, fcntl.lockf):
                raise FleetError(
                    f"A package manager has locked {database / name} for over {_PATIENCE:.0f} s: "
                    "wait until it has finished on the node, then try again."
                )
        yield
