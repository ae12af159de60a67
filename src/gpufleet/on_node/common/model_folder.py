"""List a model's files on a node: all files, required files, and files changed after completion."""

from __future__ import annotations

import json
import os
from typing import BinaryIO, Iterable, Iterator, List, Tuple

MARK = ".complete"
"""The file that marks a model as complete. It is written after all other files."""
LONGEST_HEADER = 100_000_000
"""Size limit of a file's header in bytes. The reader of safetensors has the same limit."""
NOTES = ".cache/"
"""Folder with download state of the Hub's client, which older releases of gpufleet left there."""


def sizes(directory: str) -> Iterator[Tuple[str, int]]:
    """
    Yield (path of a file below a directory, its size in bytes) for each file.

    Raises `OSError` if the directory does not exist.
    """
    os.listdir(directory)
    for place, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(place, name)
            yield os.path.relpath(path, directory), os.stat(path).st_size


def shards(directory: str) -> Iterator[str]:
    """
    Yield the required files of a model that has no lock.

    The required files are its config and the files that its index lists.
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

    The function checks all files that the index lists, or the only file if there is no index. A
    file is truncated if it ends before the end of the last tensor in its header. A safetensors file
    has 8 bytes with the header's length, then the header, then the data.
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
                    found.append("%s: cut off, or not a safetensors file" % name)
        except FileNotFoundError:
            found.append("%s: missing" % name)
    return found


def _is_whole(file: BinaryIO) -> bool:
    """Return whether a safetensors file has the data of all tensors in its header."""
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
        # One second of tolerance, because some file systems store times in whole seconds.
        if os.stat(os.path.join(directory, name)).st_mtime > marked + 1:
            yield name
