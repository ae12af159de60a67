"""RUNS ON THE NODE: run functions in separate processes, with deadlines.

NVML hangs and crashes on broken GPUs, files hang on dead mounts, and programs hang on a stuck disk.
A process that is stuck in the kernel cannot be killed. So the caller forks, waits at most until the
deadline, and never joins the process. A stuck process holds none of its parent's files open, and
ends itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

from gpufleet.on_node.common.answers import missing, missing_after, read

# A whole answer of 64 NVLinked GPUs is below 1 MB; a driver that counts four thousand million
# processes on a GPU must not fill the node's memory.
ANSWER_BYTES = 16 << 20
MEMORY_BYTES = 2 << 30


Question = Tuple[Callable[[], Any], float]
"""A function, and its deadline in seconds."""


class ForkedCall:
    """
    A forked process that runs one function, with a deadline of `seconds`.

    The process ends itself at the deadline, even without its parent. With `keep` it runs on after
    its answer, until `stop()` or that many seconds after its start. Raises `OSError` if the node
    cannot fork.
    """

    def __init__(self, function: Callable[[], Any], seconds: float, keep: float = 0) -> None:
        self.start(lambda pipe: pipe.write(json.dumps(read(function)).encode()), seconds, keep)

    def start(self, speak: Callable[[Any], Any], seconds: float, keep: float = 0) -> None:
        """Fork the process, which writes its answer to a pipe."""
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.keep = keep
        self.output = b""
        self.pipe, end = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.pipe)
            os.close(end)
            raise
        if self.pid == 0:
            answer(speak, end, max(seconds, keep), bool(keep))
        os.close(end)
        # The programs that it starts are killed with it. Both set the group: the first one wins.
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)

    def receive(self) -> bool:
        """Read arrived data; return False at the end of the pipe or above the size limit."""
        arrived = os.read(self.pipe, 1 << 16)
        self.output += arrived
        return bool(arrived) and len(self.output) <= ANSWER_BYTES

    def result(self) -> Any:
        """Return the answer, or the reason why the process failed."""
        if len(self.output) > ANSWER_BYTES:
            return missing("implausible", detail="an answer of more than %d bytes" % ANSWER_BYTES)
        try:
            return json.loads(self.output.decode())
        except ValueError:
            ended = self.end()
        # Its own alarm clock, which a parent that had no time to look is behind.
        if ended == signal.SIGALRM:
            return missing("timeout", seconds=self.seconds)
        return missing("crashed", signal=ended)

    def end(self) -> int | None:
        """Return the signal that ended the process, or None if unknown within a second."""
        for _ in range(20):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            time.sleep(0.05)
        return None

    def stop(self) -> None:
        """Kill the process without waiting, because it may be stuck in the kernel."""
        os.close(self.pipe)
        if self.pid:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, os.WNOHANG)


class Turn(ForkedCall):
    """
    A forked process that runs several functions in order, with a deadline of `seconds`.

    A process costs more than most questions, so one process answers several. When it ends or times
    out, the remaining questions have no answer: one of them hangs or crashes, or the node is slow.
    """

    def __init__(self, questions: Mapping[Any, Question], seconds: float) -> None:
        self.left = dict(questions)

        def speak(pipe: Any) -> None:
            for function, _ in questions.values():
                pipe.write(json.dumps(read(function)).encode() + b"\n")
                pipe.flush()

        self.start(speak, seconds)

    def answers(self) -> Iterator[Tuple[Any, Any]]:
        """Yield the answers since the last call, with their questions' keys."""
        if len(self.output) > ANSWER_BYTES:
            return
        *lines, self.output = self.output.split(b"\n")
        for line in lines:
            key = next(iter(self.left))
            del self.left[key]
            yield key, json.loads(line.decode())


def answer(speak: Callable[[Any], Any], end: int, lives: float, keep: bool) -> None:
    """Write the answers to the pipe in the forked process and end; with `keep`, wait for a kill."""
    status = 1
    try:
        # Whatever becomes of the parent, this ends; a crash writes no core file; and a reader of
        # the probe's output does not wait for a process that is stuck.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the parent does about it
        signal.alarm(int(lives) + 1)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        limit_memory()
        with os.fdopen(end, "wb") as pipe:
            speak(pipe)
        status = 0
        if keep:
            signal.pause()
    finally:
        os._exit(status)


def limit_memory() -> None:
    """Limit the process' memory to `MEMORY_BYTES`, unless its hard limit is lower."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > MEMORY_BYTES:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, most))


class Watch:
    """The running questions; waiting for some of them collects the answers of all."""

    def __init__(self) -> None:
        self.out: Dict[Any, ForkedCall] = {}
        self.turns: List[Turn] = []
        self.kept: List[ForkedCall] = []
        self.known: Dict[Any, Any] = {}

    def ask(self, key: Any, function: Callable[[], Any], seconds: float, keep: float = 0) -> None:
        """Answer a question in a separate process, with a deadline in `seconds` from now."""
        try:
            self.out[key] = ForkedCall(function, seconds, keep)
        except OSError as error:  # the node has no room for another process
            self.known[key] = missing_after(error)

    def ask_in_turn(self, questions: Mapping[Any, Question], seconds: float) -> None:
        """
        Answer all questions in one process, and after `seconds` each remaining one in its own.

        Only for questions that can be repeated.
        """
        try:
            self.turns.append(Turn(questions, seconds))
        except OSError:
            self._ask_each(questions)

    def _ask_each(self, questions: Mapping[Any, Question]) -> None:
        for key, (function, seconds) in questions.items():
            self.ask(key, function, seconds)

    def answers(self, *keys: Any) -> Dict[Any, Any]:
        """Wait for the answers to these keys until their deadlines; a late answer is `timeout`."""
        while any(key not in self.known for key in keys):
            self._take_in(keys)
        return {key: self.known[key] for key in keys}

    def _take_in(self, keys: Any) -> None:
        waited = {key: self.out[key] for key in keys if key in self.out}
        ends = min(watched.deadline for watched in [*waited.values(), *self.turns])
        by_pipe = {watched.pipe: key for key, watched in self.out.items()}
        pipes = [*by_pipe, *(turn.pipe for turn in self.turns)]
        ready, _, _ = select.select(pipes, [], [], max(0.0, ends - time.monotonic()))
        for pipe in ready:
            key = by_pipe.get(pipe)
            if key is not None and not self.out[key].receive():
                self._settle(key, self.out[key].result())
        for turn in [turn for turn in self.turns if self._ended(turn, ready)]:
            self.turns.remove(turn)
            turn.stop()
            self._ask_each(turn.left)
        for key, watched in waited.items():
            late = time.monotonic() >= watched.deadline and watched.pipe not in ready
            if key in self.out and late:
                watched.keep = 0
                self._settle(key, missing("timeout", seconds=watched.seconds))

    def _ended(self, turn: Turn, ready: List[int]) -> bool:
        """Read data of one process, and return whether it has ended or timed out."""
        if turn.pipe not in ready:
            return time.monotonic() >= turn.deadline
        more = turn.receive()
        self.known.update(turn.answers())
        return not more

    def _settle(self, key: Any, answer: Any) -> None:
        watched = self.out.pop(key)
        self.known[key] = answer
        if watched.keep:
            self.kept.append(watched)
        else:
            watched.stop()

    def stop(self) -> None:
        """Kill unfinished and kept processes."""
        for watched in [*self.out.values(), *self.turns, *self.kept]:
            watched.stop()
        self.out, self.turns, self.kept = {}, [], []
