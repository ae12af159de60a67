"""A refusal of a request is its answer; a fleet without room, or a lost request, is not."""

from __future__ import annotations

import json

import pytest

from gpufleet.batch.batch_input import Line
from gpufleet.batch.replies import Reply, Totals, back_off_seconds, judge, output_line

LINE = Line("r1", "/v1/completions", b"{}")


@pytest.mark.parametrize(
    ("reply", "kind", "code"),
    [
        (Reply(200, b"{}"), "answer", ""),
        (Reply(200, b"<html>"), "broken", "not JSON"),
        (Reply(200, b'{"data": [{"embedding": [0.5, 1]}, {"embedding": "AAAA"}]}'), "answer", ""),
        (Reply(200, b'{"data": [{"embedding": [0.5, null]}]}'), "broken", "not a number"),
        (Reply(200, b'{"results": [{"relevance_score": 0.5}]}'), "answer", ""),
        (Reply(200, b'{"results": [{"relevance_score": null}]}'), "broken", "not a number"),
        (Reply(200, b'{"data": [{"score": null}]}'), "broken", "not a number"),
        (Reply(200, b'{"data": [{"label": null, "probs": [0.5, 1]}]}'), "answer", ""),
        (Reply(200, b'{"data": [{"probs": [0.5, null]}]}'), "broken", "not a number"),
        (Reply(200, b'{"data": [{"data": [[0.5], [1]]}]}'), "answer", ""),
        (Reply(200, b'{"data": [{"data": [[0.5], [null]]}]}'), "broken", "not a number"),
        (Reply(200, b'{"data": [1, null], "results": "x"}'), "answer", ""),
        (Reply(200, b"[" * 200_000), "broken", "not JSON"),
        (Reply(400, b"no JSON"), "answer", "400"),
        (Reply(404, b"{}"), "answer", "404"),
        (Reply(413, b"{}"), "answer", "413"),
        (Reply(401, b"{}"), "refused", "401"),
        (Reply(403, b"{}"), "refused", "403"),
        (Reply(429, b"{}"), "busy", "429"),
        (Reply(503, b"{}"), "busy", "503"),
        (Reply(502, b"{}"), "lost", "502"),
        (Reply(504, b"{}"), "lost", "504"),
        (Reply(500, b"{}"), "broken", "500"),
        (Reply(302, b""), "broken", "302"),
        (Reply(problem="refused"), "busy", "refused"),
        (Reply(problem="connection lost"), "lost", "connection lost"),
        (Reply(problem="timeout"), "lost", "timeout"),
        (Reply(problem="answer too large"), "answer", "answer too large"),
    ],
)
def test_what_a_reply_means(reply: Reply, kind: str, code: str) -> None:
    found = judge(reply)

    assert (found.kind, found.code) == (kind, code)
    assert found.holds == (kind in ("busy", "lost"))


def test_a_line_of_the_output_is_openais() -> None:
    found = output_line(LINE, judge(Reply(200, b'{"id": "cmpl-1", "choices": []}')))

    assert found.pop("id").startswith("batch_req_")
    body = {"id": "cmpl-1", "choices": []}
    assert found == {
        "custom_id": "r1",
        "response": {"status_code": 200, "request_id": "cmpl-1", "body": body},
        "error": None,
    }


@pytest.mark.parametrize(
    ("reply", "status", "error"),
    [
        (
            Reply(400, b'{"error": {"message": "too long"}}', "q-7"),
            400,
            {"code": "400", "message": "too long"},
        ),
        (Reply(400, b'{"message": "old form"}'), 400, {"code": "400", "message": "old form"}),
        (Reply(422, b"?"), 422, {"code": "422", "message": "the fleet answered with status 422 "
                                 "and no message"}),
        (Reply(problem="timeout"), None, {"code": "timeout", "message": "timeout: no answer was "
                                          "received"}),
    ],
)  # fmt: skip
def test_a_line_that_failed_has_its_status_and_why(reply, status, error) -> None:
    found = output_line(LINE, judge(reply))

    assert found["error"] == error
    assert (found["response"] or {}).get("status_code") == status


def test_totals_count_only_numbers_as_tokens() -> None:
    totals = Totals()
    for usage in ({"prompt_tokens": 3, "completion_tokens": 4}, {"prompt_tokens": "9"}, None, 7):
        document = json.dumps({"usage": usage}).encode()
        totals.add(output_line(LINE, judge(Reply(200, document))))

    assert (totals.lines, totals.prompt_tokens, totals.completion_tokens) == (4, 3, 4)


def test_tokens_of_responses_are_counted_by_their_own_names() -> None:
    totals = Totals()
    usage = {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12}
    totals.add({"error": None, "response": {"body": {"usage": usage}}})
    assert (totals.prompt_tokens, totals.completion_tokens) == (5, 7)


def test_tries_are_apart_by_twice_as_long_each_time_and_a_minute_at_most() -> None:
    assert [back_off_seconds(each) for each in (1, 2, 3, 7, 5000)] == [1, 2, 4, 60, 60]


def test_what_a_reranker_read_counts_as_prompts_where_it_tells_the_sum_alone() -> None:
    totals = Totals()
    for usage in ({"total_tokens": 9}, {"prompt_tokens": 4, "total_tokens": 9}):
        totals.add({"error": None, "response": {"body": {"usage": usage}}})
    assert (totals.prompt_tokens, totals.completion_tokens) == (13, 0)
