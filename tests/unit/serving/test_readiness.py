"""A stage's state and the cause of its death, from what nodes really answered."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.on_node.serving import questions
from gpufleet.serving.readiness import (
    State,
    likely_cause,
    messages,
    progress,
    relevant_lines,
    verdict,
)
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DATA = ROOT / "tests/data"
JOURNAL = (DATA / "journal-missing-library.txt").read_text().splitlines()

RUNNING = {
    "Id": "vllm-tiny-0.service",
    "ActiveState": "active",
    "SubState": "running",
    "Result": "success",
    "NRestarts": "0",
    "ExecMainStatus": "0",
}
ANSWERS: dict[str, Any] = {
    "unit": RUNNING,
    "started": "3c4d",
    "journal": [],
    "health": {"status": 200, "body": ""},
    "models": ["tiny"],
    "without_key": {"GET /v1/models": 401, "POST /invocations": 401},
    "completion": "9",
}


def judge(seen: dict[str, Any], restarts: int = 0) -> tuple[State, str]:
    found = verdict(
        seen,
        served_name="tiny",
        unit="vllm-tiny-0.service",
        fingerprint="3c4d",
        restarts=restarts,
    )
    return found.state, found.text


def test_ready_is_a_completion_of_the_planned_model_and_a_refused_stranger() -> None:
    assert judge(ANSWERS)[0] is State.READY


def test_a_model_beside_the_adapters_is_wrong_where_the_unit_names_all_that_it_loads() -> None:
    """An operator's own `--lora-modules {"name": ...}` is not read by name."""
    seen = ANSWERS | {"models": ["tiny", "c"]}
    for alone, state in ((True, State.WRONG), (False, State.READY)):
        found = verdict(seen, served_name="tiny", unit="vllm-tiny-0.service", alone=alone)
        assert found.state is state
        assert ("also serves c, which no unit of gpufleet loads" in found.text) == alone


def test_where_no_answer_was_asked_for_adapters_have_to_be_listed_alone() -> None:
    """`gpufleet status` without --completion."""
    quick = {name: value for name, value in ANSWERS.items() if name != "completion"}
    for listed, state in ((["tiny", "a"], State.READY), (["tiny"], State.WRONG)):
        seen = quick | {"models": listed}
        found = verdict(seen, served_name="tiny", unit="vllm-tiny-0.service", adapters=("a",))
        assert found.state is state


@each_row(
    ("change", "state", "says"),
    [
        ({}, State.READY, "answers"),
        ({"models": ["tiny", "a"]}, State.WRONG, "does not serve the adapter b of the plan"),
        ({"models": ["tiny"]}, State.WRONG, "does not serve the adapters a, b of the plan"),
        (
            {"adapters": {"a": {"status": 200}, "b": {"status": 500, "body": "no file"}}},
            State.WRONG,
            (
                "a completion with the adapter b fails, but a completion with the model alone "
                "does not: HTTP 500 no file"
            ),
        ),
        ({"adapters": {"a": {"status": 200}}}, State.WRONG, "adapter b fails"),
        (
            {"adapters": {"a": {"error": "timed out"}, "b": {"status": 200}}},
            State.BUSY,
            "adapter a fails",
        ),
    ],
)
def test_each_adapter_of_the_plan_is_listed_and_answers(
    change: dict[str, Any], state: State, says: str
) -> None:
    answers = {"a": {"status": 200}, "b": {"status": 200}}
    seen = ANSWERS | {"models": ["tiny", "a", "b"], "adapters": answers} | change
    found = verdict(seen, served_name="tiny", unit="vllm-tiny-0.service", adapters=("a", "b"))

    assert found.state is state
    assert says in found.text


@each_row(
    ("change", "says"),
    [
        ({"completion_error": {"error": "refused"}}, "a completion fails: refused"),
        ({"started": "another"}, "runs with settings that differ from the plan"),
        ({"completion_error": {"status": 500, "body": "dead"}}, "HTTP 500 dead"),
        ({"models": ["other"]}, "serves ['other'], but the plan has 'tiny'"),
        (
            {"without_key": {"GET /v1/models": 200}},
            "answers GET /v1/models without the API key with 200",
        ),
        (
            {"without_key": {"GET /v1/models": 401, "POST /invocations": 400}},
            "answers POST /invocations without the API key with 400",
        ),
        ({"key_error": "No such file"}, "the API key cannot be read"),
        ({"models_error": {"status": 401, "body": ""}}, "/v1/models answers HTTP 401"),
    ],
)
def test_what_answers_wrongly_is_not_waited_for(change: dict[str, Any], says: str) -> None:
    """It will not get better by itself: the operator is told at once."""
    state, text = judge({**ANSWERS, **change})
    assert state is State.WRONG
    assert says in text


@each_row(
    ("kind", "says"),
    [
        ("embed", "an embedding fails: its vector has no numbers"),
        ("rerank", "a ranking fails: its vector has no numbers"),
        ("draw", "an answer fails: its vector has no numbers"),
    ],
)
def test_what_failed_is_named_by_the_models_kind(kind: str, says: str) -> None:
    wrong = {"kind": kind, "completion_error": {"error": "its vector has no numbers"}}
    state, text = judge({**ANSWERS, **wrong})
    assert state is State.WRONG
    assert says in text


def test_a_reranker_that_does_not_rank_is_told_which_kinds_it_may_be() -> None:
    """Its server's answer is judged as on a node: one label may be a reward or a rating."""
    put = questions.question("rerank", "tiny")
    rows = [{"index": at, "relevance_score": score} for at, score in enumerate((0.9, 0.1))]
    wrong = questions.judge("rerank", put, {"results": rows}, questions.Expected()).problem
    state, text = judge({**ANSWERS, "kind": "rerank", "completion_error": {"error": wrong}})
    assert state is State.WRONG
    assert "a ranking fails: for " in text
    assert (
        "does not rank by relevance. If the model does not rank documents, declare `kind:" in text
    )


def test_a_server_without_the_path_is_of_another_kind_and_the_text_says_what_to_set() -> None:
    """An embedder that was taken for a model of text would else never become ready, and why?"""
    gone = {"completion_error": {"status": 404, "body": '{"detail":"Not Found"}'}}
    assert "not of `kind: generate`: correct `kind` of its entry" in judge({**ANSWERS, **gone})[1]
    gone["kind"] = "embed"
    assert "not of `kind: embed`: correct `kind`" in judge({**ANSWERS, **gone})[1]


def test_a_model_that_pools_is_busy_by_the_tokens_that_it_reads() -> None:
    late = {"kind": "embed", "completion_error": {"error": "timed out"}}
    state, text = judge({**ANSWERS, **late})
    assert state is State.BUSY
    assert "the prompt tokens in the server's /metrics" in text


def test_a_server_that_loads_is_waited_for_and_shows_its_last_words() -> None:
    loading = {
        "unit": RUNNING,
        "started": "3c4d",
        "journal": JOURNAL[:6],
        "health": {"error": "refused"},
    }
    state, text = judge(loading)
    assert state is State.WAITING
    assert text == progress(JOURNAL[:6])
    assert "pid=" not in text


@pytest.mark.parametrize(
    "unit",
    [
        {**RUNNING, "ActiveState": "failed", "SubState": "failed"},
        {**RUNNING, "ActiveState": "inactive", "SubState": "dead"},
        {**RUNNING, "ActiveState": "activating", "SubState": "auto-restart"},
        {**RUNNING, "NRestarts": "1"},
    ],
    ids=["failed", "stopped", "about to restart", "restarted meanwhile"],
)
def test_a_unit_that_died_ends_the_wait_with_the_cause(unit: dict[str, str]) -> None:
    state, text = judge({"unit": unit, "journal": JOURNAL})
    assert state is State.DEAD
    assert "library" in text
    assert "libnuma.so.1" in text


def test_a_unit_in_a_crash_loop_gets_one_more_start() -> None:
    """What this run has put right reaches the process only at its next start."""
    at = {"started": "3c4d", "journal": []}
    loop = {**RUNNING, "ActiveState": "activating", "SubState": "auto-restart", "NRestarts": "3"}
    assert judge({"unit": loop, **at}, restarts=4)[0] is State.WAITING
    again = {**loop, "NRestarts": "4"}
    assert judge({"unit": again, **at}, restarts=4)[0] is State.DEAD


def test_a_completion_that_does_not_come_is_busy_or_frozen_not_wrong() -> None:
    """A saturated server must not fail a deploy that changes nothing about it at once."""
    state, text = judge({**ANSWERS, "completion_error": {"error": "TimeoutError: timed out"}})
    assert state is State.BUSY
    assert "saturated, or its engine is frozen" in text


def test_whether_strangers_are_refused_must_be_known() -> None:
    for unknown in (None, {"GET /v1/models": 401, "POST /invocations": None}):
        assert judge({**ANSWERS, "without_key": unknown})[0] is State.UNKNOWN
    found = verdict({**ANSWERS, "without_key": None}, served_name="tiny", unit="u", keyed=False)
    assert found.state is State.READY


def test_a_node_that_could_not_be_asked_is_unknown_not_ready() -> None:
    assert judge({"error": "the node did not answer"})[0] is State.UNKNOWN
    assert judge({"unit": {"error": "no systemctl"}})[0] is State.UNKNOWN


def test_the_root_comes_before_the_frames() -> None:
    told = relevant_lines(JOURNAL)
    assert len(told) <= 10
    assert "libnuma" in told[0]
    assert not any(line.startswith((" ", "Traceback")) for line in told)


def test_messages_are_said_once_and_without_prefixes() -> None:
    line = "(Worker_TP1 pid=9) ERROR 11-21 12:34:48 [multiproc_executor.py:953] It broke."
    frame = "(Worker_TP1 pid=9) ERROR 11-21 12:34:48 [multiproc_executor.py:953]   File x, line 1"
    assert messages([line, frame, line]) == ["It broke."]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "memory"),
        ("vllm: error: unrecognized arguments: --no-such-flag 3", "does not know the flag"),
        ("OSError: [Errno 98] Address already in use", "uses the port"),
        (
            "ValueError: Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less than "
            "desired GPU memory utilization (0.9, 72.0 GiB).",
            "The GPU has less free memory",
        ),
    ],
)
def test_known_deaths_have_known_causes(line: str, says: str) -> None:
    found = likely_cause(["INFO starting", line])
    assert found is not None
    assert says in found


def test_an_unknown_death_is_not_explained_away() -> None:
    assert likely_cause(["INFO all is well"], "1") is None
    assert "command line" in str(likely_cause([], "2"))


SGLANG_FAILED = [
    "[2026-11-29 22:11:13 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "scheduler.py", line 6362, in run_scheduler_process',
    "KeyError: 'rope_theta'",
    "",
    "[2026-11-29 22:11:14] Received sigquit from a child process. It usually means the child "
    "failed.",
]


@pytest.mark.parametrize("status", ["137", "9", None])
def test_a_start_of_sglang_that_fails_is_not_called_out_of_memory(status: str | None) -> None:
    found = str(likely_cause(SGLANG_FAILED, status))
    assert found == "SGLang killed itself after an error: KeyError: 'rope_theta'"
    known = [
        *SGLANG_FAILED[:2],
        "ValueError: Cannot find model module. 'X' is not",
        SGLANG_FAILED[4],
    ]
    assert "architecture" in str(likely_cause(known, status))
    assert "out of memory" in str(likely_cause([], "137"))


def test_messages_of_sglang_are_without_its_prefix() -> None:
    assert messages(["[2026-11-29 11:49:34 DP0 TP1] Load weight begin."]) == ["Load weight begin."]
