"""A model's folder on a node: all files, required files, and files changed since completion."""

from __future__ import annotations

import json
import os
from typing import BinaryIO, Iterable, Iterator, List, Tuple

MARK = ".complete"
"""The file that marks a model as complete, written after all others."""
LONGEST_HEADER = 100_000_000
"""Bytes of the largest accepted header; safetensors' own reader has the same limit."""
NOTES = ".cache/"
"""Download state of the Hub's client; older releases of gpufleet left it there."""


def sizes(directory: str) -> Iterator[Tuple[str, int]]:
    """
    Yield each file below a directory with its size in bytes. Raises `OSError` if it is missing.
    """
    os.listdir(directory)
    for place, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(place, name)
            yield os.path.relpath(path, directory), os.stat(path).st_size


def shards(directory: str) -> Iterator[str]:
    """
    Yield the required files of a model without a lock: its config, and the files of its index.
    """
    yield "config.json"
    try:
        with open(
            os.path.join(directory, "model.safetensors.index.json"), encoding="utf-8"
        ) as file:
            yield from {str(each) for each in json.load(file)["weight_map"].values()}
    except FileNotFoundError:
        return


def lost_weights(directory: str) -> List[str]:
    """
    Return the tensor files that cannot be loaded, each as `name: reason`.

    The files of the index, or the only file, are checked. A file is truncated if it ends before the
    last tensor in its header (format of safetensors: 8 bytes of the header's length, the header,
    data).
    """
    try:
        path = os.path.join(directory, "model.safetensors.index.json")
        with open(path, encoding="utf-8") as file:
            names = sorted({str(each) for each in json.load(file)["weight_map"].values()})
    except FileNotFoundError:
        names = ["model.safetensors"]
        if not os.path.exists(os.path.join(directory, names[0])):
            return []
    found = []
    for name in names:
        try:
            with open(os.path.join(directory, name), "rb") as opened:
                if not _is_whole(opened):
                    found.append("%s: cut off, or no safetensors file" % name)
        except FileNotFoundError:
            found.append("%s: missing" % name)
    return found


def _is_whole(file: BinaryIO) -> bool:
    """Return whether a safetensors file has all tensors of its header."""
    size = os.fstat(file.fileno()).st_size
    header = int.from_bytes(file.read(8), "little")
    if not 2 <= header <= min(size - 8, LONGEST_HEADER):
        return False
    tensors = json.loads(file.read(header))
    ends = [each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__"]
    return size >= 8 + header + max(ends, default=0)


def changed_files(directory: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the files that were written after the model was marked as complete."""
    marked = os.stat(os.path.join(directory, MARK)).st_mtime
    for name in sorted(names):
        # A second for file systems that count no parts of one.
        if os.stat(os.path.join(directory, name)).st_mtime > marked + 1:
            yield name
