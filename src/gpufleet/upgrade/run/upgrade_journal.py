"""The journal of an upgrade: every step is written to it before it begins.

The journal is a file of JSON lines that only its owner can read. Each line is on the disk (`fsync`)
before its step begins. So after a `kill -9` the journal may announce a step that did not begin, but
it never lacks a step that did. `upgrade_state.fold` computes the fleet's last known state from it;
`state_machine` decides the next step.

If the machine goes down, the last line may be incomplete. Such a line announces nothing, because
its step did not begin. Only one process writes at a time; it holds a `flock`, which ends with the
process. The journal has no secrets, and nodes' output is escaped for terminals and shortened first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError, answer_fault, file_fault, json_fault
from gpufleet.paths import lock_file
from gpufleet.upgrade.run.journal_entry import WORDS, Entry
from gpufleet.upgrade.run.upgrade_state import apply, fold

FOLDER = Path(".gpufleet/upgrades")
"""Directory of journals in an operator's project, which its `.gitignore` excludes."""
SUFFIX = ".jsonl"
SCHEMA = 1

_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}")
_MOST = 2000  # characters of a text in an entry: what nodes say is quoted, not kept


def new_id() -> str:
    """
    Return a new upgrade id, which sorts by time and names the directory on nodes and the file here.
    """
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"


def is_id(text: str) -> bool:
    """Return whether a text has the form of an upgrade's id."""
    return _ID.fullmatch(text) is not None


# -- the file --------------------------------------------------------------------------------------


class Journal:
    """
    A journal that only this process writes.

        with Journal.create(folder, new_id()) as journal:
            journal.append("draining", wave=1, group="tiny-0")
            ...  # now it may be drained

    `entries` has all entries, including those of earlier runs.
    """

    def __init__(self, path: Path, file: int, entries: Iterable[Entry]) -> None:
        self.path = path
        self.entries: list[Entry] = list(entries)
        self.state = fold(self.entries)
        """State that follows from the entries."""
        self.on_entry: Callable[[Entry], None] | None = None
        """Called with each entry once it is on the disk, to show progress."""
        self._file = file
        self._whole = os.fstat(file).st_size
        """The number of bytes in complete lines."""

    @classmethod
    def create(cls, folder: Path, upgrade: str) -> Journal:
        """
        Create the journal of a new upgrade. Raises `FleetError` if the file cannot be created.
        """
        path = folder / f"{upgrade}{SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            _sync_folder(folder)
        except OSError as error:
            raise FleetError(
                f"{path}: cannot be written ({error.strerror}), but gpufleet must record each step "
                "before it starts the step: set a different directory with --journal"
            ) from None
        lock_file(path, file)
        return cls(path, file, ())

    @classmethod
    def reopen(cls, path: Path) -> Journal:
        """
        Open a journal to continue it.

        An incomplete last line is removed: its step did not begin. Raises `FleetError` if another
        process writes the journal, or if it is invalid.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise FleetError(f"{path}: cannot be opened: {error.strerror}") from None
        lock_file(path, file)
        whole, entries = _read(path)
        os.ftruncate(file, whole)
        os.fsync(file)
        return cls(path, file, entries)

    def append(
        self,
        what: str,
        /,
        *,
        wave: int | None = None,
        group: str | None = None,
        node: str | None = None,
        **said: Any,
    ) -> Entry:
        """
        Write an entry, and return it once it is on the disk.

        Raises `FleetError` if the entry cannot be written. The entry's step must then not begin.
        """
        if what not in WORDS:
            raise ValueError(what)
        entry = Entry(time.time(), what, wave, group, node, _shorten(said))
        line = json.dumps(entry.as_json(), separators=(",", ":"), default=str) + "\n"
        try:
            self._cut_off()
            # One write: greenlets of several groups append, and none comes between.
            _write(self._file, line.encode())
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._cut_off()
            raise FleetError(
                f"{self.path}: cannot be written ({error.strerror}), so {what} is not started: "
                "free space, and continue with `gpufleet upgrade --resume`"
            ) from None
        self._whole += len(line.encode())
        self.entries.append(entry)
        self.state = apply(self.state, entry)
        if self.on_entry:
            self.on_entry(entry)
        return entry

    def _cut_off(self) -> None:
        """Remove the rest of a failed write (a full disk), so that the next one is a whole line."""
        if os.fstat(self._file).st_size != self._whole:
            os.ftruncate(self._file, self._whole)
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file, so that another process may write."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> tuple[Entry, ...]:
    """
    Return a journal's entries. Raises `FleetError` if the file is not a journal.

    Another process may write the journal at the same time.
    """
    return _read(path)[1]


def is_written(path: Path) -> bool:
    """Return whether a process has a journal open to write."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def list_journals(folder: Path) -> tuple[Path, ...]:
    """Return the journals in a directory, the oldest first."""
    with contextlib.suppress(OSError):
        return tuple(
            sorted(each for each in folder.iterdir() if each.suffix == SUFFIX and is_id(each.stem))
        )
    return ()


def find(folder: Path, upgrade: str) -> Path:
    """Return the path of an upgrade's journal. Raises `FleetError` if there is none."""
    path = folder / f"{upgrade}{SUFFIX}"
    if is_id(upgrade) and path.is_file():
        return path
    there = ", ".join(each.stem for each in list_journals(folder)) or "none"
    raise FleetError(f"{folder}: has no journal of upgrade {upgrade!r}; upgrades there: {there}")


def _read(path: Path) -> tuple[int, tuple[Entry, ...]]:
    """Return the number of bytes in complete lines, and their entries."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FleetError(f"{path}: cannot be read: {error.strerror}") from None
    whole = data.rfind(b"\n") + 1
    entries = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            entries.append(Entry.from_json(json.loads(line)))
        except FleetError as error:
            raise FleetError(_no_entry(path, number, str(error))) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                why = json_fault(error)
            elif isinstance(error, UnicodeDecodeError):
                why = file_fault(error)
            else:
                why = answer_fault(error)
            raise FleetError(_no_entry(path, number, why)) from None
    return whole, tuple(entries)


def _no_entry(path: Path, number: int, why: str) -> str:
    return (
        f"{path}:{number}: this line is not a valid entry of a journal ({why}): it was changed by "
        "hand, or written by a different release of gpufleet. `gpufleet status` shows the state "
        "of the nodes"
    )


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _sync_folder(folder: Path) -> None:
    """Sync a directory, so that a new name survives a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _shorten(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MOST else value[: _MOST - 1] + "…"
    if isinstance(value, Mapping):
        return {str(key): _shorten(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_shorten(each) for each in value]
    return value
