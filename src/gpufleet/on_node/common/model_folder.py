"""A model's folder on a node: its files, the required ones, and those changed since completion."""

from __future__ import annotations

import json
import os
from typing import Iterable, Iterator, Tuple

MARK = ".complete"
"""The file that marks a model as complete, written after all others."""
NOTES = ".cache/"
"""What the Hub's client notes of a download; older releases of gpufleet left it there."""


def sizes(directory: str) -> Iterator[Tuple[str, int]]:
    """Yield each file below a directory with its bytes; raises `OSError` if it is not there."""
    os.listdir(directory)
    for place, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(place, name)
            yield os.path.relpath(path, directory), os.stat(path).st_size


def shards(directory: str) -> Iterator[str]:
    """Yield the required files of a model without a lock: its config, and those of its index."""
    yield "config.json"
    try:
        with open(
            os.path.join(directory, "model.safetensors.index.json"), encoding="utf-8"
        ) as file:
            yield from {str(each) for each in json.load(file)["weight_map"].values()}
    except FileNotFoundError:
        return


def changed_files(directory: str, names: Iterable[str]) -> Iterator[str]:
    """Yield those of the files that were written after the model was marked as complete."""
    marked = os.stat(os.path.join(directory, MARK)).st_mtime
    for name in sorted(names):
        # A second for file systems that count no parts of one.
        if os.stat(os.path.join(directory, name)).st_mtime > marked + 1:
            yield name
