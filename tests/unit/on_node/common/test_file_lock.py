"""A file's lock is waited for, and for no longer than is said."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpufleet.on_node.common import file_lock

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.{call}(file, fcntl.{how})
print("held", flush=True)
time.sleep({seconds})
"""


class HeldError(Exception):
    """What the caller says."""


@pytest.fixture
def other() -> Iterator[Callable[..., None]]:
    """`other(path, seconds)`: another process that holds the lock for so long, or for the test."""
    running = []

    def hold(path: Path, seconds: float = 600, call: str = "flock", how: str = "LOCK_EX") -> None:
        program = HOLD.format(call=call, how=how, seconds=seconds)
        held = subprocess.Popen(
            [sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True
        )
        running.append(held)
        assert held.stdout
        assert held.stdout.readline() == "held\n"

    yield hold
    for each in running:
        with each:
            each.kill()


def test_a_lock_that_nobody_holds_is_had_at_once(tmp_path: Path) -> None:
    with file_lock.hold(str(tmp_path / "lock"), 0, HeldError):
        pass
    with file_lock.hold(str(tmp_path / "lock"), 0, HeldError):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["flock", "lockf"])
def test_a_lock_is_had_when_its_holder_ends(
    tmp_path: Path, other: Callable[..., None], call: str
) -> None:
    other(tmp_path / "lock", 0.5, call)
    with (tmp_path / "lock").open("a") as file:
        file_lock.lock(file.fileno(), 600, HeldError, call=getattr(fcntl, call))


@pytest.mark.parametrize("call", ["flock", "lockf"])
def test_what_the_caller_says_is_raised_at_the_end(
    tmp_path: Path, other: Callable[..., None], call: str
) -> None:
    other(tmp_path / "lock", call=call)
    with (tmp_path / "lock").open("a") as file, pytest.raises(HeldError, match="after 0"):
        file_lock.lock(
            file.fileno(), 0.2, lambda: HeldError("after 0.2 s"), call=getattr(fcntl, call)
        )


def test_readers_share_a_lock(tmp_path: Path, other: Callable[..., None]) -> None:
    other(tmp_path / "lock", how="LOCK_SH")
    with file_lock.hold(str(tmp_path / "lock"), 0, HeldError, fcntl.LOCK_SH):
        pass
