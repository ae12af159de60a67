"""Store the words of a command line with their positions, so that notes can be sorted by them.
Leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FIRST, LAST = -1, 1 << 30
"""The positions of notes that come before or after all notes about words."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Arguments of a command line, each with its position in the original line."""

    words: tuple[str, ...]
    places: tuple[int, ...]

    def without(self, gone: Iterable[int]) -> Placed:
        """Return the line without the words at these indices."""
        gone = set(gone)
        kept = [at for at in range(len(self.words)) if at not in gone]
        return Placed(tuple(self.words[at] for at in kept), tuple(self.places[at] for at in kept))

    def replaced(self, gone: Iterable[int], new: Sequence[str]) -> Placed:
        """Return the line after `new` has replaced the words at these indices."""
        gone = set(gone)
        start = min(gone)
        before = self.without(range(start, len(self.words)))
        after = self.without({*range(start), *gone})
        place = self.places[start]
        return Placed(
            (*before.words, *new, *after.words),
            (*before.places, *(place for _ in new), *after.places),
        )

    def place(self, indices: Iterable[int]) -> int:
        """Return the first of the original positions of the words at these indices."""
        return min((self.places[at] for at in indices), default=LAST)


def placed(words: Sequence[str]) -> Placed:
    """Return the words of an original line with their positions."""
    return Placed(tuple(words), tuple(range(len(words))))
