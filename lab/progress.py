"""Report long steps and their duration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]


def silent(_line: str) -> None:
    """Print no line, for callers without a terminal."""


@contextmanager
def step(what: str, say: Say) -> Iterator[None]:
    """Announce a long step, and report its seconds when it is done."""
    say(f"{what} ...")
    begin = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - begin:.1f} s")
