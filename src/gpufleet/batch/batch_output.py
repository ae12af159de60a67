"""Write the output of a batch. The output is also the record of which lines were answered.

Border. An answer counts when it is on disk. The file `OUTPUT.state` in the output's folder has the
hash of the input. It is also the lock that allows only one process to write an output, and its
`flock` is released when the process ends. If the process is killed at any time, the output has
complete lines and at most one partial last line, which the next process removes. After a power
loss, answers of the last second may be missing, and their lines are sent again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpufleet.batch.batch_input import CheckedInput, id_hash
from gpufleet.batch.replies import Totals
from gpufleet.errors import FleetError, file_fault
from gpufleet.paths import lock_file

_SCHEMA = 1
_PIECE = 1 << 20


def state_file(output: Path) -> Path:
    """
    Return the path of an output's state file. The file has the hash of the input.

    >>> str(state_file(Path("out.jsonl")))
    'out.jsonl.state'
    """
    return output.with_name(f"{output.name}.state")


class BatchOutput:
    """
    An output file. While it is open, it is locked against other processes.

    `done` has the lines that were answered.
    """

    def __init__(self, path: Path, of: CheckedInput, model: str, *, retry_failed: bool) -> None:
        """
        Open a new output, or the output of an earlier run with the same input.

        Raises `FleetError` if the output belongs to a different input, or if a different process
        has locked it.
        """
        self.path = path
        self.done: set[int] = set()
        """Hashes of the `custom_id` of each line that was answered."""
        self.totals = Totals()
        self._unsynced = False
        try:
            self._lock = self._take(of, model)
            if retry_failed:
                self._drop_failed()
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o600)
            self._size = self._read_all()
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
            _sync_folder(path.parent)
        except OSError as error:
            raise FleetError(f"{path} cannot be written: {file_fault(error)}") from None

    def add(self, document: dict[str, Any]) -> None:
        """
        Write an answer, and count it.

        Raises `FleetError` if the write fails. Even then, the file has only complete lines.
        """
        # Only ASCII is written, so that one half of a surrogate pair in an answer is not changed.
        data = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        try:
            left = data
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise FleetError(
                f"{self.path} cannot be written: {file_fault(error)}. The answers in this file are "
                "kept: free some space, and run the same command again"
            ) from None
        self._size += len(data)
        self._unsynced = True
        self._count(document)

    def sync(self, call: Callable[[Callable[[int], None], int], Any] | None = None) -> None:
        """Write all answers to disk. If `call` is given, it runs the blocking function."""
        if not self._unsynced:
            return
        self._unsynced = False
        try:
            if call:
                call(os.fsync, self._file)
            else:
                os.fsync(self._file)
        except OSError as error:
            raise FleetError(f"{self.path} cannot be written: {file_fault(error)}") from None

    def close(self) -> None:
        """Write all answers to disk, then unlock the output."""
        try:
            self.sync()
        finally:
            os.close(self._file)
            os.close(self._lock)

    # -- the output of an earlier run -----------------------------------------------------------

    def _take(self, of: CheckedInput, model: str) -> int:
        """Lock the state file, then write it or compare its content. Return its descriptor."""
        place = state_file(self.path)
        lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        lock_file(place, lock)
        wanted = {"schema": _SCHEMA, "input_sha256": of.sha256, "model": model}
        text = os.pread(lock, _PIECE, 0)
        has_answers = self.path.exists() and self.path.stat().st_size > 0
        if not text.endswith(b"\n") and has_answers:
            # The state file is written completely before the first answer.
            raise FleetError(
                f"{self.path} exists, but {place.name} does not state which input its answers "
                "belong to: give a different output with `-o`, or move this file away"
            )
        if has_answers and _parse_state(text) != wanted:
            raise FleetError(
                f"{self.path} has answers to a different input, or answers of a different model "
                f"({place.name}): give a different output with `-o`, or restore the input"
            )
        if not has_answers:
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps(wanted).encode() + b"\n", 0)
            os.fsync(lock)
        return lock

    def _drop_failed(self) -> None:
        """Write the output again without the failed lines. The old file is replaced atomically."""
        if not self.path.exists():
            return
        new = self.path.with_name(f".{self.path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with self.path.open("rb") as old, os.fdopen(os.open(new, flags, 0o600), "wb") as file:
            for number, line in enumerate(old, 1):
                if line.endswith(b"\n") and not self._parse(number, line).get("error"):
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)

    def _read_all(self) -> int:
        """Record the lines that were answered. Return the size of all complete lines in bytes."""
        size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # a partial line, because its process was killed
                document = self._parse(number, line)
                key = id_hash(document["custom_id"])
                if key in self.done:
                    raise FleetError(
                        f"{self.path}: line {number}: an earlier line already has an answer for "
                        "this `custom_id`, so the file was changed by hand: remove one of the two "
                        "lines"
                    )
                self._count(document)
                size += len(line)
        return size

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(line)
            id_hash(document["custom_id"])
            Totals().add(document)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FleetError(
                f"{self.path}: line {number}: this line was not written by `gpufleet batch`, so "
                "the file was changed by hand: remove the line, and gpufleet sends its request "
                "again"
            ) from None
        return document

    def _count(self, document: dict[str, Any]) -> None:
        self.done.add(id_hash(document["custom_id"]))
        self.totals.add(document)


def _parse_state(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
