"""A plugin of vLLM: each step of the engine takes a fixed time, so that its capacity is known.

It counts the steps that took longer, into the file that `REPORT` names. Loaded by an entry point
(real_server.py writes it); imports vLLM, so nothing here imports it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

SECONDS, REPORT = "PACED_STEP_SECONDS", "PACED_STEP_REPORT"
"""Environment variables: the time of a step, and the file: steps, late ones, their lateness."""
LATE_PARTS = 0.1
"""Of a step's time: beyond it a step is counted as late."""
REPORT_STEPS = 100


def register() -> None:
    """Have the engine's steps take their time."""
    from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found]  # vLLM's own

    seconds = float(os.environ[SECONDS])
    step = EngineCore.step
    if getattr(step, "is_paced", False):
        return
    ended: float | None = None
    steps, late, lateness = 0, 0, 0.0

    def paced(self: Any) -> Any:
        nonlocal ended, steps, late, lateness
        # The engine's own time between two steps is part of the later one, unless it was idle.
        begin = time.monotonic() if ended is None else ended
        answer, ended = step(self), None
        if not answer[1]:
            return answer
        due, now = begin + seconds, time.monotonic()
        steps, late = steps + 1, late + (now > due + LATE_PARTS * seconds)
        lateness += max(0.0, now - due)
        if steps % REPORT_STEPS == 0:
            Path(os.environ[REPORT]).write_text(f"{steps} {late} {lateness:.3f}", encoding="ascii")
        time.sleep(max(0.0, due - now))
        if self.scheduler.has_unfinished_requests():
            ended = max(due, now)
        return answer

    paced.is_paced = True  # type: ignore[attr-defined]
    EngineCore.step = paced
