"""RUNS ON THE NODE: describe a finished directory tree by its entries and pieces.

The contents of its regular files, concatenated in the order of their paths, are cut into pieces of
one size, each with its SHA-256. A manifest contains the entries and pieces, and its own SHA-256 is
the tree's name. Data from another node is verified against the manifest before a file is written.

A manifest may be hostile. Its paths stay below the tree, links are created last and never followed
for writing, and only permission bits of modes are used: no setuid or setgid. A manifest includes
times, because Python checks compiled bytecode by its source's time.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import hashlib
import json
import os
import re
import stat
import zlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

SCHEMA = 1
PIECE_BYTES = 8 << 20
# A manifest of 1 000 000 entries, ten times a release's, has about 200 MB.
MOST_BYTES = 512 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RefusedError(Exception):
    """A refusal; its text is a sentence for the operator."""


class Entry(NamedTuple):
    """A directory ("d"), a regular file ("f") or a symbolic link ("l") of a tree."""

    path: str
    """Path below the tree's root, with names separated by single slashes."""
    kind: str
    mode: int
    size: int
    time: int
    """Time of the last change in nanoseconds since 1970."""
    target: str


class Part(NamedTuple):
    """The part of a piece that is in one file."""

    path: str
    offset: int
    length: int


class Tree:
    """A validated manifest, with the position of each piece in the files."""

    def __init__(self, entries: List[Entry], pieces: List[str], piece: int) -> None:
        self.entries = entries
        self.pieces = pieces
        self.piece = piece
        self._files = [each for each in entries if each.kind == "f" and each.size]
        self._starts = []
        end = 0
        for each in self._files:
            self._starts.append(end)
            end += each.size
        self.bytes = end

    def size(self, number: int) -> int:
        """Return the bytes of a piece."""
        return min(self.piece, self.bytes - number * self.piece)

    def parts(self, number: int) -> Iterator[Part]:
        """Yield a piece's parts, in order."""
        position, left = number * self.piece, self.size(number)
        at = bisect.bisect_right(self._starts, position) - 1
        while left:
            each, offset = self._files[at], position - self._starts[at]
            count = min(left, each.size - offset)
            yield Part(each.path, offset, count)
            position, left, at = position + count, left - count, at + 1

    def manifest(self) -> bytes:
        """Return the manifest as text; equal trees have equal texts on all nodes."""
        document = {
            "schema": SCHEMA,
            "piece": self.piece,
            "bytes": self.bytes,
            "entries": [list(each) for each in self.entries],
            "pieces": self.pieces,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


def describe_tree(
    root: str,
    leave_out: Iterable[str] = (),
    piece: int = PIECE_BYTES,
    done: Callable[[int, int], None] = lambda _done, _total: None,
) -> Tree:
    """
    Read the tree below `root`; `leave_out` has excluded names at its top.

    `done` receives the bytes read so far and the total. Raises `RefusedError` for anything but
    directories, files and links, and for files that change meanwhile.
    """
    entries = sorted(_entries(root, "", frozenset(leave_out)), key=_order)
    tree = Tree(entries, [], piece)
    numbers = range(-(-tree.bytes // piece))

    def digest(number: int) -> str:
        found = hashlib.sha256()
        for part in tree.parts(number):
            with open(os.path.join(root, part.path), "rb", buffering=0) as file:
                for block in blocks(file.fileno(), part):
                    found.update(block)
        return found.hexdigest()

    # Hashing and reading leave the interpreter to others.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        for number, found in enumerate(workers.map(digest, numbers)):
            tree.pieces.append(found)
            done(number * piece + tree.size(number), tree.bytes)
    return tree


def blocks(file: int, part: Part, size: int = 1 << 20) -> Iterator[bytes]:
    """Yield a part's content from its open file. Raises `RefusedError` if the file is too short."""
    at, end = part.offset, part.offset + part.length
    while at < end:
        block = os.pread(file, min(size, end - at), at)
        if not block:
            raise RefusedError("%s became shorter: another program is changing it" % part.path)
        yield block
        at += len(block)


def _entries(root: str, below: str, leave_out: Iterable[str]) -> Iterator[Entry]:
    with os.scandir(os.path.join(root, below)) as found:
        for each in found:
            if not below and each.name in leave_out:
                continue
            path = below + each.name
            status = each.stat(follow_symlinks=False)
            mode, time = status.st_mode & 0o777, status.st_mtime_ns
            if stat.S_ISDIR(status.st_mode):
                yield Entry(path, "d", mode, 0, time, "")
                yield from _entries(root, path + "/", ())
            elif stat.S_ISREG(status.st_mode):
                yield Entry(path, "f", mode, status.st_size, time, "")
            elif stat.S_ISLNK(status.st_mode):
                yield Entry(path, "l", 0o777, 0, 0, os.readlink(each.path))
            else:
                raise RefusedError("%s is neither directory, file nor link" % each.path)


def _order(entry: Entry) -> Tuple[bytes, ...]:
    """Return the sort key of an entry, which puts a directory before its content."""
    return tuple(os.fsencode(name) for name in entry.path.split("/"))


def pack(manifest: bytes) -> bytes:
    """Compress a manifest for transfer and storage."""
    return zlib.compress(manifest, 1)


def unpack_manifest(data: bytes) -> bytes:
    """Unpack a manifest. Raises `RefusedError` if it is invalid or too large."""
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise RefusedError("the manifest cannot be unpacked: %s" % error) from None
    if not reader.eof:
        raise RefusedError("the manifest is incomplete, or is larger than %d bytes" % MOST_BYTES)
    return found


def parse_manifest(manifest: bytes, digest: str, leave_out: Iterable[str] = ()) -> Tree:
    """
    Return the tree that a manifest describes.

    Raises `RefusedError` if it differs from `digest`, is invalid, or has an entry that is refused.
    """
    if hashlib.sha256(manifest).hexdigest() != digest:
        raise RefusedError("the manifest differs from the source's description")
    try:
        document = json.loads(manifest.decode("ascii"))
        return _judged(document, frozenset(leave_out))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RefusedError(
            "the manifest is invalid: %s: %s" % (type(error).__name__, error)
        ) from None


def _judged(document: Dict[str, Any], leave_out: Iterable[str]) -> Tree:
    if document["schema"] != SCHEMA:
        raise RefusedError(
            "the manifest is from another version of gpufleet (schema %r)" % document["schema"]
        )
    entries = [Entry(*each) for each in document["entries"]]
    directories = {""}
    before: Tuple[bytes, ...] = ()
    for each in entries:
        if flaw := _flaw(each, directories, leave_out):
            raise RefusedError("the manifest has %r: %s" % (each.path, flaw))
        order = _order(each)
        if order <= before:
            raise RefusedError("the manifest has %r out of order, or twice" % each.path)
        before = order
        if each.kind == "d":
            directories.add(each.path)
    piece, pieces = document["piece"], document["pieces"]
    if not _number(piece, 1 << 10, 1 << 28):
        raise RefusedError("the manifest has an invalid piece size: %r bytes" % (piece,))
    tree = Tree(entries, pieces, piece)
    whole = all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in pieces)
    if not whole or len(pieces) != -(-tree.bytes // piece) or document["bytes"] != tree.bytes:
        raise RefusedError("the manifest's pieces do not fit its files")
    return tree


def _flaw(entry: Entry, directories: Iterable[str], leave_out: Iterable[str]) -> str:
    """Return why an entry is refused, or "" if it is allowed."""
    if not isinstance(entry.path, str) or not isinstance(entry.target, str):
        return "its path is not text"
    names = entry.path.split("/")
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        return "its path leads out of the tree"
    if names[0] in leave_out:
        return "this name cannot be part of a tree"
    if "/".join(names[:-1]) not in directories:
        return "it is not in a directory of the tree"
    if entry.kind not in ("d", "f", "l"):
        return "it is neither directory, file nor link"
    if not _number(entry.mode, 0, 0o777):
        return "its mode has more than permission bits"
    if not _number(entry.size, 0, 1 << 50) or (entry.kind != "f" and entry.size):
        return "its size is invalid"
    if not _number(entry.time, -(1 << 62), 1 << 62):
        return "its time is invalid"
    if (entry.kind == "l") != bool(entry.target) or "\0" in entry.target:
        return "its target is invalid"
    return ""


def _number(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
