"""RUNS ON THE NODE: verify a model's files against the Hub's hashes in its lock."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import stat
from typing import Dict, Iterator, List, Tuple

from gpufleet.on_node.common.model_folder import MARK, NOTES
from gpufleet.on_node.transfer.manifest import RefusedError

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 1 << 20


def hold_to_lock(folder: int, shown: str, files: Dict[str, List[str]]) -> None:
    """
    Raise `RefusedError` unless an open folder has exactly these files with these hashes.

    `files` is {path: [algorithm, digest in hex]}, where the algorithm is `sha256` or `git`.
    """
    there = {name for name in _names(folder, "") if name != MARK and not name.startswith(NOTES)}
    for names, problem in (
        (sorted(files.keys() - there), "is missing, but it is in the model lock"),
        (sorted(there - files.keys()), "is not in the model lock"),
    ):
        if names:
            raise RefusedError("%s/%s %s" % (shown, names[0], problem))

    def differs(each: Tuple[str, List[str]]) -> str:
        name, (algorithm, digest) = each
        found = hash_file(folder, name, algorithm)
        return (
            ""
            if found == digest
            else "%s/%s has the %s hash %s, but the lock has %s"
            % (
                shown,
                name,
                algorithm,
                found,
                digest,
            )
        )

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        wrong = [said for said in workers.map(differs, sorted(files.items())) if said]
    if wrong:
        raise RefusedError("%s, which `gpufleet lock --models` has recorded" % wrong[0])


def hash_file(folder: int, name: str, algorithm: str) -> str:
    file = os.open(name, _FILE, dir_fd=folder)
    try:
        if algorithm == "git":
            found = hashlib.sha1(b"blob %d\0" % os.fstat(file).st_size)
        else:
            found = hashlib.sha256()
        while True:
            block = os.read(file, _BLOCK)
            if not block:
                return found.hexdigest()
            found.update(block)
    finally:
        os.close(file)


def _names(folder: int, below: str) -> Iterator[str]:
    """Yield the paths of all entries except directories."""
    for name in os.listdir(folder):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            yield below + name
            continue
        inner = os.open(name, _FOLDER, dir_fd=folder)
        try:
            yield from _names(inner, below + name + "/")
        finally:
            os.close(inner)
