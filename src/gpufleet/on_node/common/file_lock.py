"""RUNS ON THE NODE: wait for the lock of a file.

The kernel releases the lock when the process that holds it ends or is killed. This module uses only
Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import Any, Callable, Iterator

POLL_SECONDS = 0.1


def lock(
    descriptor: int,
    seconds: float,
    refusal: Callable[[], Exception],
    how: int = fcntl.LOCK_EX,
    call: Callable[[int, int], Any] = fcntl.flock,
) -> None:
    """
    Lock an open file. If the lock is not free in time, raise the exception that `refusal` returns.

    `call` is `fcntl.flock` or `fcntl.lockf`. A lock of `fcntl.lockf` shows its holder's PID.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            call(descriptor, how | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise refusal() from None
            time.sleep(POLL_SECONDS)
        else:
            return


@contextlib.contextmanager
def hold(
    path: str,
    seconds: float,
    refusal: Callable[[], Exception],
    how: int = fcntl.LOCK_EX,
    mode: int = 0o600,
) -> Iterator[None]:
    """Hold a file's lock. Wait for it like `lock`, and create the file if it does not exist."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        lock(descriptor, seconds, refusal, how)
        yield
    finally:
        os.close(descriptor)
