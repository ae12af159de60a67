"""The one exception written for operators.

Its text reaches a terminal as it is, so every problem is a whole sentence: what was found, why it
is wrong, what to do; with the file and the key where there is one.
"""

from __future__ import annotations


class FleetError(Exception):
    """Something the operator can put right; carries every problem found, not just the first.

    `problems` are the sentences in the order found; `str()` is one problem a line.
    """

    def __init__(self, *problems: str) -> None:
        if not problems:
            raise ValueError("a FleetError needs at least one problem")
        self.problems: tuple[str, ...] = problems
        super().__init__("\n".join(problems))


class NotKnownError(FleetError):
    """Something that may well be right, but that gpufleet cannot judge."""
