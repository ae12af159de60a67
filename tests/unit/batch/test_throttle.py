"""What the fleet has idle is approached slowly, and left at once."""

from __future__ import annotations

from gpufleet.batch.throttle import STALE_SECONDS, Throttle
from gpufleet.load_test.guest import Allowance


def test_it_begins_with_one_line_and_doubles_at_each_look() -> None:
    throttle = Throttle(None, 0.0)
    limits = [throttle.limit(0.0)]
    for now in range(6):
        throttle.allow(Allowance(20), now)
        limits.append(throttle.limit(now))

    assert limits == [0, 1, 2, 4, 8, 16, 20]


def test_it_asks_nothing_while_others_wait_and_begins_with_one_line_again() -> None:
    throttle = Throttle(None, 0.0)
    for now in range(5):
        throttle.allow(Allowance(20), now)
    throttle.allow(Allowance(0, "3 requests wait for tiny-0"), 5.0)

    assert (throttle.limit(5.0), throttle.why(5.0)) == (0, "3 requests wait for tiny-0")
    throttle.allow(Allowance(20), 6.0)
    assert (throttle.limit(6.0), throttle.why(6.0)) == (1, "")


def test_what_was_typed_is_never_exceeded() -> None:
    throttle = Throttle(3, 0.0)
    for now in range(5):
        throttle.allow(Allowance(20), now)

    assert throttle.limit(5.0) == 3


def test_an_old_look_allows_nothing() -> None:
    throttle = Throttle(None, 0.0)
    throttle.allow(Allowance(20), 0.0)

    assert throttle.limit(STALE_SECONDS) == 1
    assert throttle.limit(STALE_SECONDS + 1) == 0
    assert "no longer known" in throttle.why(STALE_SECONDS + 1)


def ready() -> Throttle:
    throttle = Throttle(None, 0.0)
    for _ in range(5):
        throttle.allow(Allowance(16), 0.0)
    assert throttle.limit(0.0) == 16
    return throttle


def test_all_lines_that_fail_at_once_are_one_event() -> None:
    throttle = ready()
    for number in range(16):
        throttle.record_failure(0.0, 10 + number / 100)

    assert throttle.limit(10.9) == 0
    assert throttle.limit(11.0) == 1


def test_a_fleet_that_goes_on_failing_is_asked_at_longer_and_longer_times() -> None:
    throttle, now, holds = ready(), 1.0, []
    for _ in range(8):
        throttle.record_failure(now, now)
        begin = now
        while not throttle.limit(now):
            now += 0.5
            throttle.allow(Allowance(16), now)
        holds.append(now - begin)

    assert holds == [1, 2, 4, 8, 16, 32, 60, 60]


def test_an_answer_ends_the_series() -> None:
    throttle = ready()
    throttle.record_failure(1.0, 1.0)
    throttle.record_success()

    assert throttle.limit(1.5) == 0
    assert throttle.limit(2.0) == 16


def test_the_fleet_says_how_long_to_wait_up_to_a_minute() -> None:
    for asked, held in ((5.0, 5.0), (86400.0, 60.0)):
        throttle = ready()
        throttle.record_failure(0.0, 0.0, asked)
        assert (throttle.limit(held - 0.1), throttle.limit(held)) == (0, 1)
