"""RUNS ON THE NODE: run programs and dumps for the watchdog without waiting for them.

Each program has a deadline and is checked once a second. At the deadline, the program and all its
descendants are killed. Its output goes to memory, so that no pipe has to be read in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from typing import Callable

from gpufleet.on_node.common.answers import CannotRead
from gpufleet.on_node.common.commands import ENVIRONMENT, path_of

OUTPUT_BYTES = 1 << 20


class Program:
    """A program that answers a question."""

    def __init__(self, argv: tuple[str, ...], deadline: float) -> None:
        self.deadline = deadline
        self.status: int | None = None
        """
        The program's exit status. It is None while the program runs, 124 if the deadline passed,
        and 127 if the program could not be started.
        """
        self.out = ""
        self._memory = os.memfd_create("output")
        self._program: subprocess.Popen[bytes] | None = None
        try:
            self._program = subprocess.Popen(
                [path_of(argv[0]), *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=self._memory,
                stderr=self._memory,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except (OSError, CannotRead) as error:
            self._end(127, "%s: %s" % (argv[0], error))

    def advance(self, now: float) -> bool:
        """Return whether the program has ended."""
        if self.status is None and self._program is not None:
            status = self._program.poll()
            if status is not None:
                self._end(status, "")
            elif now >= self.deadline:
                kill_group(self._program.pid)
                self._program.poll()
                self._end(124, "no answer in time")
        return self.status is not None

    def close(self) -> None:
        """Kill the program if it runs."""
        if self.status is None:
            self.advance(float("inf"))

    def _end(self, status: int, why: str) -> None:
        self.status = status
        self.out = why or os.pread(self._memory, OUTPUT_BYTES, 0).decode("utf-8", "replace")
        os.close(self._memory)


class Fork:
    """A function that runs in its own process."""

    def __init__(self, function: Callable[[], None], deadline: float) -> None:
        self.deadline = deadline
        self.over = False
        self.killed = False
        self._pid = os.fork()
        if not self._pid:
            status = 1
            try:
                os.setsid()
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                function()
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.stderr)
            finally:
                os._exit(status)

    def advance(self, now: float) -> bool:
        """Return whether the process has ended, by itself or because it was killed."""
        if not self.over:
            if self._ended():
                self.over = True
            elif now >= self.deadline:
                kill_group(self._pid)
                # A process that hangs in the kernel cannot be waited for. When it ends, the unit's
                # init process collects it.
                self.over = self.killed = True
        elif self.killed:
            self._ended()
        return self.over

    def _ended(self) -> bool:
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True


def kill_group(pid: int) -> None:
    """Kill a session leader and all processes in its group."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
