"""RUNS ON THE NODE: questions in processes of their own, with deadlines.

NVML hangs and crashes on broken GPUs, and a process stuck in the kernel cannot be killed. So
whoever asks forks, waits no longer than the deadline, never waits for an end, and a stuck process
holds nothing of its parent's open and ends by itself.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import select
import signal
import time
from typing import Any, Callable, Mapping

from gpufleet.on_node.answers import missing, read


class Watched:
    """
    A forked process that answers one question, or does not.

    It ends by itself after `lives` seconds, whatever becomes of its parent. With `keep` it stays
    until then, or until `stop()`, after it has answered.
    """

    def __init__(self, function: Callable[[], Any], lives: float, keep: bool = False) -> None:
        self.output = b""
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            answer(function, end, lives, keep)
        os.close(end)

    def receive(self) -> bool:
        """Take what has arrived; False at the end."""
        arrived = os.read(self.pipe, 1 << 16)
        self.output += arrived
        return bool(arrived)

    def result(self) -> Any:
        """Return the answer, or how the process ended without one."""
        try:
            return json.loads(self.output.decode())
        except ValueError:
            return missing("crashed", signal=self.end())

    def end(self) -> int | None:
        """Return the signal that ended the process; None if that is not known within a second."""
        for _ in range(20):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            time.sleep(0.05)
        return None

    def stop(self) -> None:
        """Kill the process if it still is; do not wait: in the kernel it may outlive us."""
        os.close(self.pipe)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, os.WNOHANG)


def answer(function: Callable[[], Any], end: int, lives: float, keep: bool) -> None:
    """Be the forked process: answer through the pipe and end; with `keep`, once it is killed."""
    status = 1
    try:
        # Whatever becomes of the parent, this ends; a crash writes no core file; and whoever reads
        # the probe's output does not wait for a process that is stuck.
        signal.alarm(int(lives) + 1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        with os.fdopen(end, "wb") as pipe:
            pipe.write(json.dumps(read(function)).encode())
        status = 0
        if keep:
            signal.pause()
    finally:
        os._exit(status)


def answers(questions: Mapping[Any, Watched], seconds: float) -> dict[Any, Any]:
    """Wait for all, no longer than the deadline; return each one's answer or `timeout`."""
    waiting = {watched.pipe: key for key, watched in questions.items()}
    results: dict[Any, Any] = {}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(list(waiting), [], [], max(0, deadline - time.monotonic()))
        for pipe in ready:
            if not questions[waiting[pipe]].receive():
                key = waiting.pop(pipe)
                results[key] = questions[key].result()
    for key in waiting.values():
        results[key] = missing("timeout", seconds=seconds)
    return results


def asked_of_all(
    function: Callable[..., Any], each: Mapping[int, tuple[Any, ...]], seconds: float
) -> dict[int, Any]:
    """Ask every GPU at once, each in its own process; return the answers by GPU."""
    questions = {
        index: Watched(functools.partial(function, *arguments), seconds)
        for index, arguments in each.items()
    }
    try:
        return answers(questions, seconds)
    finally:
        for watched in questions.values():
            watched.stop()
