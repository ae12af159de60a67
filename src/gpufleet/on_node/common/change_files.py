"""RUNS ON THE NODE: the files in which changes of the fleet keep their state on this node.

    /var/lib/gpufleet/change/        0700, root's
      lock.json                      {"id", "owner", "from", "since", "what"}
      deploy.json                    common/deploy_mark.py
      cordon.json                    {"by", "why", "since", "upgrade": id or null}
      drained/<replica>.json         the same keys
      next/manifest.json             put here by deploys/prepare.py (upgrade/run/staged_units.py)
      next/<unit>, next/files/...    the unit files, and what units read when they start
      kept/<upgrade>/manifest.json   {"id", "at", "units": {unit: fingerprint or null}, ...}
      kept/<upgrade>/<unit>          the previous unit files
      kept/<upgrade>/files/...       and what units read

Files are replaced atomically, and are on disk when `write` returns: a kill leaves the old file or
the new one. Only one program at a time changes these files.
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
# A change of marks, and a change of units, waits only for others of its kind: a mark is
# made while another replica of the node still stops.
MARKS_TURN = HOME + "/.marks"
UNITS_TURN = HOME + "/.units"
# What is done to marks takes milliseconds.
TURN_SECONDS = 30
TEMPORARY = ".gpufleet-"
FILE_BYTES = 16 << 20
"""Size limit of files in bytes; the largest file, the ranks' program, has 0.2 MB."""


class RefusedError(Exception):
    """A refusal; its text is the sentence for the operator in the answer's `problem`."""


@contextlib.contextmanager
def exclusive_lock(path: str, seconds: float = TURN_SECONDS) -> Iterator[None]:
    """Hold the exclusive lock for one kind of change; the lock ends with the process."""
    make_directory(HOME)
    os.chmod(linux_facts.ROOT + HOME, 0o700)

    def refusal() -> RefusedError:
        return RefusedError(
            "another change has been running on this node for over %d s: it is another "
            "operator's, or its controller is gone; try again when it is done" % seconds
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
    """Write a JSON object, indented for readers."""
    write(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode(), 0o600)


def write(path: str, content: bytes, mode: int, owner: Tuple[int, int] = (0, 0)) -> None:
    """Replace a file atomically; `owner` has the numeric user and group."""
    at = linux_facts.ROOT + path
    folder = os.path.dirname(at)
    # The same name each time: a killed write's is taken over by the next one.
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
    """Remove a directory tree after renaming it, so that its name never has only a part."""
    folder, name = os.path.split(linux_facts.ROOT + path)
    gone = os.path.join(folder, TEMPORARY + "gone-" + name)
    if os.path.lexists(gone):
        shutil.rmtree(gone)
    with contextlib.suppress(FileNotFoundError):
        os.rename(linux_facts.ROOT + path, gone)
        shutil.rmtree(gone)


def remove_leftovers(folder: str) -> None:
    """Remove the leftovers of a killed `remove_directory`."""
    for name in directory_names(folder, hidden=True):
        if name.startswith(TEMPORARY + "gone-"):
            shutil.rmtree(linux_facts.ROOT + folder + "/" + name)


def make_directory(path: str) -> None:
    """Create a directory and its parents with mode 0700; an existing directory stays unchanged."""
    os.makedirs(linux_facts.ROOT + path, mode=0o700, exist_ok=True)


def directory_names(folder: str, *, hidden: bool = False) -> List[str]:
    """Return the sorted names in a directory, or an empty list if it does not exist."""
    try:
        found = sorted(os.listdir(linux_facts.ROOT + folder))
    except FileNotFoundError:
        return []
    return [name for name in found if hidden or not name.startswith(".")]


def sync(folder: str) -> None:
    """Sync a directory's entries to disk; the path already has the prefix (`ROOT`)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def must_be_name(text: Any) -> str:
    """
    Return the name of an upgrade, a unit or a replica. Raises `RefusedError` if it is invalid.
    """
    plain = str(text)
    known = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@:-")
    if not plain or plain.startswith(".") or not set(plain) <= known:
        raise RefusedError("%r is not a valid name" % plain)
    return plain
