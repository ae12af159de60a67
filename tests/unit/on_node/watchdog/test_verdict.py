"""What is a stall and what is not, as a pure function of what a server said and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.engines.engine import engines as programs
from gpufleet.on_node.watchdog.verdict import (
    PAUSE_SECONDS,
    Engine,
    Sample,
    State,
    Verdict,
    engines,
    engines_to_ask,
    observe,
)
from tests.support.checkout import ROOT
from tests.support.rows import each_row

SECONDS = 30.0
PROGRESS = [asdict(each.progress) for each in programs()]
RECORDED = ROOT / "tests/data/vllm-0.32.0.metrics"
SGLANG = ROOT / "tests/unit/monitoring/recorded/sglang-0.5.23.txt"


def engine(tokens: float, work: float = 1) -> Engine:
    return Engine(work, (("generation_tokens_total", tokens), ("num_requests_running", work)))


def watched(
    samples: Iterable[tuple[float, Sample]], *, pinned: bool = True
) -> tuple[State, list[Verdict]]:
    """Return the verdict after each sample, given with its time."""
    state, verdicts = State(), []
    for now, sample in samples:
        state, verdict = observe(state, sample, now, SECONDS, pinned=pinned)
        verdicts.append(verdict)
    return state, verdicts


def every_second(
    begin: int, end: int, *said: dict[str, Engine] | None, **more: tuple[str, ...]
) -> Iterable[tuple[float, Sample]]:
    """The same of each second: what /metrics says, in turn; what else happens, in the first."""
    for index, second in enumerate(range(begin, end)):
        first = more if not index else {}
        yield float(second), Sample("life", said[index % len(said)], **first)


def test_work_without_progress_is_a_stall_after_exactly_the_bound() -> None:
    _, verdicts = watched(every_second(100, 140, {"0": engine(5)}))
    stalled = [index for index, verdict in enumerate(verdicts) if verdict.kind == "stalled"]
    assert stalled == list(range(30, 40))
    assert verdicts[30].why == "1 requests and no progress for 30 s"
    assert verdicts[29].idle == 29


def test_one_frozen_engine_of_several_is_found_while_the_others_work() -> None:
    said = [{"0": engine(token), "1": engine(7), "2": engine(token)} for token in range(60)]
    _, verdicts = watched(every_second(0, 60, *said))
    assert {verdict.kind for verdict in verdicts[30:]} == {"stalled"}
    assert verdicts[30].why.startswith("engine 1: ")


def test_a_server_with_nothing_to_do_is_idle_for_ever() -> None:
    _, verdicts = watched(every_second(0, 1000, {"0": engine(5, work=0)}))
    assert {verdict.kind for verdict in verdicts} == {"idle"}


def test_what_froze_while_idle_is_found_by_a_canary_that_gets_no_answer() -> None:
    """Its numbers say that there is no work: they are old."""
    idle = {"0": engine(5, work=0)}
    before = every_second(0, 100, idle)
    after = every_second(100, 140, idle, asked=("0",))
    _, verdicts = watched([*before, *after])
    kinds = [verdict.kind for verdict in verdicts]
    assert kinds.index("stalled") == 130
    assert "no answer to a request for one token" in verdicts[130].why


def test_a_canary_in_the_queue_of_a_server_whose_tokens_move_is_no_stall() -> None:
    """Saturation is not death, however long the queue is."""
    said = [{"0": engine(token // 20, work=500)} for token in range(600)]
    _, verdicts = watched(every_second(0, 600, *said, asked=("0",)))
    assert {verdict.kind for verdict in verdicts} == {"works"}


def test_a_canary_that_is_refused_proves_nothing() -> None:
    idle = {"0": engine(5, work=0)}
    _, verdicts = watched(
        [
            *every_second(0, 5, idle, asked=("0",)),
            *every_second(5, 100, idle, withdrawn=("0",)),
        ]
    )
    assert {verdict.kind for verdict in verdicts[5:]} == {"idle"}


def test_where_canaries_go_as_the_release_likes_one_of_them_accuses_nobody_who_works() -> None:
    said = [{"0": engine(token, work=9), "1": engine(5, work=0)} for token in range(100)]
    _, pinned = watched(every_second(0, 100, *said, asked=("1",)))
    _, free = watched(every_second(0, 100, *said, asked=("1",)), pinned=False)
    assert pinned[-1].kind == "stalled"
    assert {verdict.kind for verdict in free} == {"works"}


def test_a_server_that_answers_no_more_is_a_stall_if_it_was_ready_and_a_start_if_not() -> None:
    _, starts = watched(every_second(0, 500, None))
    assert {verdict.kind for verdict in starts} == {"starting"}
    _, frozen = watched([*every_second(0, 2, {"0": engine(1, 0)}), *every_second(2, 60, None)])
    assert [verdict.kind for verdict in frozen].index("stalled") == 31
    assert "/metrics has not answered for 30 s" in frozen[31].why


def test_nothing_is_said_of_an_engine_beyond_the_last_answer() -> None:
    """Since then it may have moved: a server that answers every 20 s has moved each time."""
    said = [(float(t), {"0": engine(t)} if t % 20 == 0 else None) for t in range(200)]
    _, verdicts = watched((now, Sample("life", each)) for now, each in said)
    assert {verdict.kind for verdict in verdicts} == {"works"}


def test_another_life_of_the_unit_begins_anew() -> None:
    before = list(every_second(0, 29, {"0": engine(5)}))
    starting = [(29.0 + t, Sample("another", None)) for t in range(300)]
    _, verdicts = watched([*before, *starting])
    assert {verdict.kind for verdict in verdicts[29:]} == {"starting"}


def test_a_unit_that_does_not_run_is_down() -> None:
    _, verdicts = watched([*every_second(0, 29, {"0": engine(5)}), (29.0, Sample(""))])
    assert verdicts[-1].kind == "down"


@each_row("jump", [PAUSE_SECONDS + 1, 3600.0, 1e9, -1.0, -3600.0])
def test_after_a_pause_of_its_own_it_counts_anew(jump: float) -> None:
    """It was stopped, the machine was suspended, or a clock jumped: nobody looked in between."""
    frozen = list(every_second(0, 30, {"0": engine(5)}, asked=("0",)))
    later = [(29 + jump + t, Sample("life", {"0": engine(5)})) for t in range(40)]
    _, verdicts = watched([*frozen, *later])
    kinds = [verdict.kind for verdict in verdicts[30:]]
    assert kinds.index("stalled") == SECONDS


LONGEST = 8.0
TIMES = st.lists(st.floats(0.01, LONGEST), min_size=2, max_size=60)


@given(steps=TIMES, data=st.data())
def test_any_movement_of_any_number_within_the_bound_keeps_it_alive(
    steps: list[float], data: st.DataObject
) -> None:
    """By up or down, of whatever is looked at, with whatever work and canaries."""
    names = ("generation_tokens_total", "kv_cache_usage_perc", "num_requests_waiting")
    values = dict.fromkeys(names, 1.0)
    now, still, state = 0.0, 0.0, State()
    for step in steps:
        now, still = now + step, still + step
        if still + LONGEST >= SECONDS or data.draw(st.booleans()):
            values[data.draw(st.sampled_from(names))] += data.draw(st.sampled_from([-0.5, 0.5, 9]))
            still = 0.0
        asked = data.draw(st.sampled_from([(), ("0",)]))
        sample = Sample("life", {"0": Engine(3.0, tuple(values.items()))}, asked)
        state, verdict = observe(state, sample, now, SECONDS)
        assert verdict.kind == "works"


@given(steps=TIMES)
def test_frozen_with_work_it_is_found_within_the_bound_and_one_look(steps: list[float]) -> None:
    now, state, found = 0.0, State(), None
    state, _ = observe(state, Sample("life", {"0": engine(5)}), now, SECONDS)
    for step in steps:
        now += step
        state, verdict = observe(state, Sample("life", {"0": engine(5)}), now, SECONDS)
        if verdict.kind == "stalled":
            found = found or now
        assert (verdict.kind == "stalled") == (now >= SECONDS)
    assert found is None or SECONDS <= found <= SECONDS + LONGEST


@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=False, min_value=-1e9, max_value=1e9),
            st.sampled_from(["", "a", "b"]),
            st.none() | st.dictionaries(st.sampled_from("01"), st.builds(engine, st.floats(0, 9))),
            st.sampled_from([(), ("0",), ("0", "7")]),
        ),
        max_size=30,
    )
)
def test_a_clock_that_only_jumps_never_makes_a_stall(
    steps: list[tuple[float, str, Any, Any]],
) -> None:
    state, before = State(), 0.0
    for now, life, said, asked in steps:
        state, verdict = observe(state, Sample(life, said, asked), now, SECONDS)
        if not 0 <= now - before <= PAUSE_SECONDS:
            assert verdict.kind != "stalled"
        before = now


# What is read of /metrics


def test_a_recorded_answer_is_read() -> None:
    found = engines(RECORDED.read_text(), PROGRESS)
    assert list(found) == ["0"]
    marks = dict(found["0"].marks)
    assert marks["vllm:generation_tokens_total"] == 24
    assert marks["vllm:prompt_tokens_total"] == 27
    assert marks["vllm:iteration_tokens_total_count"] == 24
    assert found["0"].work == 0
    assert found["0"].awake


def test_a_server_of_any_engine_is_understood_whatever_was_deployed_last() -> None:
    """A rollback may start another engine: the watchdog is told of all of them."""
    found = engines(SGLANG.read_text(), PROGRESS)
    assert {rank: each.work for rank, each in found.items()} == {"": 4}


def test_numbers_of_models_add_up_and_engines_stay_apart() -> None:
    text = (
        'vllm:num_requests_running{engine="0",model_name="a{\\"}"} 2.0\n'
        'vllm:num_requests_running{engine="0",model_name="b"} 1.0\n'
        'vllm:num_requests_waiting{engine="1",model_name="a"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="1",reason="deferred"} 3.0\n'
        'vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 1.0\n'
        'vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0.0\n'
    )
    found = engines(text, PROGRESS)
    assert (found["0"].work, found["0"].awake) == (3, True)
    assert (found["1"].work, found["1"].awake) == (1, False)


def test_the_oldest_releases_have_one_engine_without_a_name() -> None:
    text = 'vllm:num_requests_swapped{model_name="m"} 1\nvllm:gpu_cache_usage_perc 0.5\n'
    found = engines(text, PROGRESS)
    assert found[""].work == 1


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running nonsense\n", "<html>"])
def test_what_is_no_metrics_says_nothing(text: str) -> None:
    assert engines(text, PROGRESS) == {}


def test_only_engines_that_are_awake_and_did_not_move_are_asked() -> None:
    said = {"0": engine(1, 0), "1": engine(2, 0)._replace(awake=False), "2": engine(3, 0)}
    state, _ = watched(every_second(0, 50, said))
    state, _ = observe(state, Sample("life", {**said, "2": engine(4, 0)}), 50.0, SECONDS)
    assert engines_to_ask(state, 60.0, 60) == ("0",)
    assert engines_to_ask(state, 59.0, 60) == ()
    assert engines_to_ask(state, 1e6, 0) == ()
