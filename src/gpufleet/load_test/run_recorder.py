"""Record the requests of a load test, and the load of the measured servers, over the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from gpufleet.load_test.client_process import Beat, LevelRun
from gpufleet.load_test.guest import ServerLoad
from gpufleet.load_test.level_runs import LevelObserver
from gpufleet.load_test.outcomes import Outcome
from gpufleet.load_test.time_series import Load, Requests, TimeSeries, time_series


class Recorder(LevelObserver):
    """Collects the data of a `TimeSeries`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the recording now."""
        self._clock, self._zero = clock, clock()
        self._requests = Requests()
        self._loads: list[Load] = []
        self._levels: list[float] = []
        self._level: list[Outcome] = []
        self._begin = math.inf

    @property
    def _now(self) -> float:
        return self._clock() - self._zero

    def began(self, _load: float, /) -> None:
        """Begin a level."""
        self._level, self._begin = [], math.inf

    def outcome(self, outcome: Outcome) -> None:
        """Record a request of this level."""
        self._level.append(outcome)

    def beat(self, beat: Beat) -> None:
        """
        Update the estimate of when the level began.

        A heartbeat never arrives before its own time, so the earliest estimate is the best one.
        """
        self._begin = min(self._begin, self._now - beat.now)

    def ended(self, run: LevelRun) -> None:
        """
        Add the level's requests to the series.

        Their due times are converted to seconds since the run began.
        """
        begin = self._begin if math.isfinite(self._begin) else self._now - run.seconds
        begin = max(0.0, begin)
        self._levels.append(begin)
        for each in self._level:
            failed = bool(each.error) or each.done is None
            self._requests.add(begin + each.due, each.ttft, each.itl, failed=failed)
        for due in run.unfinished:
            self._requests.add(begin + due, None, None, failed=False)
        self._level = []

    def load(self, loads: Iterable[ServerLoad | str]) -> None:
        """Record the servers' load at this moment, unless the load of a server is unknown."""
        loads = [*loads]
        known = [each for each in loads if not isinstance(each, str)]
        if known and len(known) == len(loads):
            running, waiting, kv_usage = (
                sum(getattr(each, name) for each in known)
                for name in ("running", "waiting", "kv_usage")
            )
            self._loads.append(Load(self._now, running, waiting, kv_usage / len(known)))

    def series(self) -> TimeSeries | None:
        """Return the series so far, or None if there are no requests."""
        return time_series(self._requests, self._loads, self._levels)
