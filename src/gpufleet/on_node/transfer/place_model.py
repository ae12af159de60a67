"""RUNS ON THE NODE, as root: move a model that the service user has downloaded to its final path.

An adapter in a folder of the node is handled in the same way.

Takes (`PARAMETERS`) an `action`:
  begin   create the folder for a download; complete a move that was interrupted
  place   move the downloaded model to its final path, and mark it as complete
  copy    copy an adapter's two files, check the weights' hash, and mark the copy as complete
  own     change the owner of a folder of models and of everything in it from the service user to
          root
and
  directory   final path of the model; for `own`: the folder of all models
  mark        for `begin` and `place`: the file in the folder that marks the model as complete
  user        for `begin`: the user that downloads
  source, sha256   for `copy`: the folder with the adapter, and the hash of its weights
  files       for `begin` and `place`: the hashes that the model's files must have
              (gpufleet.artifacts.model_lock); null: the hashes are not checked
Prints one JSON document {"schema": 1}. On a problem, it prints one sentence on stderr and exits
with status 1.

    <parent>/<name>/                      owner root, every user can read it
    <parent>/.gpufleet-download-<name>/   mode 0700, owner is the user that downloads
      files/, home/                       the model; the home directory of the Hub's client
    <parent>/<name>.boot                  id of the boot in which the download was begun

Root owns the parent. The content of the download's folder may come from an attacker. So root takes
ownership before it reads the folder's names, and links are never followed. Entries that are not
files or directories are refused, and so is a file that a program still writes. The program needs
only Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from typing import Any, Callable, Dict, Optional, Tuple

from gpufleet.on_node.transfer.manifest import RefusedError
from gpufleet.on_node.transfer.model_hashes import hash_file, hold_to_lock
from gpufleet.on_node.transfer.store import SYNC_SECONDS, open_folder

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

PREFIX = ".gpufleet-download-"
GONE = ".gpufleet-gone-"
WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = ("adapter_config.json", WEIGHTS)
BOOT = "/proc/sys/kernel/random/boot_id"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK is needed because opening a pipe would wait for its other end.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def main() -> None:
    """Run the requested action. Report a problem as one sentence."""
    try:
        {"begin": begin, "place": place, "copy": copy, "own": chown_models}[PARAMETERS["action"]](
            PARAMETERS
        )
    except RefusedError as refused:
        sys.exit(str(refused))
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit("%s: %s" % (PARAMETERS["directory"], error))
    print(json.dumps({"schema": 1}))


def begin(given: Dict[str, Any]) -> None:
    """
    Create the folder for a download, or reuse the folder of an interrupted download.

    After a reboot, the download starts again from nothing. A power cut may leave files without
    their content, and a resumed download would treat these files as complete.
    """
    if os.path.exists(given["mark"]):
        return
    parent, name = _parent(given["directory"])
    account = pwd.getpwnam(given["user"])
    with open(BOOT, "rb") as file:
        boot = file.read()
    owner = _owner(PREFIX + name, parent)
    if _noted(name + ".boot", parent) != boot or owner not in (os.geteuid(), account.pw_uid):
        _remove(given["directory"], PREFIX + name)
        owner = None
    _note(name + ".boot", parent, boot)
    if owner is None:
        os.mkdir(PREFIX + name, 0o700, dir_fd=parent)
        folder = os.open(PREFIX + name, _FOLDER, dir_fd=parent)
        for each in ("files", "home"):
            os.mkdir(each, 0o700, dir_fd=folder)
            os.chown(each, account.pw_uid, account.pw_gid, dir_fd=folder, follow_symlinks=False)
        os.fchown(folder, account.pw_uid, account.pw_gid)
    elif owner != account.pw_uid:
        # Root owns the folder, so the download was complete when the interrupted `place` began.
        place(given)


def place(given: Dict[str, Any]) -> None:
    """Move the download to its final path, and mark it as complete."""
    if os.path.exists(given["mark"]):
        return
    parent, name = _parent(given["directory"])
    folder = os.open(PREFIX + name, _FOLDER, dir_fd=parent)
    os.fchown(folder, os.geteuid(), os.getegid())
    os.fchmod(folder, 0o700)
    files = os.open("files", _FOLDER, dir_fd=folder)
    _seal(files, given["directory"])
    # The Hub's client stores the state of a download in this folder.
    _remove(given["directory"], PREFIX + name + "/files/.cache")
    _remove(given["directory"], PREFIX + name + "/home")
    if given["files"] is not None:
        try:
            hold_to_lock(files, given["directory"], given["files"])
        except RefusedError:
            # If the download were resumed with these files, it would fail here again.
            _remove(given["directory"], PREFIX + name)
            raise
    _finish(given, parent, folder, files)


def copy(given: Dict[str, Any]) -> None:
    """
    Copy an adapter's two files to their final path. Raises `RefusedError` if the hash is wrong.
    """
    if os.path.exists(given["mark"]):
        return
    parent, name = _parent(given["directory"])
    _remove(given["directory"], PREFIX + name)
    os.mkdir(PREFIX + name, 0o700, dir_fd=parent)
    folder = os.open(PREFIX + name, _FOLDER, dir_fd=parent)
    os.mkdir("files", 0o755, dir_fd=folder)
    files = os.open("files", _FOLDER, dir_fd=folder)
    os.fchmod(files, 0o755)
    source = os.open(given["source"], _FOLDER)
    try:
        for each in ADAPTER_FILES:
            _copy_file(source, files, each, given["source"])
    finally:
        os.close(source)
    found = hash_file(files, WEIGHTS, "sha256")
    if found != given["sha256"]:
        _remove(given["directory"], PREFIX + name)
        raise RefusedError(
            "%s/%s has the SHA-256 %s, but `sha256` of the adapter is %s: put the right files "
            "there, or correct `sha256`" % (given["source"], WEIGHTS, found, given["sha256"])
        )
    _finish(given, parent, folder, files)


def _copy_file(source: int, target: int, name: str, shown: str) -> None:
    try:
        given = os.open(name, _FILE, dir_fd=source)
    except OSError as error:
        raise RefusedError(
            "%s/%s cannot be read (%s): an adapter must have %s there as a file, not a link"
            % (shown, name, error.strerror, " and ".join(ADAPTER_FILES))
        ) from None
    if not stat.S_ISREG(os.fstat(given).st_mode):
        os.close(given)
        raise RefusedError("%s/%s is not a file" % (shown, name))
    new = os.open(name, _NEW, 0o644, dir_fd=target)
    os.fchmod(new, 0o644)
    with os.fdopen(given, "rb") as file, os.fdopen(new, "wb") as copied:
        shutil.copyfileobj(file, copied, 1 << 20)


def _finish(given: Dict[str, Any], parent: int, folder: int, files: int) -> None:
    """Sync files to disk, mark them as complete, and move them to their final path."""
    name = os.path.basename(given["directory"])
    _sync(files)
    os.close(os.open(os.path.basename(given["mark"]), _NEW, 0o644, dir_fd=files))
    _sync(files)
    # Older releases of gpufleet downloaded directly to the final path. Remove such an unfinished
    # download.
    _remove(given["directory"], GONE + name)
    with contextlib.suppress(FileNotFoundError):
        os.rename(name, GONE + name, src_dir_fd=parent, dst_dir_fd=parent)
    os.rename("files", name, src_dir_fd=folder, dst_dir_fd=parent)
    os.fsync(parent)
    for each in (PREFIX + name, GONE + name, name + ".boot"):
        _remove(given["directory"], each)


def chown_models(given: Dict[str, Any]) -> None:
    """
    Make root the owner of the models' folder and its content. Readable files stay readable.

    The group of the folder itself is changed last, so it shows that the change is complete.
    """
    above, name = os.path.split(given["directory"])
    state = open_folder(above)
    os.fchown(state, os.geteuid(), os.getegid())
    models = os.open(name, _FOLDER, dir_fd=state)
    os.fchown(models, os.geteuid(), -1)
    os.fchmod(models, 0o755)
    _walk(models, given["directory"], _take)
    os.fchown(models, os.geteuid(), os.getegid())
    os.fsync(models)


def _seal(folder: int, shown: str) -> None:
    os.fchown(folder, os.geteuid(), os.getegid())
    os.fchmod(folder, 0o755)
    _walk(folder, shown, _seal_entry)


def _seal_entry(folder: int, name: str, status: os.stat_result, shown: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RefusedError("%s in the download is not a file (is it a link?)" % shown)
    file = os.open(name, _FILE, dir_fd=folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise RefusedError("%s in the download has more than one hard link" % shown)
        os.fchown(file, os.geteuid(), os.getegid())
        os.fchmod(file, 0o644)
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            # Any other error means that the file system has no leases.
            if error.errno == errno.EAGAIN:
                raise RefusedError(
                    "%s: a program is still writing this file: wait, then deploy again" % shown
                ) from None
    finally:
        os.close(file)


def _take(folder: int, name: str, status: os.stat_result, _shown: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        os.chown(name, os.geteuid(), os.getegid(), dir_fd=folder, follow_symlinks=False)
        return
    with contextlib.suppress(OSError):  # the entry was just removed
        file = os.open(name, _FILE, dir_fd=folder)
        try:
            if os.fstat(file).st_uid != 0:
                os.fchown(file, os.geteuid(), os.getegid())
                os.fchmod(file, 0o755 if os.fstat(file).st_mode & stat.S_IXUSR else 0o644)
        finally:
            os.close(file)


def _walk(folder: int, shown: str, visit: Callable[[int, str, os.stat_result, str], None]) -> None:
    """Make root the owner of every directory below an open directory. Visit all other entries."""
    for name in sorted(os.listdir(folder)):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        path = "%s/%s" % (shown, name)
        if not stat.S_ISDIR(status.st_mode):
            visit(folder, name, status, path)
            continue
        inner = os.open(name, _FOLDER, dir_fd=folder)
        try:
            os.fchown(inner, os.geteuid(), os.getegid())
            os.fchmod(inner, 0o755)
            _walk(inner, path, visit)
        finally:
            os.close(inner)


def _parent(directory: str) -> Tuple[int, str]:
    """
    Return a descriptor of a model's parent folder, and the model's name.

    If the parent folder does not exist, it is created.
    """
    path, name = os.path.split(directory)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        os.chmod(path, 0o755)
    parent = open_folder(path)
    status = os.fstat(parent)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise RefusedError(
            "%s must belong to root and be writable only by root: chown root %s; chmod 755 %s"
            % ((path,) * 3)
        )
    return parent, name


def _owner(name: str, folder: int) -> Optional[int]:
    """Return a directory's owner, None if it is missing, or -1 if it is not a directory."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) else -1


def _noted(name: str, folder: int) -> bytes:
    try:
        file = os.open(name, _FILE, dir_fd=folder)
    except OSError:
        return b""
    try:
        return os.read(file, 64)
    finally:
        os.close(file)


def _note(name: str, folder: int, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    file = os.open(name, _NEW, 0o644, dir_fd=folder)
    try:
        os.write(file, content)
        os.fsync(file)
    finally:
        os.close(file)


def _remove(directory: str, name: str) -> None:
    """
    Remove an entry in the model's parent folder, with its content, if the entry exists.

    This is safe because root owns all folders above the entry, and shutil uses file descriptors to
    enter folders.
    """
    path = os.path.join(os.path.dirname(directory), name)
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _sync(folder: int) -> None:
    subprocess.run(
        ["sync", "-f", "/proc/self/fd/%d" % folder],
        pass_fds=[folder],
        stdin=subprocess.DEVNULL,
        timeout=SYNC_SECONDS,
        check=True,
    )


if __name__ == "__main__":
    main()
