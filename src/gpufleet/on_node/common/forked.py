"""RUNS ON THE NODE: run functions in separate processes, with deadlines.

NVML hangs and crashes on broken GPUs, file accesses hang on dead mounts, and programs hang on a
stuck disk. A process that is stuck in the kernel cannot be killed. So the caller forks a process,
waits at most until the deadline, and never joins the process. A stuck process keeps none of its
parent's files open, and it ends itself as soon as it is no longer stuck.
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

# The whole answer for 64 GPUs with NVLink is smaller than 1 MB. The limit protects the node's
# memory from a broken driver, for example one that reports 4 thousand million processes on a GPU.
ANSWER_BYTES = 16 << 20
MEMORY_BYTES = 2 << 30


Question = Tuple[Callable[[], Any], float]
"""A function to run, and its deadline in seconds."""


class ForkedCall:
    """
    A forked process that runs one function, with a deadline of `seconds`.

    The process ends itself at the deadline, even if its parent is gone. With `keep`, the process
    continues after its answer until `stop()` is called, or until `keep` seconds after its start.
    Raises `OSError` if the node cannot fork.
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
        # The process gets its own group, so that the programs that it starts are killed with it.
        # Parent and child both set the group, because either may run first.
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
        # The process' own alarm ended it before its parent had time to check the deadline.
        if ended == signal.SIGALRM:
            return missing("timeout", seconds=self.seconds)
        return missing("crashed", signal=ended)

    def end(self) -> int | None:
        """
        Return the signal that ended the process, or None if this is not known after one second.
        """
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

    A process costs more time than most questions, so one process answers several questions. If the
    process ends or times out early, the remaining questions have no answer. The reason is that one
    question hangs or crashes, or that the node is slow.
    """

    def __init__(self, questions: Mapping[Any, Question], seconds: float) -> None:
        self.left = dict(questions)

        def speak(pipe: Any) -> None:
            for function, _ in questions.values():
                pipe.write(json.dumps(read(function)).encode() + b"\n")
                pipe.flush()

        self.start(speak, seconds)

    def answers(self) -> Iterator[Tuple[Any, Any]]:
        """Yield (question's key, answer) for each answer that arrived since the last call."""
        if len(self.output) > ANSWER_BYTES:
            return
        *lines, self.output = self.output.split(b"\n")
        for line in lines:
            key = next(iter(self.left))
            del self.left[key]
            yield key, json.loads(line.decode())


def answer(speak: Callable[[Any], Any], end: int, lives: float, keep: bool) -> None:
    """
    Write the answers to the pipe, then end the process. Runs in the forked process.

    With `keep`, wait to be killed instead of ending.
    """
    status = 1
    try:
        # This process ends at its deadline even if the parent is gone. A crash writes no core file.
        # Standard output is not kept open, so that a reader of the probe's output does not wait for
        # a stuck process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may have its own handler
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
    """The running questions. While the caller waits for some, the answers of all are collected."""

    def __init__(self) -> None:
        self.out: Dict[Any, ForkedCall] = {}
        self.turns: List[Turn] = []
        self.kept: List[ForkedCall] = []
        self.known: Dict[Any, Any] = {}

    def ask(self, key: Any, function: Callable[[], Any], seconds: float, keep: float = 0) -> None:
        """Answer a question in a separate process, with a deadline `seconds` from now."""
        try:
            self.out[key] = ForkedCall(function, seconds, keep)
        except OSError as error:  # the node cannot create another process
            self.known[key] = missing_after(error)

    def ask_in_turn(self, questions: Mapping[Any, Question], seconds: float) -> None:
        """
        Answer all questions in one process. After `seconds`, each question without an answer is
        asked again in a process of its own.

        Only for questions that can be asked twice.
        """
        try:
            self.turns.append(Turn(questions, seconds))
        except OSError:
            self._ask_each(questions)

    def _ask_each(self, questions: Mapping[Any, Question]) -> None:
        for key, (function, seconds) in questions.items():
            self.ask(key, function, seconds)

    def answers(self, *keys: Any) -> Dict[Any, Any]:
        """
        Wait until the deadlines for the answers to these keys. A late answer is `timeout`.
        """
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
        """Read the data of one process; return whether the process has ended or timed out."""
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
        """Kill the processes that have not finished, and those that `keep` lets continue."""
        for watched in [*self.out.values(), *self.turns, *self.kept]:
            watched.stop()
        self.out, self.turns, self.kept = {}, [], []
