"""Run work in threads. A command that ends does not wait for these threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonPool(Executor):
    """
    Run work in at most `most` daemon threads.

    A `ThreadPoolExecutor` waits for its work at the end of its block, even after Ctrl-C. It also
    waits at the end of the process, even for work that was abandoned. A server that sends one byte
    per second can delay both for hours. With this pool, the block and the process end immediately.
    Work that has not started is cancelled, and running work ends with the process.
    """

    def __init__(self, most: int) -> None:
        # The classes are accessed by their modules, because gevent may have replaced them since
        # this module was imported.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._most = most
        self._threads = 0
        self._futures: list[Future[Any]] = []

    def submit(self, work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Future[T]:
        """Run `work` in a thread and return its future."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(*args, **options))
            except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
                future.set_exception(error)

        self._futures.append(future)
        self._jobs.put(run)
        if self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Cancel work that has not started, and do not wait for running work."""
        for future in self._futures:
            future.cancel()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (run := self._jobs.get()) is not None:
            run()
