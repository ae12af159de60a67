"""RUNS ON THE NODE: assemble a tree from pieces in a folder next to its final path.

    <parent>/.gpufleet-coming-<name>/     mode 0700, owner is the running user; it is on the same
                                          file system as the final path
      tree/...                            the files, to which pieces are written as they arrive
      have                                numbers of the pieces that were written; this is a hint
                                          and not a proof

A piece counts only after its SHA-256 was verified. Pieces of an interrupted run are read and
verified again. At the end, everything is synced to disk, then renamed to its final path, and only
then marked as complete. Everything is opened relative to the directory's descriptor, and links are
not followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from typing import Callable, Dict, List, Optional, Set

from gpufleet.on_node.common import file_lock
from gpufleet.on_node.transfer.manifest import Entry, Part, RefusedError, Tree, blocks
from gpufleet.on_node.transfer.model_hashes import hold_to_lock

PREFIX = ".gpufleet-coming-"
# Space that must stay free on a file system after the copy. Logs and locks need 1 GiB.
SPARE_BYTES = 1 << 30
# Deadline of `sync -f`. It writes the data of some minutes to a disk that other programs use too.
SYNC_SECONDS = 1800
_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Files:
    """The files of a tree in an open directory, which are read in pieces."""

    def __init__(self, tree: Tree, folder: int) -> None:
        self.tree = tree
        self.folder = folder

    def open(self, path: str) -> int:
        """Return a descriptor of one of the tree's files."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.folder)

    def holds(self, number: int) -> bool:
        """Return whether a piece on disk matches the manifest."""
        found = hashlib.sha256()
        try:
            for part in self.tree.parts(number):
                file = self.open(part.path)
                try:
                    for block in blocks(file, part):
                        found.update(block)
                finally:
                    os.close(file)
        except (OSError, RefusedError):
            return False
        return found.hexdigest() == self.tree.pieces[number]


def open_folder(directory: str) -> int:
    """Return a descriptor of a directory. Raises `OSError` if the path is a link."""
    return os.open(directory, _FOLDER)


class IncomingTree:
    """A directory in which a tree is assembled, by one process at a time."""

    def __init__(self, directory: str, mark: str) -> None:
        """
        Lock the folder.

        Raises `RefusedError` if the folder is locked or was not made by gpufleet.
        """
        self.directory, self.mark = directory, mark
        parent, self.name = os.path.split(directory)
        # The folder of a model's revisions does not exist before the first revision is copied.
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent)
            os.chmod(parent, 0o755)
        self.parent = open_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(PREFIX + self.name, 0o700, dir_fd=self.parent)
        self.folder = os.open(PREFIX + self.name, _FOLDER, dir_fd=self.parent)
        status = os.fstat(self.folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise RefusedError(
                "%s/%s%s was not made by gpufleet: remove it" % (parent, PREFIX, self.name)
            )
        refusal = "%s is already being copied to this node: wait until that copy ends" % directory
        file_lock.lock(self.folder, 0, lambda: RefusedError(refusal))
        with contextlib.suppress(FileExistsError):
            os.mkdir("tree", 0o700, dir_fd=self.folder)
        self.root = os.open("tree", _FOLDER, dir_fd=self.folder)
        self._have = os.open(
            "have", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600, dir_fd=self.folder
        )

    def prepare(self, tree: Tree) -> None:
        """
        Create the tree's directories. Remove entries of earlier runs that are not in this tree.
        """
        self.tree = tree
        self.files = Files(tree, self.root)
        wanted = {each.path: each for each in tree.entries}
        self._clear("", self.root, wanted)
        for each in tree.entries:
            if each.kind == "d":
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each.path, 0o700, dir_fd=self.root)
            elif each.kind == "f" and not each.size:
                os.close(os.open(each.path, _NEW, 0o600, dir_fd=self.root))

    def find_kept_pieces(self, found: Callable[[int], None]) -> None:
        """Call `found` with the number of each complete piece of an earlier run."""
        noted = {int(each) for each in os.pread(self._have, 1 << 26, 0).split() if each.isdigit()}
        for number in sorted(noted):
            if number < len(self.tree.pieces) and self.files.holds(number):
                found(number)

    def require_space(self, have: Set[int]) -> None:
        """Raise `RefusedError` if the file system has no space for the missing pieces."""
        missing = sum(
            self.tree.size(number) for number in range(len(self.tree.pieces)) if number not in have
        )
        status = os.fstatvfs(self.root)
        free = status.f_bavail * status.f_frsize
        if free < missing + SPARE_BYTES:
            raise RefusedError(
                "%.1f GiB are free for %s, which needs %.1f GiB (1 GiB stays free): "
                "free space" % (free / 2**30, self.directory, missing / 2**30)
            )

    def write(self, number: int, data: memoryview) -> None:
        """Write a verified piece to its files."""
        at = 0
        for part in self.tree.parts(number):
            file = os.open(part.path, _NEW, 0o600, dir_fd=self.root)
            try:
                _put(file, data[at : at + part.length], part)
            finally:
                os.close(file)
            at += part.length
        os.write(self._have, b"%d\n" % number)

    def finish(self, remove: List[str], files: Optional[Dict[str, List[str]]] = None) -> None:
        """
        Sync the whole tree to disk, move it to its final path, mark it as complete, and remove
        leftovers.

        Raises `RefusedError` if a model has links or differs from the `files` of its lock.
        """
        for each in self.tree.entries:
            if each.kind == "f":
                self._finish_file(each)
        if files is not None:
            if any(each.kind == "l" for each in self.tree.entries):
                raise RefusedError("%s has links, which a model must not have" % self.directory)
            hold_to_lock(self.root, self.directory, files)
        for each in self.tree.entries:
            if each.kind == "l":
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each.path, dir_fd=self.root)
                os.symlink(each.target, each.path, dir_fd=self.root)
        for each in reversed(self.tree.entries):
            if each.kind == "d":
                self._finish_folder(os.open(each.path, _FOLDER, dir_fd=self.root), each.mode)
        self._finish_folder(os.dup(self.root), 0o755)
        self._sync()
        aside = ".gpufleet-gone-" + self.name
        _remove(os.path.join(os.path.dirname(self.directory), aside))
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.name, aside, src_dir_fd=self.parent, dst_dir_fd=self.parent)
        os.rename("tree", self.name, src_dir_fd=self.folder, dst_dir_fd=self.parent)
        self._sync()
        os.close(os.open(os.path.relpath(self.mark, self.directory), _NEW, 0o644, dir_fd=self.root))
        self._sync()
        parent = os.path.dirname(self.directory)
        for path in (
            *remove,
            os.path.join(parent, aside),
            os.path.join(parent, PREFIX + self.name),
        ):
            _remove(path)

    def _finish_file(self, entry: Entry) -> None:
        file = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.root)
        try:
            os.ftruncate(file, entry.size)
            os.fchmod(file, entry.mode)
        finally:
            os.close(file)

    def _finish_folder(self, folder: int, mode: int) -> None:
        try:
            os.fchmod(folder, mode)
        finally:
            os.close(folder)

    def _sync(self) -> None:
        # Sync the whole file system, because syncing tens of thousands of single files would take
        # minutes.
        subprocess.run(
            ["sync", "-f", "/proc/self/fd/%d" % self.root],
            pass_fds=[self.root],
            stdin=subprocess.DEVNULL,
            timeout=SYNC_SECONDS,
            check=True,
        )

    def _clear(self, below: str, folder: int, wanted: Dict[str, Entry]) -> None:
        """
        Remove the entries whose kind differs from the kind in the tree.

        Links are always removed and created again.
        """
        with os.scandir(folder) as found:
            there = [(each.name, each.is_dir(follow_symlinks=False)) for each in found]
        for name, is_folder in there:
            entry = wanted.get(below + name)
            kind = entry.kind if entry else ""
            if not is_folder and kind != "f":
                os.unlink(name, dir_fd=folder)
            elif not is_folder:
                with contextlib.suppress(OSError):  # opening a link fails, so the link is removed
                    os.close(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder))
                    continue
                os.unlink(name, dir_fd=folder)
            else:
                inner = os.open(name, _FOLDER, dir_fd=folder)
                try:
                    os.fchmod(inner, 0o700)
                    self._clear(below + name + "/", inner, wanted)
                finally:
                    os.close(inner)
                if kind != "d":
                    os.rmdir(name, dir_fd=folder)


def _put(file: int, data: memoryview, part: Part) -> None:
    written = 0
    while written < part.length:
        written += os.pwrite(file, data[written:], part.offset + written)


def _remove(path: str) -> None:
    """Remove a file, or a directory with its content, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
