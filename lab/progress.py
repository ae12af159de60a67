"""Tell the person who waits what is being done and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]


def silent(_line: str) -> None:
    """Say nothing: for callers that are not a terminal."""


@contextmanager
def step(what: str, say: Say) -> Iterator[None]:
    """Announce a step that may take long, and its seconds when it is done."""
    say(f"{what} ...")
    begin = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - begin:.1f} s")
