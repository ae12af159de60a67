"""RUNS ON THE NODE: read and write the files in which changes of the fleet keep state on this node.

    /var/lib/gpufleet/change/        0700, root's
      lock.json                      {"id", "owner", "from", "since", "what"}
      deploy.json                    common/deploy_mark.py
      cordon.json                    {"by", "why", "since", "upgrade": id or null}
      drained/<replica>.json         the same keys
      next/manifest.json             written by deploys/prepare.py (upgrade/run/staged_units.py)
      next/<unit>, next/files/...    the next unit files, and the files that units read at start
      kept/<upgrade>/manifest.json   {"id", "at", "units": {unit: fingerprint or null}, ...}
      kept/<upgrade>/<unit>          the previous unit files
      kept/<upgrade>/files/...       the previous files that units read at start

Files are replaced atomically, and the new file is on disk when `write` returns. If the program is
killed, the whole old file or the whole new file remains. Only one program at a time changes these
files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gpufleet.on_node.common import file_lock, linux_facts

HOME = "/var/lib/gpufleet/change"
NEXT = HOME + "/next"
KEPT = HOME + "/kept"
DRAINED = HOME + "/drained"
LOCK = HOME + "/lock.json"
CORDON = HOME + "/cordon.json"
MANIFEST = "manifest.json"
# A change of marks waits only for other changes of marks, and a change of units only for other
# changes of units. So a mark can be made while a different replica of the node still stops.
MARKS_TURN = HOME + "/.marks"
UNITS_TURN = HOME + "/.units"
# A change of marks takes only milliseconds.
TURN_SECONDS = 30
TEMPORARY = ".gpufleet-"
FILE_BYTES = 16 << 20
"""Size limit of files in bytes. The largest file is the ranks' program, with 0.2 MB."""


class RefusedError(Exception):
    """
    Raised to refuse a request. Its text is the message for the operator in the answer's `problem`.
    """


@contextlib.contextmanager
def exclusive_lock(path: str, seconds: float = TURN_SECONDS) -> Iterator[None]:
    """
    Hold the exclusive lock for one kind of change. The lock is released when the process ends.
    """
    make_directory(HOME)
    os.chmod(linux_facts.ROOT + HOME, 0o700)

    def refusal() -> RefusedError:
        return RefusedError(
            "another change has been running on this node for more than %d s. Another operator "
            "started it, or its controller was lost. Try again when that change is done" % seconds
        )

    with file_lock.hold(linux_facts.ROOT + path, seconds, refusal):
        yield


def read(path: str) -> Optional[bytes]:
    """Return a file's content, or None if it does not exist."""
    try:
        with open(linux_facts.ROOT + path, "rb") as file:
            return file.read(FILE_BYTES)
    except FileNotFoundError:
        return None


def document(path: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object in a file, or None if it does not exist."""
    content = read(path)
    if content is None:
        return None
    try:
        found = json.loads(content.decode())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RefusedError("%s is not a JSON object: inspect it, then remove it" % path)
    return found


def write_document(path: str, content: Dict[str, Any]) -> None:
    """Write a JSON object, indented so that people can read it."""
    write(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode(), 0o600)


def write(path: str, content: bytes, mode: int, owner: Tuple[int, int] = (0, 0)) -> None:
    """Replace a file atomically. `owner` is the numeric user id and group id."""
    at = linux_facts.ROOT + path
    folder = os.path.dirname(at)
    # The temporary file has the same name each time, so that the next write replaces the temporary
    # file of a write that was killed.
    name = hashlib.sha256(os.fsencode(os.path.basename(at))).hexdigest()[:16]
    new = os.path.join(folder, TEMPORARY + name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if os.geteuid() == 0:
            os.fchown(file.fileno(), *owner)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    os.replace(new, at)
    sync(folder)


def remove(path: str) -> bool:
    """Remove a file; return whether it existed."""
    try:
        os.unlink(linux_facts.ROOT + path)
    except FileNotFoundError:
        return False
    sync(os.path.dirname(linux_facts.ROOT + path))
    return True


def remove_directory(path: str) -> None:
    """
    Rename a directory tree, then remove it, so that its path never has only a part of the tree.
    """
    folder, name = os.path.split(linux_facts.ROOT + path)
    gone = os.path.join(folder, TEMPORARY + "gone-" + name)
    if os.path.lexists(gone):
        shutil.rmtree(gone)
    with contextlib.suppress(FileNotFoundError):
        os.rename(linux_facts.ROOT + path, gone)
        shutil.rmtree(gone)


def remove_leftovers(folder: str) -> None:
    """Remove the renamed directories of a `remove_directory` that was killed."""
    for name in directory_names(folder, hidden=True):
        if name.startswith(TEMPORARY + "gone-"):
            shutil.rmtree(linux_facts.ROOT + folder + "/" + name)


def make_directory(path: str) -> None:
    """
    Create a directory and its parents with mode 0700. An existing directory is not changed.
    """
    os.makedirs(linux_facts.ROOT + path, mode=0o700, exist_ok=True)


def directory_names(folder: str, *, hidden: bool = False) -> List[str]:
    """
    Return the sorted names in a directory, or an empty list if the directory does not exist.
    """
    try:
        found = sorted(os.listdir(linux_facts.ROOT + folder))
    except FileNotFoundError:
        return []
    return [name for name in found if hidden or not name.startswith(".")]


def sync(folder: str) -> None:
    """Sync a directory's entries to disk. `folder` must already have the prefix (`ROOT`)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def must_be_name(text: Any) -> str:
    """
    Return `text` as the name of an upgrade, a unit or a replica.

    Raises `RefusedError` if the name is invalid.
    """
    plain = str(text)
    known = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@:-")
    if not plain or plain.startswith(".") or not set(plain) <= known:
        raise RefusedError("%r is not a valid name" % plain)
    return plain
