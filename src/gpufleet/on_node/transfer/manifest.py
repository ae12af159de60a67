"""RUNS ON THE NODE: describe a finished directory tree by its entries and pieces.

The contents of the tree's regular files are concatenated in the order of their paths, then cut into
pieces of one size. Each piece has its SHA-256. A manifest contains the entries and the pieces. The
manifest's own SHA-256 is the name of the tree. Data from a different node are verified against the
manifest before a file is written.

A manifest may come from an attacker. So its paths must stay below the tree. Links are created last
and are never followed for writing. Of a mode, only the permission bits are used, so no file becomes
setuid or setgid. A manifest does not include the files' times, which differ between equal builds.
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

SCHEMA = 2
PIECE_BYTES = 8 << 20
# Size limit of a manifest. With 1 000 000 entries, ten times as many as a release has, it has about
# 200 MB.
MOST_BYTES = 512 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RefusedError(Exception):
    """Raised to refuse an action. Its text is a sentence for the operator."""


class Entry(NamedTuple):
    """A directory ("d"), a regular file ("f") or a symbolic link ("l") of a tree."""

    path: str
    """Path below the tree's root, with names separated by single slashes."""
    kind: str
    mode: int
    size: int
    target: str


class Part(NamedTuple):
    """The part of a piece that belongs to one file."""

    path: str
    offset: int
    length: int


class Tree:
    """A manifest that has been validated, with the position of each piece in the files."""

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
        """Return the size of a piece in bytes."""
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
        """Return the manifest as bytes. Equal trees have equal manifests on all nodes."""
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
    Read the tree below `root` and return its description.

    `leave_out` has the names at the top of the tree that are left out. `done` is called with the
    number of bytes that were read so far and the total number. Raises `RefusedError` for an entry
    that is not a directory, a file or a link, and for a file that changes while it is read.
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

    # Threads run in parallel here, because hashing and reading release the interpreter's lock.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        for number, found in enumerate(workers.map(digest, numbers)):
            tree.pieces.append(found)
            done(number * piece + tree.size(number), tree.bytes)
    return tree


def blocks(file: int, part: Part, size: int = 1 << 20) -> Iterator[bytes]:
    """
    Yield the content of a part from its open file.

    Raises `RefusedError` if the file is too short.
    """
    at, end = part.offset, part.offset + part.length
    while at < end:
        block = os.pread(file, min(size, end - at), at)
        if not block:
            raise RefusedError("%s became shorter: a different program is changing it" % part.path)
        yield block
        at += len(block)


def _entries(root: str, below: str, leave_out: Iterable[str]) -> Iterator[Entry]:
    with os.scandir(os.path.join(root, below)) as found:
        for each in found:
            if not below and each.name in leave_out:
                continue
            path = below + each.name
            status = each.stat(follow_symlinks=False)
            mode = status.st_mode & 0o777
            if stat.S_ISDIR(status.st_mode):
                yield Entry(path, "d", mode, 0, "")
                yield from _entries(root, path + "/", ())
            elif stat.S_ISREG(status.st_mode):
                yield Entry(path, "f", mode, status.st_size, "")
            elif stat.S_ISLNK(status.st_mode):
                yield Entry(path, "l", 0o777, 0, os.readlink(each.path))
            else:
                raise RefusedError("%s is not a directory, a file or a link" % each.path)


def _order(entry: Entry) -> Tuple[bytes, ...]:
    """Return the sort key of an entry. A directory sorts before its content."""
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

    Raises `RefusedError` if the manifest's SHA-256 is not `digest`, if the manifest is invalid, or
    if one of its entries is not allowed.
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
            "the manifest is from a different version of gpufleet (schema %r)" % document["schema"]
        )
    entries = [Entry(*each) for each in document["entries"]]
    directories = {""}
    before: Tuple[bytes, ...] = ()
    for each in entries:
        if flaw := _flaw(each, directories, leave_out):
            raise RefusedError("the manifest has %r: %s" % (each.path, flaw))
        order = _order(each)
        if order <= before:
            raise RefusedError("the manifest has the path %r out of order, or twice" % each.path)
        before = order
        if each.kind == "d":
            directories.add(each.path)
    piece, pieces = document["piece"], document["pieces"]
    if not _number(piece, 1 << 10, 1 << 28):
        raise RefusedError("the manifest has an invalid piece size: %r bytes" % (piece,))
    tree = Tree(entries, pieces, piece)
    whole = all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in pieces)
    if not whole or len(pieces) != -(-tree.bytes // piece) or document["bytes"] != tree.bytes:
        raise RefusedError("the manifest's pieces do not match the sizes of its files")
    return tree


def _flaw(entry: Entry, directories: Iterable[str], leave_out: Iterable[str]) -> str:
    """Return why an entry is refused, or "" if it is allowed."""
    if not isinstance(entry.path, str) or not isinstance(entry.target, str):
        return "its path is not text"
    names = entry.path.split("/")
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        return "its path is outside the tree"
    if names[0] in leave_out:
        return "this name cannot be part of a tree"
    if "/".join(names[:-1]) not in directories:
        return "its directory is not part of the tree"
    if entry.kind not in ("d", "f", "l"):
        return "it is not a directory, a file or a link"
    if not _number(entry.mode, 0, 0o777):
        return "its mode has bits other than permission bits"
    if not _number(entry.size, 0, 1 << 50) or (entry.kind != "f" and entry.size):
        return "its size is invalid"
    if (entry.kind == "l") != bool(entry.target) or "\0" in entry.target:
        return "its target is invalid"
    return ""


def _number(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
