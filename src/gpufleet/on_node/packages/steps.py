"""RUNS ON THE NODE: run one step of a package transaction with a deadline and a log.

A step outlives its connection, because ending a package manager half-way leaves packages half
installed. LOG has the output of the last transaction only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from typing import Any, Dict, List, NamedTuple, Sequence

LOG = "/var/lib/gpufleet/packages/log"
# What a transaction does now, for `transaction_progress.py`; gone when it has ended.
STEP = "/var/lib/gpufleet/packages/step"
LINES_BEFORE, LAST_LINES = 5, 15
COMPLAINS = re.compile(r"error|fail|cannot|unable|invalid|^[EW]:", re.I)
# apt's progress; dnf's table, its shell's prompt and its steps ("Upgrading : foo 1/2").
NOISE = re.compile(
    r"^(debconf: |Reading |Building dependency|\(Reading database|Hit:|Get:|W: Download is|[>=]"
    r"|Last metadata|Total|Running |Transaction )|\s:\s.*\d+/\d+$"
)
ENVIRONMENT = {
    "DEBIAN_FRONTEND": "noninteractive",
    # The needrestart hook would restart serving units because a library of theirs changed.
    "NEEDRESTART_SUSPEND": "1",
    "APT_LISTCHANGES_FRONTEND": "none",
    "LC_ALL": "C.UTF-8",
    "LANGUAGE": "C",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


class RefusedError(Exception):
    """One sentence for the operator."""


class Output(NamedTuple):
    """A step's exit status and output."""

    status: int
    text: str

    @property
    def last(self) -> str:
        """Return the explaining lines: the lines around the first error, or else the last lines."""
        lines = output_lines(self.text)
        at = next((at for at, line in enumerate(lines) if COMPLAINS.search(line)), len(lines))
        # A script prints what is wrong before dpkg reports the failure.
        return " | ".join(lines[max(0, at - LINES_BEFORE) :][:LAST_LINES])


def output_lines(text: str) -> List[str]:
    """Return the lines of a package manager's output without progress lines."""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    return [line for line in lines if line and not NOISE.search(line)]


def ignore_hangup() -> None:
    """Keep this process and its programs running when the connection ends."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def begin_log(root: str) -> None:
    """Truncate the log, and write the time."""
    os.makedirs(os.path.dirname(root + LOG), mode=0o755, exist_ok=True)
    with open(root + LOG, "w") as log:
        log.write("%s\n" % time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def record_step(root: str, what: str, folder: str = "", size: int = 0) -> None:
    """
    Record the current step: `what`, and for a download its folder and size.

    It is informational: write errors are ignored.
    """
    document = {"pid": os.getpid(), "step": what, "folder": folder, "bytes": size}
    with contextlib.suppress(OSError):
        with open(root + STEP + ".new", "w") as file:
            json.dump(document, file)
        os.replace(root + STEP + ".new", root + STEP)


def stop_watcher(root: str) -> None:
    """Stop the watcher by removing the record of the current step."""
    with contextlib.suppress(OSError):
        os.unlink(root + STEP)


def run(root: str, step: Dict[str, Any], more: Sequence[str] = (), stdin: str = "") -> Output:
    """Run a step with additional arguments and input. Raises `RefusedError` after its deadline."""
    argv = [*step["argv"], *more]
    with open(root + LOG, "a+b", buffering=0) as log:
        log.write(("\n$ %s\n" % " ".join(argv)).encode())
        begun = log.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                # A file, not a pipe: it is written also when we have gone.
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                cwd="/",
                # Its own session: no signal of the connection's terminal reaches it.
                start_new_session=True,
            )
        except FileNotFoundError:
            raise RefusedError("there is no %s on this node" % argv[0]) from None
        try:
            process.communicate((stdin or step["stdin"]).encode(), timeout=step["seconds"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.seek(begun)
            output = Output(-9, log.read().decode("utf-8", "replace"))
            raise RefusedError(
                "`%s` was ended after %d s; its output: %s. Run again to complete it"
                % (" ".join(argv[:6]), step["seconds"], output.last)
            ) from None
        log.seek(begun)
        return Output(process.returncode, log.read().decode("utf-8", "replace"))


def ask(*argv: str, status: Sequence[int] = (0,)) -> str:
    """Return the output of a short query. Raises `RefusedError` without an answer."""
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
        timeout=60,
        check=False,
    )
    if done.returncode not in status:
        reason = done.stderr.decode("utf-8", "replace").strip()
        raise RefusedError("%s: %s" % (argv[0], reason or "status %d" % done.returncode))
    return done.stdout.decode("utf-8", "replace")
