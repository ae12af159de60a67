"""A comparison names a difference only where the data shows one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.compare_results import (
    NOTHING,
    Comparison,
    compare,
    compare_foreign,
    independent_requests,
)
from gpufleet.load_test.foreign_results import read_foreign
from gpufleet.load_test.foreign_values import ForeignResult
from gpufleet.load_test.intervals import percentiles, wilson
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.result import Client, Measurement, RateBracket
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.load_test.sample_results import (
    CLOSED,
    CONTRACT,
    LEVELS,
    SUBJECT,
    WORKLOAD,
    latencies,
    level,
    measurement,
)


def rates(kept: float | None, missed: float | None) -> Measurement:
    """Return a measurement that found these, and has no level."""
    return measurement(levels=(), found=RateBracket(kept, missed, "found"))


def one_level(found: LevelSummary) -> Measurement:
    return measurement(levels=(found,), found=RateBracket(None, None, "one rate"))


def test_a_measurement_does_not_differ_from_itself() -> None:
    found = compare(measurement(), measurement())
    assert found.differences == ()
    assert found.verdict == NOTHING == "these measurements show no difference"
    assert found.changed == ()
    assert len(found.same) == 1 + len(LEVELS)


# -- found rates


@each_row(
    "a, b, words",
    [
        (
            (4, 5),
            (6, 7),
            "it can serve more: 4 to 5 requests/s before, 6 to 7 now (at least 1 more)",
        ),
        (
            (6, 7),
            (4, 5),
            "it can serve less: 6 to 7 requests/s before, 4 to 5 now (at least 1 less)",
        ),
        ((4, 5), (5, 6), "at least 0 more"),
        ((4, 5), (4.9, 6), None),
        ((4, 5), (3, 9), None),
        ((4, 5), (3, None), None),
        ((4, 5), (6, None), "4 to 5 requests/s before, 6 or more now"),
        ((4, 5), (None, 4.5), None),
        ((4, 5), (None, 3), "4 to 5 requests/s before, 0 to 3 now"),
        ((4, 5), (None, None), None),
    ],
    ids=str,
)
def test_found_rates_differ_where_their_intervals_do_not_overlap(
    a: Any, b: Any, words: str | None
) -> None:
    found = compare(rates(*a), rates(*b))
    if words is None:
        assert found.differences == ()
        assert "the load at which the contract is met" in found.same
    else:
        (said,) = found.differences
        assert words in said
    assert found.not_compared == ("levels: the two results have no load in common",)


# -- levels


def test_what_two_closed_loops_keep_is_compared_too() -> None:
    more = replace(CLOSED, found=replace(CLOSED.found, kept=16.0, missed=20.0))

    found = compare(measurement(closed=CLOSED), measurement(closed=more))

    assert any("in a closed loop: it can serve more: 8 to 12" in e for e in found.differences)
    same = compare(measurement(closed=CLOSED), measurement(closed=CLOSED))
    assert "the concurrency of a closed loop at which the contract is met" in same.same


def test_shares_differ_where_their_intervals_do_not_overlap() -> None:
    before = one_level(level(4.0, 380, 400, (0.925, 0.97), "not known"))
    near = one_level(level(4.0, 360, 400, (0.865, 0.927), "missed"))
    far = one_level(level(4.0, 340, 400, (0.81, 0.88), "missed"))
    assert compare(before, near).differences == ()
    assert compare(before, far).differences == (
        "at 4 requests/s: 95.0% (92.5% to 97.0%) of requests met the contract before, "
        "85.0% (81.0% to 88.0%) now",
    )


def test_levels_of_unequal_load_are_never_compared() -> None:
    before = one_level(level(4.0, 400, 400, (0.98, 1.0), "kept"))
    after = one_level(level(4.1, 0, 400, (0.0, 0.02), "missed"))
    assert compare(before, after).differences == ()
    # A search that works the same rate out in two ways meets it.
    last_digit = one_level(level(4.0 * (1 + 1e-12), 0, 400, (0.0, 0.02), "missed"))
    assert len(compare(before, last_digit).differences) == 1


def test_of_a_level_that_was_measured_twice_the_last_counts() -> None:
    bad = level(4.0, 100, 400, (0.2, 0.3), "missed")
    good = level(4.0, 400, 400, (0.98, 1.0), "kept")
    twice = measurement(levels=(bad, good), found=RateBracket(None, None, ""))
    assert compare(twice, one_level(good)).differences == ()


def test_a_latency_differs_where_a_percentile_lies_above_a_higher_one() -> None:
    before = one_level(level(4.0, 990, 1000, (0.98, 0.995), "kept", ttft=latencies(0.1)))
    # p95 of 0.25 s x 1.7 is above p99 of 0.4 s.
    after = one_level(level(4.0, 990, 1000, (0.98, 0.995), "kept", ttft=latencies(0.17)))
    assert compare(before, after).differences == (
        "at 4 requests/s: TTFT is slower: p95 of 425 ms now, p99 of 400 ms before",
    )
    assert compare(after, before).differences == (
        "at 4 requests/s: TTFT is faster: p99 of 400 ms now, p95 of 425 ms before",
    )
    near = one_level(level(4.0, 990, 1000, (0.98, 0.995), "kept", ttft=latencies(0.12)))
    assert compare(before, near).differences == ()


def test_few_or_correlated_requests_show_less() -> None:
    def pair(requests: int, interval: tuple[float, float]) -> Comparison:
        kept = round(requests * 0.99)
        both = [
            one_level(level(4.0, kept, requests, interval, "kept", ttft=latencies(p50)))
            for p50 in (0.1, 0.17)
        ]
        return compare(*both)

    assert pair(1000, (0.98, 0.995)).differences
    assert not pair(60, (0.92, 0.999)).differences
    # As many requests, that tell as much as a few independent ones.
    assert not pair(1000, (0.90, 0.999)).differences


def test_the_number_of_independent_requests_is_that_of_the_interval() -> None:
    for worth in (20.0, 100.0, 400.0):
        low, high = wilson(0.95 * worth, worth, 0.95)
        found = level(4.0, 950, 1000, (low, high), "not known")
        assert independent_requests(found) == pytest.approx(worth, rel=1e-3)
    # Never more than were answered, none where nothing is known.
    assert independent_requests(level(4.0, 95, 100, (0.949, 0.951), "kept")) == 100
    assert independent_requests(level(4.0, 95, 100, (0.0, 1.0), "not known")) < 1
    assert independent_requests(level(4.0, 0, 0, (0.0, 1.0), "not known")) == 0


def test_equal_servers_rarely_differ_by_chance() -> None:
    """300 pairs of levels from one distribution: fewer than 2 % show a difference."""
    draw = random.Random(11)
    wrong = 0

    def sample() -> Measurement:
        times = [draw.lognormvariate(-1.5, 0.8) for _ in range(400)]
        kept = sum(each <= 1.0 for each in times)
        return one_level(
            level(4.0, kept, 400, tuple(wilson(kept, 400, 0.95)), "not known",
                  ttft=percentiles(times), itl={}, e2e={})
        )  # fmt: skip

    for _ in range(300):
        wrong += bool(compare(sample(), sample()).differences)
    assert wrong < 6


# -- what is refused, and what has changed


@each_row(
    "changes, words",
    [
        ({"workload": {**WORKLOAD, "input": "256-1024"}},
         "workload.input is 512 in the first result, but 256-1024 in the second"),
        ({"workload": {**WORKLOAD, "prefix_groups": 4}},
         "workload.prefix_groups is none in the first result, but 4 in the second"),
        ({"contract": replace(CONTRACT, ttft_seconds=0.3)},
         "contract.ttft_seconds 0.5 in the first result, but 0.3 in the second"),
        ({"contract": replace(CONTRACT, e2e_seconds=3.0)},
         "contract.e2e_seconds none in the first result, but 3.0 in the second"),
        ({"loop": "closed"}, "the loop is open in the first result, but closed in the second"),
    ],
    ids=str,
)  # fmt: skip
def test_unlike_workloads_contracts_and_loops_are_refused_with_the_field(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(FleetError) as raised:
        compare(measurement(), measurement(**changes))
    (problem,) = raised.value.problems
    assert problem == f"they cannot be compared: {words}"


def test_another_seed_is_no_other_workload() -> None:
    other = measurement(workload={**WORKLOAD, "seed": 8})
    assert compare(measurement(), other).verdict == NOTHING


def test_what_was_changed_between_two_measurements_is_named() -> None:
    after = measurement(
        target="gateway gw-1",
        replicas=2,
        replicas_of=3,
        subject=replace(
            SUBJECT,
            release="0.33.0-ffff",
            driver=None,
            nodes=("gpu-01", "gpu-02"),
            arguments=(*SUBJECT.arguments, "--enforce-eager"),
        ),
    )
    assert compare(measurement(), after).changed == (
        "target replica llama-0, now gateway gw-1",
        "replicas that served 1 replica, now 2 of 3 replicas",
        "release 0.32.0-1a2b3c4d5e, now 0.33.0-ffff",
        "arguments none of these, now --enforce-eager",
        "driver 580.65.06, now unknown",
        "nodes gpu-01, now gpu-01 gpu-02",
    )


def test_the_lines_for_a_terminal_always_have_a_verdict() -> None:
    assert [*compare(rates(4, 5), rates(4, 5)).lines()] == [
        "differences beyond noise:",
        f"  {NOTHING}",
        "no difference seen:",
        "  the load at which the contract is met",
        "not compared:",
        "  levels: the two results have no load in common",
    ]
    changed = Comparison(("driver 1, now 2",), ("it is slower",), (), ())
    assert [*changed.lines()] == [
        "changed:", "  driver 1, now 2", "differences beyond noise:", "  it is slower",
    ]  # fmt: skip


# -- other tools


def foreign(**changes: Any) -> ForeignResult:
    (found,) = read_foreign(ROOT / "tests/data/load_test/vllm_bench_serve.json")
    return replace(found, **changes)


def test_another_tools_latencies_are_compared_at_an_equal_rate_with_its_reservations() -> None:
    # TTFT and ITL of the file are those of the level; its p99 alone is known of ITL.
    same = compare_foreign(measurement(), [foreign()])
    assert same.verdict == NOTHING
    assert same.same == ("latencies at 4 requests/s, vllm bench serve",)
    assert "vllm bench serve: the file has no e2e" in same.not_compared
    assert any("10 failed requests" in each for each in same.not_compared)
    slow = compare_foreign(measurement(), [foreign(ttft=latencies(0.4))])
    assert slow.differences == (
        "at 4 requests/s, vllm bench serve: TTFT is slower: p95 of 1 s there, p99 of 320 ms here",
    )


def test_another_tools_rate_below_a_bound_on_concurrency_is_another_load() -> None:
    found = compare_foreign(measurement(), [foreign(concurrency=64), foreign(rate=None)])
    assert found.differences == found.same == ()
    assert found.not_compared[-2:] == (
        "vllm bench serve at 4 requests/s with at most 64 concurrent requests: no level of this "
        "result has this load",
        "vllm bench serve at an unknown load: no level of this result has this load",
    )
    closed = measurement(
        loop="closed", levels=tuple(replace(e, rate=None, concurrency=16) for e in LEVELS)
    )
    met = compare_foreign(closed, [foreign(rate=None, concurrency=16)])
    assert met.same or met.differences


def test_results_of_unequal_numbers_of_replicas_are_not_like_with_like() -> None:
    """Three carry 12, two of them 8: together that is less, of one it is nothing."""
    whole = measurement(
        target="gateway gw-1", replicas=3, replicas_of=3, found=RateBracket(12.0, 15.0, "found")
    )
    left = measurement(
        target="gateway gw-1", replicas=2, replicas_of=3, found=RateBracket(8.0, 10.0, "found")
    )

    found = compare(whole, left)

    said = "3 of 3 replicas served before, 2 of 3 replicas now: the total rates differ even"
    assert [*found.lines()][:2] == [
        "not the same conditions:",
        f"  {said} if each replica is equally fast",
    ]
    assert found.verdict.startswith(said)
    assert any("it can serve less" in each for each in found.differences)
    assert "the load that one replica can serve" in found.same
    assert compare(whole, whole).unlike == ()


def test_one_replica_that_carries_less_beside_fewer_is_a_difference() -> None:
    whole = measurement(replicas=3, replicas_of=3, found=RateBracket(12.0, 15.0, "found"))
    left = measurement(replicas=2, replicas_of=3, found=RateBracket(4.0, 6.0, "found"))

    assert any(
        each.startswith(
            "of one replica: it can serve less: 4 to 5 requests/s a replica before, 2 to 3"
        )
        for each in compare(whole, left).differences
    )


def test_another_part_of_a_fleet_is_said_where_both_parts_are_known() -> None:
    two = [measurement(replicas=2, replicas_of=of) for of in (2, 3, None)]

    assert "of equal size" in compare(two[0], two[1]).verdict
    assert compare(two[0], two[2]).unlike == ()


def test_clients_on_another_machine_are_a_possible_cause() -> None:
    there = measurement(client=Client(2, 900.0, 0.0011, 0.0012, "load-01"))

    assert compare(measurement(), there).changed == (
        "clients on controller, now on load-01, with a different network path to the servers",
    )
