"""Run the machine's own tools with a deadline and readable errors."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from gpufleet.errors import FleetError


def run(
    *args: str | Path,
    limit: float = 60.0,
    stdin: str | None = None,
    check: bool = True,
    lock: IO[str] | None = None,
) -> str:
    """
    Run a command and return its stdout; an error includes its stderr.

    `limit` is in seconds. With `check=False`, a failing command returns its output; this is for
    commands that remove things that may no longer exist. `lock` is held until the command ends,
    also if this process is killed earlier. Raises `FleetError`.
    """
    shown = shlex.join(str(arg) for arg in args)
    try:
        done = subprocess.run(
            [str(arg) for arg in args],
            input="" if stdin is None else stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
            pass_fds=() if lock is None else (lock.fileno(),),
        )
    except FileNotFoundError:
        raise FleetError(
            f"{args[0]} is not installed: run `gpufleet lab up` to install it."
        ) from None
    except subprocess.TimeoutExpired:
        raise FleetError(f"`{shown}` did not finish within {limit:.0f} s.") from None
    if check and done.returncode:
        raise FleetError(f"`{shown}` failed ({done.returncode}): {tail(done.stderr.splitlines())}")
    return done.stdout


def tail(lines: Iterable[str], count: int = 5) -> str:
    """Return the last non-empty lines, joined into one."""
    said = [line.strip() for line in lines if line.strip()]
    return " / ".join(said[-count:]) or "it printed nothing"
