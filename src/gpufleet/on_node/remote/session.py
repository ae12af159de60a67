"""RUNS ON THE NODE: run programs one after the other in one Python process.

If each query started its own program, it would cost the node about 60 ms of CPU time for sshd's
fork, a shell, Python and the standard library. Here, each program runs in a fork of a process that
has already loaded Python and the library. This is only for short queries. Programs that run for a
long time, or that must continue without the connection, are started separately.

A request is a line `LENGTH SECONDS`, followed by LENGTH bytes with the program. The answer is a
line of JSON, `{"status": N, "out": BYTES, "error": BYTES}`, followed by the bytes of both outputs.
If the status is null, the program was killed at its deadline, or because it printed more than
`MOST` bytes. A line with `READY` comes before the first answer, because a login may print text. The
process ends when the connection closes or when it is idle for a long time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, Dict, List, Optional

READY = "gpufleet: ready"
# The process ends after this time without a request. A later query starts its own program.
IDLE_SECONDS = 3600
# Slightly more than the controller accepts (query.MOST_MIB), so that the controller reports the
# error.
MOST = 9 << 20
_CHUNK = 1 << 16
_PATIENCE = 100  # milliseconds
_COMMON = ("hashlib", "socket", "subprocess")


def run(text: bytes) -> None:
    """
    Run a program in this process, whose streams are already connected. Does not return.
    """
    status = 0
    try:
        exec(compile(text, "<stdin>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        import traceback  # imported only here, because it takes 4 ms

        status = 1
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 1
    os._exit(status & 255)


def fork_program(text: bytes) -> Any:
    """Fork a process that runs a program. Return its PID and the descriptors of its outputs."""
    out, error = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for descriptor, number in ((nothing, 0), (out[1], 1), (error[1], 2)):
                os.dup2(descriptor, number)
            os.closerange(3, max(*out, *error, nothing) + 1)
            run(text)
        finally:
            os._exit(1)
    os.close(out[1])
    os.close(error[1])
    return child, out[0], error[0]


def answer(text: bytes, seconds: float, asker: int) -> Optional[Dict[str, Any]]:
    """
    Run a program. Return its status and outputs, or None if the connection closed before its end.
    """
    child, out, error = fork_program(text)
    printed: Dict[int, List[bytes]] = {out: [], error: []}
    reading = select.poll()
    for descriptor in (out, error, asker):
        reading.register(descriptor, select.POLLIN if descriptor != asker else 0)
    try:
        status = read_output(reading, printed, child, time.monotonic() + seconds, asker)
    except EOFError:
        return None
    finally:
        kill_group(child)
        os.close(out)
        os.close(error)
    return {"status": status, "out": b"".join(printed[out]), "error": b"".join(printed[error])}


def read_output(
    reading: Any, printed: Dict[int, List[bytes]], child: int, until: float, asker: int
) -> Optional[int]:
    """
    Read a program's outputs until the program ends. Return its status.

    If the program was too slow or printed too much, the result is None. Raises `EOFError` if the
    connection closes.
    """
    total, opened, status = 0, len(printed), None
    while total <= MOST and time.monotonic() < until:
        # The selector does not report the program's end. So the end is checked when both outputs
        # are closed, and also at intervals, because a stuck process may keep the outputs open. Such
        # a process is not waited for. The end is checked before the outputs are read, so that
        # everything that the program printed is read.
        if status is None:
            number, code = os.waitpid(child, os.WNOHANG)
            if number:
                status = os.WEXITSTATUS(code) if os.WIFEXITED(code) else 128 + os.WTERMSIG(code)
        if status is not None and not opened:
            return status
        silent = True
        for descriptor, _ in reading.poll(_PATIENCE if opened and status is None else 1):
            if descriptor == asker:
                raise EOFError
            data = os.read(descriptor, _CHUNK)
            total += len(data)
            printed[descriptor].append(data)
            silent = False
            if not data:
                reading.unregister(descriptor)
                opened -= 1
        if status is not None and silent:
            return status
    return None


def kill_group(child: int) -> None:
    """
    Kill a program's process group.

    If a process is stuck in the kernel, stop waiting for it after one second.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        for _ in range(100):
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.01)


def main() -> None:
    """Answer requests until the connection closes."""
    # The garbage collector is also off in the forks. It writes to each object, so it would copy the
    # memory that a fork shares. It took 8 to 13 of the 129 ms of a probe. Short programs do not
    # need it.
    gc.disable()
    asked, told = sys.stdin.buffer, sys.stdout.buffer
    told.write(("\n%s\n" % READY).encode())
    told.flush()
    while True:
        # If the controller lost power, the connection may look open for hours.
        signal.alarm(IDLE_SECONDS)
        words = asked.readline().split()
        signal.alarm(0)
        if len(words) != 2:
            return
        text = asked.read(int(words[0]))
        found = answer(text, float(words[1]), asked.fileno())
        if found is None:
            return
        out, error = found["out"], found["error"]
        about = {"status": found["status"], "out": len(out), "error": len(error)}
        told.write(json.dumps(about).encode() + b"\n" + out + error)
        told.flush()
        # While the process is idle, load the modules that most programs need.
        for name in _COMMON:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


if __name__ == "__main__":
    main()
