"""Verdicts about one level, against queues whose true share is known from theory."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from gpufleet.load_test.level import Level, LevelSummary
from gpufleet.load_test.outcomes import Contract, Outcome
from gpufleet.load_test.verdicts import fewest_requests, fewest_seconds, look_confidence, strains_of
from tests.support.rows import each_row
from tests.support.simulated_queue import measure, rate_of, requests, run_level, share_within

ERLANG_RATE = 0.616856
"""Of one server with 1 s of service, at which 95 % wait at most 3 s."""
TIGHT = Contract(ttft_seconds=0.02, share=0.9)
TIGHT_RATE = 11.12859
"""Of 16 slots with 1 s of service, at which 90 % wait at most 0.02 s."""


def answer(due: float, ttft: float = 0.1, e2e: float = 1.0, error: str = "") -> Outcome:
    """Return a request of ten tokens; a failed one has none."""
    if error:
        return Outcome(due, due, None, None, 100, 0, (), error)
    return Outcome(due, due, due + ttft, due + e2e, 100, 10, (), "")


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield times of arrival."""
    draw, now = random.Random(seed), 0.0
    while True:
        now += draw.expovariate(rate)
        yield now


def judge(
    contract: Contract, make: Callable[[float, random.Random], Outcome], budget: float = 600
) -> LevelSummary:
    """Return what ten arrivals per second show at a server that answers as `make` says."""
    level, draw = Level(contract, 10.0, budget, give_up_seconds=60), random.Random(1)
    made = sorted(
        (make(due, draw) for due in islice(poisson(10.0, 2), int(12 * budget))),
        key=lambda each: each.done or each.due,
    )
    now, waiting = 0.0, iter(made)
    coming = next(waiting)
    while True:
        now += budget / 100
        while (coming.done or coming.due) <= now:
            level.add(coming)
            coming = next(waiting)
        flying = [each.due for each in made if each.due <= now < (each.done or each.due)]
        if level.decide(now, flying).action == "stop":
            return level.summary()


def test_theory_agrees_with_erlang_and_with_simulation() -> None:
    """Erlang's own formula for one server (1909), and a long simulation for 16 slots."""
    wait, rate = 3.0, ERLANG_RATE
    erlang = (1 - rate) * sum(
        (rate * (k - wait)) ** k / math.factorial(k) * math.exp(-rate * (k - wait))
        for k in range(int(wait) + 1)
    )
    assert erlang == pytest.approx(0.95, abs=1e-5)
    assert share_within(wait, rate, 1, 1.0) == pytest.approx(erlang, abs=1e-6)
    assert rate_of(0.9, 0.02, 16, 1.0) == pytest.approx(TIGHT_RATE, rel=1e-5)
    some = islice(requests(TIGHT_RATE, 16, 1.0, 1), 5000, 155000)
    assert sum((each.ttft or 0.0) <= 0.02 for each in some) / 150000 == pytest.approx(0.9, abs=0.01)


def plain_wilson(kept: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the interval that takes each request for independent."""
    share, scale = kept / count, 1 + z * z / count
    middle = (share + z * z / 2 / count) / scale
    half = z / scale * math.sqrt(share * (1 - share) / count + z * z / 4 / count**2)
    return middle - half, middle + half


@pytest.mark.slow
@each_row(
    "contract, rate, slots",
    [(Contract(ttft_seconds=3.0), ERLANG_RATE, 1), (TIGHT, TIGHT_RATE, 16)],
)
def test_verdicts_exactly_at_the_limit_err_no_more_often_than_the_contract_allows(
    contract: Contract, rate: float, slots: int
) -> None:
    """A verdict there, in whichever direction, comes by chance. Plain Wilson looks only once."""
    runs, wrong, plain = 100, 0, 0
    for seed in range(runs):
        wrong += (
            measure(contract, rate, slots, budget=1000 / rate, seed=seed).verdict != "not known"
        )
        seen = [*islice(requests(rate, slots, 1.0, seed), 1000)]
        kept = sum((each.ttft or 0.0) <= (contract.ttft_seconds or 0.0) for each in seen)
        low, high = plain_wilson(kept, len(seen))
        plain += not low <= contract.share <= high
    assert wrong <= (1 - contract.confidence) * runs
    assert plain > 0.3 * runs


def test_a_server_that_has_not_filled_up_yet_proves_nothing() -> None:
    """All of the first 500 requests at 64 slots can be fast at a rate that is too high."""
    contract = Contract(ttft_seconds=0.02)
    for seed in range(20):
        assert measure(contract, 54.0, 64, budget=500 / 54, seed=seed).verdict != "kept"


@each_row("load, verdict", [(0.5, "kept"), (0.8, "kept"), (1.2, "missed"), (1.43, "missed")])
def test_levels_off_the_limit_are_resolved_before_the_budget_ends(
    load: float, verdict: str
) -> None:
    for seed in range(5):
        found = measure(TIGHT, load * TIGHT_RATE, 16, budget=900, seed=seed)
        assert (found.verdict, found.ended) == (verdict, "resolved"), found.why
        assert found.seconds < 800
        assert found.low <= found.kept / found.requests <= found.high


def test_a_level_close_to_the_limit_is_not_known_within_a_small_budget() -> None:
    for load in (0.97, 1.03):
        found = measure(TIGHT, load * TIGHT_RATE, 16, budget=100, seed=1)
        assert (found.verdict, found.ended) == ("not known", "budget")
        assert found.low < 0.9 < found.high
        assert f"{found.kept} of {found.requests} requests met the contract" in found.why


PROMISED = Contract(ttft_seconds=2.0, itl_seconds=0.1, e2e_seconds=10.0)


@each_row(
    "outcome, expected",
    [
        (answer(5, ttft=1.0, e2e=1.45), 0.5),  # ITL 0.05 s
        (answer(5, ttft=1.0, e2e=2.8), 2.0),  # ITL 0.2 s
        (answer(5, ttft=1.9, e2e=1.9), 0.95),
        (answer(5, ttft=1.9, e2e=1.9)._replace(due=4.0), 1.45),
        (answer(5, ttft=1.0, e2e=9.0)._replace(tokens=1), 0.9),
        (answer(5, error="429"), 2.0),
        (answer(5, e2e=1.0)._replace(error="reset"), 2.0),
        (answer(5)._replace(first=None), 2.0),
        (answer(5)._replace(done=None), 2.0),
        (answer(5, ttft=90.0, e2e=91.0), 2.0),
    ],
)
def test_a_request_is_strained_by_the_promise_it_came_closest_to(
    outcome: Outcome, expected: float
) -> None:
    assert max(strains_of(outcome, PROMISED)) == pytest.approx(expected)


def test_without_a_promised_latency_an_answer_is_all_that_counts() -> None:
    assert strains_of(answer(0, ttft=50, e2e=90), Contract()) == (0,)
    assert max(strains_of(answer(0, error="timeout"), Contract())) > 1


def test_failed_requests_are_missed_and_named_and_have_no_latencies() -> None:
    found = judge(
        Contract(ttft_seconds=1.0),
        lambda due, draw: answer(due, error="429" if draw.random() < 0.2 else ""),
    )
    assert found.verdict == "missed"
    assert found.errors == {"429": found.requests - found.kept}
    assert found.ttft["p99"] == pytest.approx(0.1)


def test_fast_requests_do_not_hide_slow_ones_that_are_still_in_flight() -> None:
    """A tenth never ends; all that ended are fast. The contract's e2e decides about the others."""
    contract = Contract(e2e_seconds=5.0)

    def make(due: float, draw: random.Random) -> Outcome:
        return answer(due, e2e=1e6 if draw.random() < 0.1 else 1.0)

    found = judge(contract, make)
    assert found.verdict == "missed"
    assert found.errors == {"unfinished": found.requests - found.kept}
    assert 0.87 < found.kept / found.requests < 0.93
    assert found.e2e["p99"] == pytest.approx(1.0)


def test_a_request_counts_only_once_all_before_it_are_decided() -> None:
    """One request hangs from second 30 on; TTFT alone does not say whether it is missed."""
    level = Level(Contract(ttft_seconds=1.0), 10.0, 600, give_up_seconds=1000)
    for tenth in range(6000):
        if tenth != 300:
            level.add(answer(tenth / 10))
    for now in range(10, 601, 10):
        decision = level.decide(now, [30.0] if now >= 30 else [])
    found = level.summary()
    assert decision.ended == "budget"
    assert found.verdict == "not known"
    assert found.warm_up_seconds + found.seconds == 30
    assert found.requests == 290


@each_row(
    "promised, seconds, lag, missed",
    [
        (Contract(ttft_seconds=1.0), 1.2, 0.1, True),
        (Contract(ttft_seconds=1.0), 1.2, 0.3, False),
        (Contract(e2e_seconds=1.0), 1.2, 0.1, True),
        (Contract(e2e_seconds=1.0), 1.2, 0.3, False),
        (Contract(ttft_seconds=1.0), 0.5, 0.0, False),
    ],
)
def test_a_level_is_missed_despite_a_lag_that_is_shorter_than_what_it_missed_by(
    promised: Contract, seconds: float, lag: float, missed: bool
) -> None:
    level = Level(promised, 10.0, 600, give_up_seconds=60)
    made = (answer(due, seconds, seconds) for due in islice(poisson(10.0, 1), 7000))
    assert run_level(level, made, 1.0).verdict == ("missed" if seconds > 1 else "kept")
    assert level.is_missed_despite(lag) is missed


@each_row("promised", [Contract(itl_seconds=1.0), Contract(ttft_seconds=300.0)])
def test_a_queue_that_grows_without_end_ends_the_level_early(promised: Contract) -> None:
    """Though the contract is still kept: its promises are not about TTFT, or very lenient."""
    for seed in range(5):
        found = measure(promised, 1.3 * 16, 16, budget=600, seed=seed)
        assert (found.verdict, found.ended) == ("missed", "over-saturated")
        assert found.warm_up_seconds + found.seconds < 300
        assert "requests in flight grows by" in found.why
        assert found.output_tokens_per_second == pytest.approx(160, rel=0.05)


def test_a_busy_server_that_keeps_up_is_not_over_saturated() -> None:
    """97 % of its capacity, and the contract is too close to it for a verdict by the share."""
    for seed in range(10):
        found = measure(Contract(ttft_seconds=1.0, share=0.6), 15.5, 16, budget=150, seed=seed)
        assert found.ended != "over-saturated"


def test_a_server_that_fills_up_is_not_over_saturated() -> None:
    """Each request takes 100 s: requests in flight, and TTFT with them, rise for 100 s."""
    for seed in range(5):
        level = Level(Contract(itl_seconds=60.0), 10.0, 250, give_up_seconds=1000)
        arrivals = islice(poisson(10.0, seed), 4000)
        made = (answer(due, ttft=0.1 + 0.01 * min(due, 100.0), e2e=100.0) for due in arrivals)
        assert run_level(level, made, 1.0).ended != "over-saturated"


def test_a_cold_start_does_not_count() -> None:
    """The first minute of ten is slow; a twentieth of requests may be."""
    found = judge(
        Contract(ttft_seconds=1.0), lambda due, _: answer(due, ttft=3 if due < 40 else 0.1)
    )
    assert found.verdict == "kept"
    assert 40 <= found.warm_up_seconds < 100


def test_a_level_that_still_gets_worse_is_not_kept_and_one_that_gets_better_not_missed() -> None:
    contract = Contract(ttft_seconds=1.0)
    worse = judge(contract, lambda due, _: answer(due, ttft=0.1 + due / 700))
    better = judge(contract, lambda due, _: answer(due, ttft=1.9 - due / 700))
    assert worse.verdict == better.verdict == "not known"


def test_a_constant_latency_close_to_its_limit_does_not_hide_a_queue_that_fills_up() -> None:
    """4 % above the limit the queue has hardly begun to grow: no request has missed yet."""
    slots, service, tokens = 16, 1.0, 10
    limit = rate_of(0.95, 0.5, slots, service)
    promised = Contract(ttft_seconds=0.5, itl_seconds=service / (tokens - 1) / 0.94)

    verdicts = set()
    for seed in (4, 12):
        level = Level(promised, 1.04 * limit, 89.0, give_up_seconds=600.0)
        found = run_level(level, requests(1.04 * limit, slots, service, seed), 0.89)
        verdicts.add(found.verdict)

    assert verdicts == {"not known"}


def test_a_decision_to_stop_stays() -> None:
    level = Level(Contract(ttft_seconds=1.0), 10.0, 20, give_up_seconds=60)
    for tenth in range(190):
        level.add(answer(tenth / 10))
    assert level.decide(1.0, []).action == "go on"
    stopped = level.decide(20.0, [])
    assert (stopped.action, stopped.ended) == ("stop", "budget")
    assert level.decide(5.0, [1.0]) == stopped


def test_a_summary_counts_what_a_known_server_did() -> None:
    """Ten requests a second, ten tokens and 0.5 s each, the client late by 0.02 s."""
    level = Level(Contract(ttft_seconds=1.0), None, 40, 60, concurrency=5)
    for tenth in range(400):
        due = tenth / 10
        level.add(Outcome(due, due + 0.02, due + 0.1, due + 0.5, 100, 10, (0.04, 0.05), ""))
    level.decide(40.0, [39.6, 39.7, 39.8, 39.9])
    found = level.summary()
    assert (found.rate, found.concurrency, found.load) == (None, 5, 5.0)
    assert found.warm_up_seconds == pytest.approx(0.5)
    assert found.seconds == pytest.approx(39.1)
    assert found.requests == found.kept == 391
    assert found.mean_concurrency == pytest.approx(5.0, rel=0.01)
    assert found.output_tokens_per_second == pytest.approx(100, rel=0.01)
    assert found.prompt_tokens_per_second == pytest.approx(1000, rel=0.01)
    assert found.dispatch_lag_p99 == pytest.approx(0.02)
    assert found.itl == pytest.approx(
        {"mean": 0.045, "p50": 0.045, "p90": 0.05, "p95": 0.05, "p99": 0.05}
    )
    assert found.errors == {}


def test_a_summary_survives_json() -> None:
    found = measure(TIGHT, 9.0, 16, budget=60, seed=1)
    assert LevelSummary.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_a_level_without_a_request_has_a_summary() -> None:
    level = Level(Contract(ttft_seconds=1.0), 1.0, 60, 60)
    assert level.summary().verdict == "not known"
    assert level.decide(60, []).ended == "budget"
    assert level.summary().requests == 0


def test_the_looks_and_both_tries_share_the_error() -> None:
    contract = Contract(confidence=0.9)
    one_side = [(1 - look_confidence(contract, look)) / 2 for look in range(8)]
    assert 2 * 2 * sum(one_side) <= 0.1
    assert one_side == sorted(one_side)


@each_row("share", [0.9, 0.95, 0.99])
def test_the_fewest_requests_are_those_that_resolve_when_all_keep_the_contract(
    share: float,
) -> None:
    contract = Contract(ttft_seconds=1.0, share=share)
    budget = 1.01 * fewest_seconds(contract, 10.0, 1.0)
    assert budget * 10 >= fewest_requests(contract)
    for length, verdict in ((budget, "kept"), (0.8 * budget, "not known")):
        level = Level(contract, 10.0, length, 60)
        for tenth in range(int(10 * length)):
            level.add(answer(tenth / 10))
        level.decide(length, [])
        assert level.summary().verdict == verdict
