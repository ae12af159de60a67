"""The search for the highest rate, on simulated queues and on servers with a limit by a rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.rate_search import (
    MOST_HALVINGS,
    MOST_UNKNOWN,
    MOST_UNKNOWN_DOUBLED,
    RateSearch,
    SearchResult,
    find_knee,
    itl_runaway,
)
from gpufleet.load_test.verdicts import NO_JUDGEMENT, Verdict
from tests.support.rows import each_row
from tests.support.simulated_queue import measure, rate_of

TIGHT = Contract(ttft_seconds=0.02, share=0.9)
SLOTS = 16


def level(
    load: float, verdict: Verdict = "kept", tokens: float = 0, itl: float = 0
) -> LevelSummary:
    """Return what a level showed, as far as a search reads it."""
    return LevelSummary(
        rate=load,
        concurrency=None,
        seconds=60.0,
        requests=600,
        kept=590,
        low=NO_JUDGEMENT.interval.low,
        high=NO_JUDGEMENT.interval.high,
        verdict=verdict,
        why="its numbers",
        ended="resolved",
        warm_up_seconds=1.0,
        errors={},
        ttft={},
        itl={"p99": itl} if itl else {},
        e2e={},
        mean_concurrency=1.0,
        output_tokens_per_second=tokens,
        prompt_tokens_per_second=0.0,
        dispatch_lag_p99=0.0,
    )


def search_on(search: RateSearch, judge: Callable[[float, int], Verdict]) -> list[float]:
    """Answer a search by a rule that takes load and budget; return what it asked for."""
    asked = []
    while (load := search.next()) is not None:
        asked.append(load)
        search.add(level(load, judge(load, search.budget_factor)))
    return asked


def loads(found: SearchResult) -> tuple[float | None, float | None]:
    return found.kept and found.kept.load, found.missed and found.missed.load


def find(budget: float, seed: int) -> SearchResult:
    """Search on a simulated server, from a start that the seed draws."""
    search, tried = RateSearch(random.Random(seed).uniform(0.5, 1), 100.0), 0
    while (rate := search.next()) is not None:
        seconds = budget * search.budget_factor
        search.add(measure(TIGHT, rate, SLOTS, budget=seconds, seed=1000 * seed + tried))
        tried += 1
    return search.result()


@pytest.mark.slow
def test_the_rate_of_a_queue_is_found_within_a_tenth_in_20_of_20_runs() -> None:
    """Where the two ends are further apart than a tenth of the lower one, the result says so."""
    true = rate_of(TIGHT.share, TIGHT.ttft_seconds or 0.0, SLOTS, 1.0)
    statuses = []
    for seed in range(20):
        found = find(900, seed)
        kept, missed = loads(found)
        assert kept is not None
        assert missed is not None
        assert 0.9 * true <= kept <= true < missed <= 1.1 * true
        assert (found.status == "found") == (missed <= 1.1 * kept)
        statuses.append(found.status)
    assert statuses.count("found") >= 18


@pytest.mark.slow
def test_with_a_small_budget_the_rate_is_not_known_and_never_wrong() -> None:
    """45 s are enough for levels at half and twice the limit, not for those close to it."""
    true = rate_of(TIGHT.share, TIGHT.ttft_seconds or 0.0, SLOTS, 1.0)
    statuses = []
    for seed in range(20):
        found = find(45, seed)
        statuses.append(found.status)
        kept, missed = loads(found)
        assert (kept or 0.0) <= true <= (missed or 100.0)
        for each in found.unknown:
            assert (kept or 0.0) < each.load < (missed or 101.0)
            assert found.status == "found" or format(each.load, "g") in found.why
    assert statuses.count("not known") >= 19


def test_it_doubles_until_a_level_is_missed_and_then_bisects() -> None:
    search = RateSearch(1, 100)
    asked = search_on(search, lambda load, _: "kept" if load <= 11.2 else "missed")
    assert asked == [1, 2, 4, 8, 16, 12, 10, 11]
    assert search.result().status == "found"
    assert loads(search.result()) == (11, 12)


@each_row("limit", [1.0, 1.3, 3.7, 8.0, 8.1, 29.0, 63.0])
def test_whatever_the_limit_it_is_enclosed_within_the_tolerance(limit: float) -> None:
    for tolerance in (0.02, 0.1, 0.5):
        search = RateSearch(1, 64, tolerance)
        search_on(search, lambda load, _: "kept" if load <= limit else "missed")
        kept, missed = loads(search.result())
        assert search.result().status == "found"
        assert kept is not None
        assert missed is not None
        assert kept <= limit < missed <= kept * (1 + tolerance)


def test_a_level_without_a_verdict_is_tried_once_more_with_twice_the_budget() -> None:
    search = RateSearch(4, 100)
    assert (search.next(), search.budget_factor) == (4, 1)
    search.add(level(4, "not known"))
    assert (search.next(), search.budget_factor) == (4, 2)
    search.add(level(4, "kept"))
    assert (search.next(), search.budget_factor) == (8, 1)
    assert search.result().unknown == ()


def test_a_level_without_a_verdict_never_bounds_the_result() -> None:
    """The limit is 10; levels within 2 % of it have no verdict."""
    for at in range(60):
        start = 1 + at / 60
        search = RateSearch(start, 100)
        search_on(
            search,
            lambda load, _: (
                "not known" if abs(load - 10) < 0.2 else "kept" if load < 10 else "missed"
            ),
        )
        found = search.result()
        kept, missed = loads(found)
        assert found.status == "found", found.why
        assert kept is not None
        assert missed is not None
        assert kept <= 9.8
        assert 10.2 <= missed <= 1.1 * kept
        assert all(abs(each.load - 10) < 0.2 for each in found.unknown)


def test_ends_come_close_to_levels_without_a_verdict_that_no_tenth_encloses() -> None:
    """Levels between 9.5 and 10.5 stay undecided."""
    close = 1.1**0.25 * (1 + 1e-5)
    judged = 0
    for at in range(60):
        search = RateSearch(1 + at / 60, 100, budget_levels=40)
        search_on(
            search,
            lambda load, _: (
                "not known" if 9.5 <= load <= 10.5 else "kept" if load < 9.5 else "missed"
            ),
        )
        found = search.result()
        kept, missed = loads(found)
        unknown = [each.load for each in found.unknown]
        assert kept is not None
        assert missed is not None
        if found.status == "not known" and len(unknown) < MOST_UNKNOWN:
            judged += 1
            assert kept * close >= min(unknown)
            assert missed <= max(unknown) * close
    assert judged > 5


def test_where_many_levels_have_no_verdict_the_result_is_not_known_and_names_them() -> None:
    """Levels between 8 and 12 stay undecided, so no bracket is within a tenth."""
    for at in range(60):
        search = RateSearch(1 + at / 60, 100, budget_levels=30)
        asked = search_on(
            search,
            lambda load, _: "not known" if 8 <= load <= 12 else "kept" if load < 8 else "missed",
        )
        found = search.result()
        kept, missed = loads(found)
        assert found.status == "not known"
        assert kept is not None
        assert missed is not None
        assert 6.5 <= kept < 8
        assert 12 < missed <= 15
        assert 0 < len(found.unknown) <= MOST_UNKNOWN
        assert [each.load for each in found.unknown] == sorted({x for x in asked if 8 <= x <= 12})
        assert all(format(each.load, "g") in found.why for each in found.unknown)


def test_a_search_stops_doubling_where_twice_the_load_has_no_verdict_either() -> None:
    """Where the client is late, for example: more load would only make it later."""
    search = RateSearch(0.5, 3000)
    asked = search_on(search, lambda load, _: "kept" if load <= 16 else "not known")
    found = search.result()
    assert asked == [0.5, 1, 2, 4, 8, 16, 32, 32, 64, 64]
    assert (found.status, loads(found)) == ("not known", (16, None))
    assert [each.load for each in found.unknown] == [32, 64]
    assert len(found.unknown) == MOST_UNKNOWN_DOUBLED


def test_low_levels_with_few_requests_do_not_end_the_search() -> None:
    search = RateSearch(0.1, 100, budget_levels=30)
    search_on(
        search, lambda load, _: "not known" if load < 1.5 else "kept" if load < 5 else "missed"
    )
    assert search.result().status == "found"
    assert search.result().unknown == ()


def test_not_even_the_smallest_load_is_kept_and_its_numbers_are_told() -> None:
    search = RateSearch(0.5, 100)
    assert search_on(search, lambda *_: "missed") == [0.5]
    found = search.result()
    assert (found.status, loads(found)) == ("not even one", (None, 0.5))
    assert "its numbers" in found.why


@each_row("limit", [0.3, 0.13, 0.06])
def test_below_a_first_load_that_is_missed_a_limit_is_found(limit: float) -> None:
    search = RateSearch(0.5, 100, least=1 / 60)
    search_on(search, lambda load, _: "kept" if load <= limit else "missed")
    found = search.result()
    kept, missed = loads(found)
    assert found.status == "found"
    assert kept is not None
    assert missed is not None
    assert kept <= limit < missed <= 1.1 * kept


def test_only_a_miss_of_one_request_at_a_time_is_not_even_one() -> None:
    search = RateSearch(0.5, 100, least=0.1)
    assert search_on(search, lambda *_: "missed") == [0.5, 0.25, 0.125, 0.1]
    found = search.result()
    assert found.status == "not even one"
    assert found.why == "even one request at a time, 0.1, does not meet the contract: its numbers"
    search = RateSearch(0.5, 100, least=0.001)
    asked = search_on(search, lambda *_: "missed")
    assert asked == [0.5 / 2**n for n in range(MOST_HALVINGS + 1)]
    assert search.result().status == "budget"
    assert "known not to meet it is 0.03125" in search.result().why


def test_a_first_load_below_one_request_at_a_time_is_the_smallest() -> None:
    search = RateSearch(0.5, 100, least=4.0)
    assert search_on(search, lambda *_: "missed") == [0.5]
    assert search.result().status == "not even one"


def test_a_level_below_the_first_without_a_verdict_is_passed() -> None:
    search = RateSearch(0.5, 100, least=0.01)
    search_on(
        search,
        lambda load, _: "not known" if 0.2 < load < 0.3 else "kept" if load <= 0.2 else "missed",
    )
    found = search.result()
    kept, missed = loads(found)
    assert found.status == "not known"
    assert kept is not None
    assert missed is not None
    assert kept <= 0.2
    assert 0.3 <= missed < 0.5


def test_the_most_that_may_be_tried_is_a_ceiling_and_is_never_exceeded() -> None:
    search = RateSearch(3, 20)
    assert search_on(search, lambda *_: "kept") == [3, 6, 12, 20]
    assert search.result().status == "ceiling"
    assert loads(search.result()) == (20, None)


def test_a_most_without_a_verdict_is_not_known_but_close_below_is_kept() -> None:
    search = RateSearch(3, 20)
    asked = search_on(search, lambda load, _: "not known" if load > 19.5 else "kept")
    found = search.result()
    assert max(asked) == 20
    assert found.status == "not known"
    assert [each.load for each in found.unknown] == [20]
    assert found.kept is not None
    assert found.kept.load >= 20 / 1.1


def test_a_search_ends_with_its_budget_of_levels_second_tries_counted() -> None:
    search = RateSearch(1, 1000, budget_levels=6)
    assert len(search_on(search, lambda load, _: "kept" if load < 9 else "missed")) == 6
    found = search.result()
    assert (found.status, loads(found)) == ("budget", (8, 12))
    search = RateSearch(1, 1000, budget_levels=5)
    assert search_on(search, lambda *_: "not known") == [1, 1, 2, 2, 4]
    assert search.result().status == "not known"


@each_row("limit", [1, 2, 5, 7, 13, 100])
def test_concurrency_is_searched_in_whole_numbers_down_to_neighbours(limit: int) -> None:
    search = RateSearch(1, 256, 0.1, whole=True)
    asked = search_on(search, lambda load, _: "kept" if load <= limit else "missed")
    kept, missed = loads(search.result())
    assert all(load == int(load) for load in asked)
    assert len(set(asked)) == len(asked)
    assert search.result().status == "found"
    assert kept is not None
    assert missed is not None
    assert kept <= limit < missed <= max(kept + 1, 1.1 * kept)


def test_whole_numbers_around_one_without_a_verdict_end_the_search() -> None:
    search = RateSearch(1, 64, whole=True)
    search_on(
        search, lambda load, _: "not known" if load == 5 else "kept" if load < 5 else "missed"
    )
    found = search.result()
    assert (found.status, loads(found)) == ("not known", (4, 6))
    assert [each.load for each in found.unknown] == [5]


def test_the_result_of_an_unfinished_search_is_what_is_known_so_far() -> None:
    search = RateSearch(1, 64)
    assert search.result().status == "budget"
    search.next()
    search.add(level(1, "kept"))
    assert loads(search.result()) == (1, None)


def test_what_was_not_asked_for_and_impossible_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="no level was asked for"):
        RateSearch(1, 64).add(level(1))
    for start, most in ((0, 5), (6, 5)):
        with pytest.raises(ValueError, match="0 < start <= most"):
            RateSearch(start, most)


def curve(*points: tuple[float, float]) -> list[LevelSummary]:
    return [level(load, tokens=tokens) for load, tokens in points]


def test_the_knee_is_where_throughput_stops_to_follow_the_load() -> None:
    found = find_knee(
        curve((16, 840), (1, 100), (2, 202), (12, 820), (4, 395), (8, 800), (32, 850))
    )
    assert found is not None
    assert found.load == 8


def test_the_knee_of_what_makes_no_text_is_that_of_its_prompts() -> None:
    levels = curve((16, 840), (1, 100), (2, 202), (12, 820), (4, 395), (8, 800), (32, 850))
    pooled = [
        replace(
            each,
            prompt_tokens_per_second=each.output_tokens_per_second,
            output_tokens_per_second=0.0,
        )
        for each in levels
    ]
    bend = find_knee(levels)
    assert bend is not None
    assert (find_knee(pooled) or pooled[0]).load == bend.load
    idle = [replace(each, prompt_tokens_per_second=100.0 * each.load) for each in pooled]
    assert find_knee(idle) is None


@each_row(
    "levels",
    [
        curve((1, 100), (2, 200), (4, 400), (8, 800)),
        curve((1, 101), (2, 198), (4, 405), (8, 795), (8.5, 840), (9, 895)),
        curve((1, 100), (2, 200), (4, 400), (8, 800), (8.4, 801)),
        [],
    ],
)
def test_without_a_bend_or_with_few_levels_there_is_no_knee(levels: list[LevelSummary]) -> None:
    assert find_knee(levels) is None


def test_itl_runs_away_where_it_grows_faster_than_the_load() -> None:
    levels = [level(load, itl=itl) for load, itl in ((8, 0.2), (1, 0.02), (4, 0.05), (2, 0.03))]
    found = itl_runaway(levels)
    assert found is not None
    assert found.load == 8


def test_itl_of_levels_that_are_close_to_each_other_is_not_compared() -> None:
    levels = [level(load, itl=itl) for load, itl in ((4, 0.03), (4.1, 0.04), (4.6, 0.032))]
    assert itl_runaway(levels) is None
    assert itl_runaway(levels[:1]) is None
    assert itl_runaway([level(1), level(2)]) is None


def test_of_two_tries_the_later_counts_and_levels_without_requests_do_not() -> None:
    levels = [
        level(2, itl=0.02),
        level(4, itl=0.9),
        level(4, itl=0.03),
        replace(level(8, itl=9.0), requests=0),
    ]
    assert itl_runaway(levels) is None
