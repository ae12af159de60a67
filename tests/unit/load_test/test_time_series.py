"""What happened when: requests by their due times, the servers' load between, over all levels."""

from __future__ import annotations

import pytest

from gpufleet.load_test.client_process import Beat, LevelRun
from gpufleet.load_test.guest import ServerLoad
from gpufleet.load_test.outcomes import Outcome
from gpufleet.load_test.run_recorder import Recorder
from gpufleet.load_test.time_series import MOST_STEPS, Requests, time_series


def request(due: float, ttft: float, itl: float, *, error: str = "") -> Outcome:
    """Return a request of three tokens."""
    first = due + ttft
    done = None if error else first + 2 * itl
    return Outcome(due, due, first, done, 8, 3, (itl, itl), error)


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def run_level(recorder: Recorder, clock: Clock, begin: float, *ended: Outcome, unfinished=()):
    """Record a level that begins at a time of the run; heartbeats are heard some time later."""
    recorder.began(1.0)
    for each in ended:
        recorder.outcome(each)
    for now, late in ((1.0, 0.4), (2.0, 0.01), (3.0, 0.7)):
        clock.now = 100.0 + begin + now + late
        recorder.beat(Beat(now, (), 0.0, 0.0))
    recorder.ended(LevelRun("decided", 5.0, tuple(unfinished), (), 0.0))


def test_requests_of_all_levels_stand_at_their_times_in_the_whole_run() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    run_level(recorder, clock, 2.0, request(0.5, 0.1, 0.01), request(0.7, 0.3, 0.03))
    run_level(
        recorder, clock, 10.0, request(0.2, 2.0, 0.05), request(0.4, 0.1, 0.01, error="timeout"),
        unfinished=[1.5],
    )  # fmt: skip

    found = recorder.series()

    assert found is not None
    assert found.step_seconds == 1.0
    assert found.levels == pytest.approx((2.01, 10.01))
    assert found.rate == (0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 1)
    assert found.failed == (*(0,) * 10, 1, 0)
    assert found.ttft_p50[2] == pytest.approx(0.2)
    assert found.ttft_p95[2] == pytest.approx(0.29)
    assert found.itl_p50[2] == pytest.approx(0.02)
    assert found.itl_p50[10] == pytest.approx(0.05), "one that failed has no mean pause"
    assert found.ttft_p50[0] is None


def test_the_servers_load_is_that_of_all_replicas_and_a_gap_where_one_is_unknown() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    run_level(recorder, clock, 0.0, request(0.5, 0.1, 0.01))
    for at, loads in (
        (1.0, [ServerLoad("a-0", 3, 1, 0.2, 8), ServerLoad("a-1", 1, 0, 0.4, 8)]),
        (2.0, [ServerLoad("a-0", 3, 1, 0.2, 8), "a-1: no answer"]),
        (3.0, []),
    ):
        clock.now = 100.0 + at
        recorder.load(loads)

    found = recorder.series()

    assert found is not None
    assert found.running == (None, 4)
    assert found.waiting == (None, 1)
    assert found.kv_usage == (None, pytest.approx(0.3))


@pytest.mark.parametrize("seconds", [1, 239, 240, 3600, 20_000, 1_000_000])
def test_a_run_of_any_length_has_no_more_steps_than_a_page_can_show(seconds: int) -> None:
    requests = Requests()
    for due in range(0, seconds, max(1, seconds // 1000)):
        requests.add(float(due), 0.1, None, failed=False)

    found = time_series(requests, [], [0.0])

    assert found is not None
    assert len(found.rate) <= MOST_STEPS
    assert sum(found.rate) * found.step_seconds == pytest.approx(len(requests.due), rel=1e-3)
    assert found.itl_p50 == (None,) * len(found.rate)


def test_a_run_without_a_request_has_no_series() -> None:
    assert Recorder(Clock()).series() is None
