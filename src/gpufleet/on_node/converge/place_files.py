"""RUNS ON THE NODE, as root: write files, directories, links and lines.

Takes (`PARAMETERS`):
  entries   a list in the order of work. Each entry is {"kind", "path", ...}, and has more keys for
            these kinds:
            directory  user, group, mode
            file       user, group, mode, content (base64)
            link       target
            line       line
            The kind `absent` has no more keys
Prints one JSON document {"schema": 1, "placed": N}. On a problem, it prints one sentence on stderr
and exits with status 1. The entries before the entry with the problem have been written.

The program guarantees:
  * A file appears under its name only when it is complete and has its final owner and mode. It is
    on disk when the program ends. At no time can more users read its content than its mode allows.
  * No temporary files remain. They are listed in a journal before the first one is created, and the
    next run removes the temporary files of a run that was killed.
  * A lock allows only one run at a time on a node. The kernel releases it if the process is killed.
It needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import grp
import hashlib
import json
import os
import pwd
import stat
import sys
from typing import Any

from gpufleet.on_node.common import file_lock

PARAMETERS = globals().get("PARAMETERS") or {}

HOME = "/var/lib/gpufleet"
JOURNAL = HOME + "/placing"
LOCK = HOME + "/lock"
# A different run holds the lock for milliseconds. If it holds the lock longer, it is stuck.
LOCK_SECONDS = 30
TEMPORARY = ".gpufleet-"


class RefusedError(Exception):
    """Raised to refuse an entry. Its text is one sentence for the operator."""


def place(entries: list[dict[str, Any]]) -> None:
    """Place every entry."""
    os.umask(0o077)
    os.makedirs(HOME, mode=0o700, exist_ok=True)
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    file_lock.lock(lock, LOCK_SECONDS, refusal)
    remove_leftovers()
    for entry in entries:
        if entry["kind"] == "line":
            # The path may be a link to the file (/etc/resolv.conf). The link stays.
            entry["path"] = os.path.realpath(entry["path"])
    write_journal([temporary(entry["path"]) for entry in entries])
    for entry in entries:
        try:
            KINDS[entry["kind"]](entry)
        except Exception as error:
            remove(temporary(entry["path"]))
            os.unlink(JOURNAL)
            raise RefusedError("%s: %s" % (entry["path"], reason(error))) from None
    os.unlink(JOURNAL)


def refusal() -> RefusedError:
    """Return the error to raise if a different run does not end."""
    return RefusedError(
        "another run has been placing files on this node for more than %d s: wait until that run "
        "ends, or end it, then run again" % LOCK_SECONDS
    )


def temporary(path: str) -> str:
    """
    Return a hidden temporary path in the folder of a path. Its name always has the same length.
    """
    directory, name = os.path.split(path)
    return os.path.join(directory, TEMPORARY + hashlib.sha256(os.fsencode(name)).hexdigest()[:16])


def remove_leftovers() -> None:
    """Remove the temporary files and the journal of a run that was killed."""
    try:
        with open(JOURNAL) as file:
            paths = file.read().splitlines()
    except FileNotFoundError:
        return
    for path in paths:
        if os.path.basename(path).startswith(TEMPORARY):
            remove(path)
    os.unlink(JOURNAL)


def remove(path: str) -> None:
    """Remove a file or link, if it exists."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def write_journal(paths: list[str]) -> None:
    """Write the paths of temporary files to the journal, before the files are created."""
    descriptor = os.open(JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write("".join(path + "\n" for path in paths))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(HOME)


def sync_directory(path: str) -> None:
    """Sync a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place_directory(entry: dict[str, Any]) -> None:
    """Create a directory, or set the owner and mode of an existing one."""
    path = entry["path"]
    make_parents(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    # O_NOFOLLOW is needed because otherwise, if the path is a link, its target would be changed.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchown(descriptor, *owner(entry))
        os.fchmod(descriptor, entry["mode"])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(os.path.dirname(path))


def make_parents(path: str) -> None:
    """Create the missing directories above a path, with mode 0755 and owner root."""
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        make_parents(directory)
        os.mkdir(directory)
        os.chmod(directory, 0o755)


def owner(entry: dict[str, Any]) -> tuple[int, int]:
    """Return the numeric user id and group id of an entry."""
    try:
        user = pwd.getpwnam(entry["user"]).pw_uid
    except KeyError:
        raise RefusedError("there is no user %s: declare it with `User`" % entry["user"]) from None
    try:
        return user, grp.getgrnam(entry["group"]).gr_gid
    except KeyError:
        raise RefusedError(
            "there is no group %s: declare it with `Group`" % entry["group"]
        ) from None


def place_file(entry: dict[str, Any]) -> None:
    """Write a new file and rename it to its final path, whatever state the old file has."""
    make_parents(entry["path"])
    replace(entry["path"], base64.b64decode(entry["content"]), owner(entry), entry["mode"])


def replace(path: str, content: bytes, owners: tuple[int, int], mode: int) -> None:
    """Replace a file atomically."""
    if os.path.isdir(path) and not os.path.islink(path):
        raise RefusedError("a directory is in its place: move it away")
    new = temporary(path)
    remove(new)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        # The mode must be set after the owner, because a change of owner removes set-user-ID bits.
        os.fchown(file.fileno(), *owners)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_directory(os.path.dirname(path))


def place_link(entry: dict[str, Any]) -> None:
    """Create a symbolic link. It replaces an existing file or link."""
    path, new = entry["path"], temporary(entry["path"])
    if os.path.isdir(path) and not os.path.islink(path):
        raise RefusedError("a directory is in its place: move it away")
    make_parents(path)
    remove(new)
    os.symlink(entry["target"], new)
    os.replace(new, path)
    sync_directory(os.path.dirname(path))


def place_absent(entry: dict[str, Any]) -> None:
    """Remove a file or link."""
    if os.path.isdir(entry["path"]) and not os.path.islink(entry["path"]):
        raise RefusedError("it is a directory: only files and links are removed")
    remove(entry["path"])


def place_line(entry: dict[str, Any]) -> None:
    """
    Append a line to a file that does not have it. The owner, mode and other lines do not change.
    """
    path = entry["path"]
    line = entry["line"].encode("utf-8", "surrogateescape")
    try:
        with open(path, "rb") as file:
            content = file.read()
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        make_parents(path)
        replace(path, line + b"\n", (0, 0), 0o644)
        return
    if line in content.split(b"\n"):
        return
    if content and not content.endswith(b"\n"):
        content += b"\n"
    owners = (status.st_uid, status.st_gid)
    replace(path, content + line + b"\n", owners, stat.S_IMODE(status.st_mode))


KINDS = {
    "directory": place_directory,
    "file": place_file,
    "link": place_link,
    "absent": place_absent,
    "line": place_line,
}


def main() -> None:
    """Place all entries. Report a problem as one sentence."""
    entries = PARAMETERS.get("entries", [])
    try:
        place(entries)
    except RefusedError as refused:
        sys.exit(str(refused))
    except Exception as error:
        sys.exit("%s: %s" % (HOME, reason(error)))
    print(json.dumps({"schema": 1, "placed": len(entries)}))


def reason(error: BaseException) -> str:
    """Return the error's text without the path, because the message already has the path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


if __name__ == "__main__":
    main()
