"""Intervals, trends and correlation, against tables, `statistics` and simulation."""

from __future__ import annotations

import math
import random
import statistics
from itertools import islice

import pytest

from gpufleet.load_test.intervals import (
    autocorrelation_time,
    batch_means,
    find_steady,
    percentile,
    percentiles,
    slope,
    t_quantile,
    wilson,
)
from tests.support.rows import each_row
from tests.support.simulated_queue import requests


def waits(rate: float, slots: int, count: int, seed: int, skip: int = 0) -> list[float]:
    """Return what requests wait at a server with a service time of one second."""
    some = islice(requests(rate, slots, 1.0, seed), skip, skip + count)
    return [each.ttft or 0.0 for each in some]


def test_percentiles_are_those_of_the_library() -> None:
    values = [random.Random(1).expovariate(1) for _ in range(237)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentiles(values) == {"mean": pytest.approx(sum(values) / 237)} | {
        f"p{each}": pytest.approx(cuts[each - 1]) for each in (50, 90, 95, 99)
    }
    assert percentile([7.0], 99) == 7.0
    assert percentiles([]) == {}


@each_row(
    "probability, degrees, expected",
    # Student's t, from printed tables.
    [
        (0.975, 5, 2.5706),
        (0.995, 5, 4.0321),
        (0.975, 18, 2.1009),
        (0.999, 8, 4.5008),
        (0.9995, 30, 3.6460),
        (0.975, 120, 1.9799),
    ],
)
def test_quantiles_of_student_are_those_of_the_tables(
    probability: float, degrees: float, expected: float
) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=0.005)


def test_quantiles_of_student_are_refused_where_they_would_be_wrong() -> None:
    with pytest.raises(ValueError, match="must be 5 or more"):
        t_quantile(0.975, 4)


@each_row("kept, requests", [(0, 10), (95, 100), (100, 100), (4.5, 7.25)])
def test_bounds_of_wilson_solve_the_score_equation(kept: float, requests: float) -> None:
    """A bound is a share from which what was seen lies exactly z standard errors away."""
    z, share = 1.959964, kept / requests
    low, high = wilson(kept, requests, 0.95)
    for bound in (low, high):
        if 1e-9 < bound < 1 - 1e-9:
            error = math.sqrt(bound * (1 - bound) / requests)
            assert abs(share - bound) == pytest.approx(z * error, rel=1e-5)
    assert low - 1e-12 <= share <= high + 1e-12


def test_an_interval_is_wider_with_few_degrees_of_freedom_and_knows_nothing_from_nothing() -> None:
    plain, student = wilson(90, 100, 0.95), wilson(90, 100, 0.95, degrees=6)
    assert student.low < plain.low < plain.high < student.high
    assert wilson(0, 0, 0.95) == (0, 1)


def test_the_interval_of_a_slope_holds_the_true_one_as_often_as_it_promises() -> None:
    draw = random.Random(2)
    held = 0
    for _ in range(400):
        xs = [float(x) for x in range(20)]
        ys = [3 * x + draw.gauss(0, 5) for x in xs]
        found = slope(xs, ys, 0.9)
        assert found is not None
        assert found.value == pytest.approx(statistics.linear_regression(xs, ys).slope)
        held += found.low <= 3 <= found.high
    assert 0.87 <= held / 400 <= 0.93


def test_a_slope_is_not_known_from_few_points_or_from_one_place() -> None:
    assert slope([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 0.95) is None
    assert slope([1] * 9, range(9), 0.95) is None


def test_batches_take_all_values_and_differ_by_one_at_most() -> None:
    assert batch_means([1, 2, 3, 4, 5, 6, 7], 3) == [1.5, 3.5, 6]
    assert batch_means([1, 2], 20) == [1, 2]
    assert batch_means([]) == []


@each_row("memory, expected", [(0.0, 1.0), (0.5, 3.0), (0.9, 19.0)])
def test_autocorrelation_time_is_that_of_an_autoregressive_series(
    memory: float, expected: float
) -> None:
    """x' = memory x + noise has (1 + memory) / (1 - memory), by its geometric correlations."""
    draw, value, found = random.Random(3), 0.0, []
    for _ in range(20):
        series = []
        for _ in range(4000):
            value = memory * value + draw.gauss(0, 1)
            series.append(value)
        found.append(autocorrelation_time(series))
    assert statistics.fmean(found) == pytest.approx(expected, rel=0.25)


def test_a_series_without_variance_or_with_few_values_has_no_correlation() -> None:
    assert autocorrelation_time([1.0] * 50) == 1
    assert autocorrelation_time([1.0, 2.0]) == 1
    assert autocorrelation_time([]) == 1


@each_row(
    "rate, count, seeds",
    # Of an M/D/8 queue, with 20 times as many requests as the queue's autocorrelation time.
    [(4.0, 120, 200), (5.95, 480, 100), (7.33, 5000, 20)],
)
def test_a_stationary_series_loses_less_than_a_twentieth_on_average(
    rate: float, count: int, seeds: int
) -> None:
    dropped, unsteady = 0, 0
    for seed in range(seeds):
        series = waits(rate, 8, count, seed, skip=1500)
        steady = find_steady(range(count), series)
        dropped += steady.start
        unsteady += steady.drift != "none"
    assert dropped / (seeds * count) < 0.05
    assert unsteady <= 0.05 * seeds


def test_the_warm_up_of_a_queue_that_fills_up_ends_and_brings_its_mean_closer_to_the_true_one() -> (
    None
):
    """A server that starts empty, at 95 % of its capacity; the true mean is Pollaczek's."""
    rate, count, seeds = 0.95, 3000, 60
    true = rate / (2 * (1 - rate))
    whole, after, unsteady = [], [], 0
    for seed in range(seeds):
        series = waits(rate, 1, count, seed)
        steady = find_steady(range(count), series)
        unsteady += steady.drift != "none"
        whole.append(statistics.fmean(series))
        after.append(statistics.fmean(series[steady.start :]))
    assert unsteady <= seeds / 10
    assert statistics.fmean(whole) < statistics.fmean(after) - 0.3 < true


def test_a_server_that_fills_up_steadily_is_counted_once_it_is_full() -> None:
    draw = random.Random(6)
    series = [1 - math.exp(-at / 60) + draw.gauss(0, 0.1) for at in range(2000)]
    steady = find_steady(range(2000), series)
    assert steady.drift == "none"
    assert 100 <= steady.start <= 500


def test_a_cold_start_is_dropped() -> None:
    draw = random.Random(4)
    series = [draw.expovariate(1) + 30 * math.exp(-at / 60) for at in range(2000)]
    steady = find_steady(range(2000), series)
    assert steady.drift == "none"
    assert 100 <= steady.start <= 500


@each_row("direction, drift", [(1, "rising"), (-1, "falling")])
def test_a_trend_that_does_not_end_is_named(direction: int, drift: str) -> None:
    draw = random.Random(5)
    series = [direction * at / 100 + draw.expovariate(1) for at in range(1000)]
    assert find_steady(range(1000), series) == (500, drift)


def test_a_series_that_is_too_short_for_a_trend_is_taken_whole() -> None:
    assert find_steady([1, 2, 3], [1.0, 5.0, 9.0]) == (0, "none")
    assert find_steady([], []) == (0, "none")
