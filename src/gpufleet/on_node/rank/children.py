"""RUNS ON THE NODE: run a rank's programs, and end all their descendants.

A program may start others that leave its process group, as Ray's do. So this process is the reaper
of all orphans below it (PR_SET_CHILD_SUBREAPER): descendants stay descendants, and the end is
complete when no descendant is left. A program dies with this process (PR_SET_PDEATHSIG), even after
SIGKILL; systemd kills the rest with the unit's control group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from typing import Any, Iterator

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)

TCP_LISTEN = "0A"  # include/net/tcp_states.h, as /proc/net/tcp prints it


class Children:
    """The programs that this process started, in order."""

    def __init__(self) -> None:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.running: dict[int, str] = {}
        """Names of the running programs by process id."""
        self.pids: list[int] = []
        """Process ids of all started programs, in order."""
        # Kept, so that only we wait for them.
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, argv: list[str], environment: dict[str, str]) -> int:
        """Start a program in a process group of its own. Raises `OSError`."""
        parent = os.getpid()

        def prepare() -> None:
            os.setpgid(0, 0)
            LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

        started = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=prepare,  # noqa: PLW1509  # there is one thread
        )
        self._started.append(started)
        self.pids.append(started.pid)
        self.running[started.pid] = os.path.basename(argv[0])
        return started.pid

    def ended(self) -> list[tuple[str, int]]:
        """Return the programs that ended since the last call, with `Popen`'s exit status."""
        found: list[tuple[str, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if not pid:
                return found
            if pid in self.running:
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                for each in self._started:
                    if each.pid == pid:
                        each.returncode = code
                found.append((self.running.pop(pid), code))

    def terminate(self, pid: int | None = None) -> None:
        """
        Send SIGTERM to one program, or all.

        The signal goes only to the programs themselves: vLLM drains on SIGTERM, and its workers
        must not get it.
        """
        for each in [pid] if pid else list(self.running):
            with contextlib.suppress(OSError):
                # A stopped program takes no signal but this one.
                os.kill(each, signal.SIGTERM)
                os.kill(each, signal.SIGCONT)

    def kill(self) -> None:
        """Kill all descendants."""
        for pid in list(self.running):
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def descendants() -> list[int]:
    """Return this process' living descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in processes():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    unread = [os.getpid()]
    while unread:
        below = children.pop(unread.pop(), [])
        found += below
        unread += below
    return found


def processes() -> Iterator[tuple[int, int]]:
    """Yield the process id and the parent's process id of each process that has not ended."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open("/proc/%s/stat" % name, encoding="utf-8", errors="replace") as file:
                # The name in parentheses may hold anything, also parentheses.
                state, parent = file.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                yield int(name), int(parent)


def is_listening(port: int) -> bool:
    """Return whether a program on this node listens on a TCP port, without connecting to it."""
    wanted = ":%04X" % port
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            for line in file:
                words = line.split()
                if words[1].endswith(wanted) and words[3] == TCP_LISTEN:
                    return True
    return False


def describe_exit(status: int) -> str:
    """Return in words how a program ended, for example `with status 1` or `by SIGKILL`."""
    if status >= 0:
        return "with status %d" % status
    try:
        return "by " + signal.Signals(-status).name
    except ValueError:
        return "by signal %d" % -status


def environment(values: dict[str, Any]) -> dict[str, str]:
    """Return a program's environment, without systemd's variables and with filled placeholders."""
    ours = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    found = {
        name: fill_ports(value, values) for name, value in os.environ.items() if name not in ours
    }
    found["GPUFLEET_INCARNATION"] = str(values["incarnation"])
    return found


def fill_ports(text: str, values: dict[str, Any]) -> str:
    """
    Fill in placeholders such as `{master_port}`; other braces stay, because arguments contain JSON.
    """
    for name, value in values.items():
        text = text.replace("{%s}" % name, str(value))
    return text
