"""RUNS ON THE NODE: run programs of the node. Query programs change nothing.

A program is looked up below the probe's root, so that tests can run scripts of a test directory
instead. The program gets no input, the C locale and a deadline. It ends when its caller ends,
unless SIGKILL kills only the caller.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import Any, Callable, Iterator, NamedTuple

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.answers import CannotRead

PLACES = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
ENVIRONMENT = {"LC_ALL": "C", "PATH": ":".join(PLACES)}
# Size limit of output that is not streamed. `rpm -qa` prints 0.2 MB on a big server.
OUTPUT_BYTES = 16 << 20
ERROR_BYTES = 4096


class Output(NamedTuple):
    """A program's result: its exit status and the texts of stdout and stderr."""

    status: int
    out: str
    err: str


def path_of(name: str) -> str:
    """
    Return a program's path. Raises `CannotRead` (`no_program`) if the node lacks the program.
    """
    for place in PLACES:
        path = linux_facts.ROOT + place + "/" + name
        if os.access(path, os.X_OK):
            return path
    raise CannotRead("no_program", detail=name)


def run(
    name: str, *arguments: str, seconds: float, take: Callable[[bytes], Any] | None = None
) -> Output:
    """
    Run a program and return its result. If `take` is given, it receives the output in pieces.

    Raises `CannotRead` with `no_program` or `timeout`. The caller must handle a status other than
    0, for example with `refusal_of()`.
    """
    program = subprocess.Popen(
        [path_of(name), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd="/",
    )
    try:
        with _ended_by_alarm(program):
            return _outputs(program, name, seconds, take)
    finally:
        program.kill()
        for pipe in (program.stdout, program.stderr):
            if pipe:
                pipe.close()


@contextlib.contextmanager
def _ended_by_alarm(program: subprocess.Popen[bytes]) -> Iterator[None]:
    """
    Make the alarm that ends this process (`ForkedCall`) end the program first.

    The program could have its own alarm instead, but this needs `preexec_fn`. With `preexec_fn`,
    subprocess copies this process for every program, which took 12 of the 116 ms of a probe.
    """

    def end(number: int, _: Any) -> None:
        program.kill()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGALRM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _outputs(
    program: subprocess.Popen[bytes],
    name: str,
    seconds: float,
    take: Callable[[bytes], Any] | None,
) -> Output:
    deadline = time.monotonic() + seconds
    assert program.stdout is not None
    assert program.stderr is not None
    out, err = program.stdout.fileno(), program.stderr.fileno()
    kept = {out: bytearray(), err: bytearray()}
    most = {out: OUTPUT_BYTES, err: ERROR_BYTES}
    waiting = {out, err}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            raise CannotRead("timeout", seconds=seconds, detail=name)
        for pipe in ready:
            piece = os.read(pipe, 1 << 16)
            if not piece:
                waiting.discard(pipe)
            elif pipe == out and take is not None:
                take(piece)
            elif len(kept[pipe]) < most[pipe]:
                kept[pipe] += piece
    try:
        status = program.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise CannotRead("timeout", seconds=seconds, detail=name) from None
    return Output(
        status, kept[out].decode("utf-8", "replace"), kept[err].decode("utf-8", "replace")
    )


def refusal_of(name: str, output: Output) -> CannotRead:
    """Return the exception to raise for a program that printed no usable answer."""
    said = output.err.strip().splitlines()
    if "not permitted" in output.err or "ermission denied" in output.err:
        return CannotRead("no_permission", detail=said[0])
    words = "%s ended with status %d" % (name, output.status)
    return CannotRead("error", detail=words + (": " + said[0] if said else ""))
