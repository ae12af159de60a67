"""Run a deploy file in a separate process, with its output in a file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from click import unstyle
from gevent.lock import BoundedSemaphore
from gevent.subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

from gpufleet.errors import FleetError
from gpufleet.fleet.upgrade_lock import VARIABLE
from gpufleet.inventory.pyinfra_command import pyinfra_command
from gpufleet.sanitize import printable

# A release is built within BUILD_SECONDS (release.py), a large model downloaded in some hours.
PREPARE_SECONDS = 6 * 3600
# Packages, a driver's module, a reboot.
NODE_SECONDS = 2 * 3600
FINISH_SECONDS = 2 * 3600
GATEWAY = "deploys/gateway.py"
# Rendering and reloading a configuration, including the wait for nodes without an answer.
GATEWAY_SECONDS = 1800
_QUOTED = 6
"""Maximum number of lines of a failed run that a message quotes; the file has all lines."""
# The words of refusal.py; pyinfra 3's lines before an operation and after one that failed on a
# node, "[node] words" (api/operations.py, api/util.py).
_REFUSED = " is refused, "
_OPERATION = "--> Starting operation: "
_FAILED = "] Error: executed "


@dataclass(frozen=True)
class Deploy:
    """Run deploy files for an inventory, with their output in `logs`."""

    inventory: str
    logs: Path
    """A directory that only its owner can read."""
    upgrade: str = ""
    """The id of the upgrade that runs the deploys; "": none."""

    def run(
        self,
        file: str,
        seconds: float,
        nodes: Iterable[str] = (),
        name: str = "",
        data: Mapping[str, object] | None = None,
    ) -> Path:
        """
        Run a deploy file on these nodes, by default on all; return the file with its output.

        `data` has values that replace declared ones, by their dotted names. Raises `FleetError` if
        the deploy fails, with the lines that explain it, or if it takes longer than `seconds`.
        """
        path = self.logs / f"{name or Path(file).stem}.log"
        limits = [word for node in nodes for word in ("--limit", node)]
        values = [
            word for key, each in (data or {}).items() for word in ("--data", f"{key}={each}")
        ]
        command = pyinfra_command(Path(file).stem, "-y", *limits, *values, self.inventory)
        self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            os.write(handle, f"--- {stamp} {file} {' '.join([*limits, *values])}\n".encode())
            begin = os.lseek(handle, 0, os.SEEK_END)
            # A new session, so that Ctrl-C does not reach the deploy: an interrupted deploy leaves
            # more work than one that finishes.
            process = Popen(
                command,
                env={**os.environ, **({VARIABLE: self.upgrade} if self.upgrade else {})},
                stdin=DEVNULL,
                stdout=handle,
                stderr=STDOUT,
                start_new_session=True,
            )
            status = _wait(process, seconds)
        finally:
            os.close(handle)
        if status is None:
            raise FleetError(f"{file} did not finish within {seconds:.0f} s: see {path}")
        if status:
            raise FleetError(f"{file} failed: {_failure(path, begin)} (full output: {path})")
        return path


@dataclass
class SharedDeploy:
    """
    A deploy that several groups of a wave share.

    Only one run is active at a time, and one run serves all waiting groups. A run that began before
    a group's request is not used for this group: a deploy reads the fleet when it starts, so it may
    miss the group's earlier steps.
    """

    run: Callable[[], object]
    _one: BoundedSemaphore = field(default_factory=BoundedSemaphore, repr=False)
    _began: float = field(default=float("-inf"), repr=False)
    """Start of the last run that finished, by time.monotonic()."""

    def __call__(self) -> None:
        """Block until a run that began after this call has finished."""
        asked = time.monotonic()
        with self._one:
            if self._began >= asked:
                return
            began = time.monotonic()
            self.run()
            self._began = began


def _wait(process: Popen, seconds: float) -> int | None:
    """Return a process' exit status; None: it took too long and was killed."""
    try:
        return int(process.wait(timeout=seconds))
    except TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(TimeoutExpired):
                process.wait(timeout=10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _failure(path: Path, begin: int) -> str:
    """Return the lines of a run's output that explain its failure."""
    with path.open("rb") as file:
        file.seek(begin)
        return failure_lines(file.read().decode("utf-8", "replace"))


def failure_lines(text: str) -> str:
    """
    Return the lines of a deploy's output that explain its failure.

    They are the reasons of a refusal, or else the nodes' output in the first failed operation, each
    sentence once.
    """
    lines = [printable(unstyle(line)).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and set(line) - set("-=─ ")]
    for number, line in enumerate(lines):
        if _REFUSED in line:
            return "; ".join(lines[number : number + _QUOTED])
    if found := _operation(lines):
        return "; ".join(found)
    for mark in ("rror:", "rror ", "No hosts remaining", "failed"):
        for number, line in enumerate(lines):
            if mark in line:
                return "; ".join(lines[number : number + _QUOTED])
    return "; ".join(lines[-_QUOTED:]) or "the deploy printed nothing"


def _operation(lines: list[str]) -> list[str]:
    """Return the failed nodes' output in the first operation that failed."""
    heads = [number for number, line in enumerate(lines) if line.startswith("--> ")]
    for head, end in pairwise([*heads, len(lines)]):
        if not lines[head].startswith(_OPERATION):
            continue
        part = lines[head + 1 : end]
        failed = {line.partition(" ")[0] for line in part if _FAILED in line}
        said: dict[str, str] = {}
        for line in part:
            node, _, words = line.partition(" ")
            if node in failed and _FAILED not in line:
                said.setdefault(words.strip(), line)
        if failed:
            # Programs print the reason of a failure last: uv its causes, pip what it did not find.
            last = list(said.values())[1 - _QUOTED :]
            return [lines[head].removeprefix(_OPERATION), *last]
    return []
