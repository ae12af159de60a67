"""RUNS ON THE NODE: run one step of a package transaction with a deadline and a log.

A step continues if its connection ends, because a package manager that is killed leaves packages
half installed. LOG has only the output of the last transaction.
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
# File with the current step of a transaction, for `transaction_progress.py`. It is removed at the
# transaction's end.
STEP = "/var/lib/gpufleet/packages/step"
LINES_BEFORE, LAST_LINES = 5, 15
COMPLAINS = re.compile(r"error|fail|cannot|unable|invalid|^[EW]:", re.I)
# Lines without information: apt's progress, dnf's table, the prompt of dnf's shell, and dnf's steps
# ("Upgrading : foo 1/2").
NOISE = re.compile(
    r"^(debconf: |Reading |Building dependency|\(Reading database|Hit:|Get:|W: Download is|[>=]"
    r"|Last metadata|Total|Running |Transaction )|\s:\s.*\d+/\d+$"
)
ENVIRONMENT = {
    "DEBIAN_FRONTEND": "noninteractive",
    # Otherwise, the hook of needrestart would restart serving units whose libraries have changed.
    "NEEDRESTART_SUSPEND": "1",
    "APT_LISTCHANGES_FRONTEND": "none",
    "LC_ALL": "C.UTF-8",
    "LANGUAGE": "C",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


class RefusedError(Exception):
    """Raised to refuse a transaction. Its text is one sentence for the operator."""


class Output(NamedTuple):
    """A step's exit status and output."""

    status: int
    text: str

    @property
    def last(self) -> str:
        """
        Return the lines that explain a failure.

        They are the lines around the first error, or the last lines if no line is an error.
        """
        lines = output_lines(self.text)
        at = next((at for at, line in enumerate(lines) if COMPLAINS.search(line)), len(lines))
        # A package's script prints the reason before dpkg reports the failure.
        return " | ".join(lines[max(0, at - LINES_BEFORE) :][:LAST_LINES])


def output_lines(text: str) -> List[str]:
    """Return the lines of a package manager's output, without the lines about progress."""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    return [line for line in lines if line and not NOISE.search(line)]


def ignore_hangup() -> None:
    """Keep this process and its programs running when the connection ends."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def begin_log(root: str) -> None:
    """Empty the log, then write the time to it."""
    os.makedirs(os.path.dirname(root + LOG), mode=0o755, exist_ok=True)
    with open(root + LOG, "w") as log:
        log.write("%s\n" % time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def record_step(root: str, what: str, folder: str = "", size: int = 0) -> None:
    """
    Record the current step as `what`. For a download, also record its folder and size.

    The record is only informational, so write errors are ignored.
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
    """
    Run a step with additional arguments and input.

    Raises `RefusedError` if the step does not end before its deadline.
    """
    argv = [*step["argv"], *more]
    with open(root + LOG, "a+b", buffering=0) as log:
        log.write(("\n$ %s\n" % " ".join(argv)).encode())
        begun = log.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                # A file instead of a pipe, so that output is written even after this process ended.
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                cwd="/",
                # In its own session, the step gets no signals of the connection's terminal.
                start_new_session=True,
            )
        except FileNotFoundError:
            raise RefusedError("the program %s is not installed on this node" % argv[0]) from None
        try:
            process.communicate((stdin or step["stdin"]).encode(), timeout=step["seconds"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.seek(begun)
            output = Output(-9, log.read().decode("utf-8", "replace"))
            raise RefusedError(
                "`%s` was killed after %d s; its output: %s. Run again to complete it"
                % (" ".join(argv[:6]), step["seconds"], output.last)
            ) from None
        log.seek(begun)
        return Output(process.returncode, log.read().decode("utf-8", "replace"))


def ask(*argv: str, status: Sequence[int] = (0,)) -> str:
    """Return the output of a short query. Raises `RefusedError` if the query fails."""
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
