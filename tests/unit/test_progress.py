"""A line says how far it is, how fast, and how long it still takes; and there are few of them."""

from __future__ import annotations

import pytest

from gpufleet.progress import Amount, Count, Pace, amount_of, wait_text

pytestmark = pytest.mark.slow

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def amount(*looks: tuple[float, int], total: int | None = None) -> str:
    found = Amount()
    for at, done in looks:
        found.record(at, done, total)
    return found.text()


def test_a_line_has_amount_rate_and_remaining_time() -> None:
    # 1 GiB of 5 in 10 s: 102.4 MiB/s, and the other 4 take 40 s.
    assert amount((0, 0), (10, GIB), total=5 * GIB) == "1.0 of 5.0 GiB, 102 MiB/s, 40 s left"


def test_without_a_total_no_remaining_time_is_said() -> None:
    assert amount((0, 0), (10, GIB)) == "1.0 GiB so far, 102 MiB/s"


def test_a_total_that_is_passed_was_none() -> None:
    assert amount((0, 0), (10, GIB), total=GIB - 1) == "1.0 GiB so far, 102 MiB/s"


def test_the_first_look_knows_no_rate() -> None:
    assert amount((7, 12 * KIB), total=20 * KIB) == "12.0 of 20.0 KiB"
    assert amount() == ""


def test_the_rate_is_that_of_the_recent_looks() -> None:
    """An hour at 1 GiB/s, then 15 s at 1 MiB/s: what is left goes at 1 MiB/s."""
    fast = [(at, at * GIB) for at in range(0, 3600, 5)]
    last = fast[-1][1]
    slow = [(3595 + each, last + each * MIB) for each in (5, 10, 15, 20)]
    assert amount(*fast, *slow, total=last + 80 * MIB).endswith("1.0 MiB/s, 1 min left")


def test_what_stands_says_for_how_long() -> None:
    looks = [(0, 0), (5, GIB), (10, GIB), (15, GIB), (19, GIB)]
    assert "no progress" not in amount(*looks, total=2 * GIB)
    assert amount(*looks, (35, GIB), total=2 * GIB) == "1.0 of 2.0 GiB, no progress for 30 s"
    assert amount(*looks, (35, GIB)) == "1.0 GiB so far, no progress for 30 s"


def test_what_stands_from_the_first_byte_says_so() -> None:
    assert amount((0, 0), (20, 0), total=GIB) == "0.0 of 1.0 GiB, no progress for 20 s"


def test_what_is_all_there_does_not_stand() -> None:
    assert amount((0, 0), (5, GIB), (60, GIB), total=GIB) == "1.0 of 1.0 GiB"


def test_what_goes_on_after_a_standstill_has_a_rate_again() -> None:
    looks = [(0, 0), (5, GIB), (60, GIB), (65, 2 * GIB)]
    assert amount(*looks, total=4 * GIB).startswith("2.0 of 4.0 GiB, ")
    assert "no progress" not in amount(*looks, total=4 * GIB)
    assert " left" in amount(*looks, total=4 * GIB)


def test_what_is_begun_anew_has_no_negative_rate() -> None:
    looks = [(0, 0), (5, 3 * GIB), (10, 1 * GIB)]
    assert amount(*looks, total=4 * GIB) == "1.0 of 4.0 GiB"
    assert amount(*looks, (20, 2 * GIB), total=4 * GIB).endswith("102 MiB/s, 20 s left")


@pytest.mark.parametrize(
    ("done", "total", "said"),
    [
        (0, 0, "0 of 0 bytes"),
        (512, 1023, "512 of 1023 bytes"),
        (KIB, MIB, "0.0 of 1.0 MiB"),
        (12 * GIB, 53 * GIB, "12.0 of 53.0 GiB"),
        (12 * GIB, 700 * GIB, "12 of 700 GiB"),
        (GIB, 3 << 40, "0.0 of 3.0 TiB"),
    ],
)
def test_both_numbers_have_the_unit_of_the_whole(done: int, total: int, said: str) -> None:
    assert amount_of(done, total) == said


def test_things_are_counted_and_those_that_are_missing_named() -> None:
    names = ["gpu-31", "gpu-07", "gpu-12"]
    assert (
        wait_text("node", 64, names, 12.3)
        == "61 of 64 nodes after 12 s, 3 left: gpu-07, gpu-12, gpu-31"
    )
    assert wait_text("node", 2, [], 75) == "2 of 2 nodes after 1 min 15 s"


def test_of_one_nothing_is_counted() -> None:
    assert wait_text("node", 1, ["gpu-31"], 12.3) == "waiting for gpu-31, 12 s so far"


def test_of_many_that_are_missing_the_first_are_named() -> None:
    names = [f"gpu-{each:02}" for each in range(30)]
    said = wait_text("node", 64, names, 5)
    assert said == "34 of 64 nodes after 5 s, 30 left: gpu-00, gpu-01, gpu-02 and 27 more"


def test_lines_come_after_2_s_then_every_5_then_every_30() -> None:
    pace = Pace(1000.0)
    due = [tenth / 10 for tenth in range(3000) if pace.is_due(1000.0 + tenth / 10)]
    assert due == [
        2,
        7,
        12,
        17,
        22,
        27,
        32,
        37,
        42,
        47,
        52,
        57,
        62,
        92,
        122,
        152,
        182,
        212,
        242,
        272,
    ]


def test_six_hours_are_some_seven_hundred_lines() -> None:
    pace = Pace(0.0)
    assert 700 < sum(pace.is_due(at) for at in range(6 * 3600)) < 750


def test_a_count_has_its_rate_and_the_time_that_is_left() -> None:
    count = Count("line", 2000)
    said = []
    for now, done in ((0, 0), (0.5, 1), (40, 400), (160, 400), (170, 500)):
        count.record(now, done)
        said.append(count.text())

    assert said == [
        "0 of 2000 lines",
        "1 of 2000 lines",
        "400 of 2000 lines, 10/s, 2 min 40 s left",
        # Nothing for two minutes: no rate.
        "400 of 2000 lines",
        "500 of 2000 lines, 0.769/s, 32 min 30 s left",
    ]


def test_a_count_that_is_recorded_all_the_time_keeps_few_looks() -> None:
    count = Count("line", 10**6)
    for tick in range(100_000):
        count.record(tick / 100, tick)

    assert len(count._looks) < 130
    assert "100/s" in count.text()
