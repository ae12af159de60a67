"""Prompts have the lengths that were asked for, and share what they are meant to share."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from statistics import fmean
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.workloads import (
    PRESETS,
    Lengths,
    TokenRange,
    Workload,
    fixed_length,
    lognormal,
    ordinary_ids,
    parse_lengths,
    uniform_lengths,
)
from gpufleet.on_node.load.request_draws import TokenRequests, lengths
from tests.support.rows import each_row

IDS = TokenRange(1000, 21_000)
TINY = TokenRange(100, 164)


def bodies(work: Workload, count: int, *, ids: TokenRange = IDS, **more: Any) -> list[Any]:
    """Return the bodies of requests, each answered before the next is drawn."""
    process, processes = more.pop("process", 0), more.pop("processes", 1)
    seed = more.pop("seed", 1)
    form = work.requests("model", ids, more.pop("salt", "salt"), **more)(process, processes)
    made = TokenRequests(form, seed, process, processes)
    made.stagger(4)
    found = []
    for _ in range(count):
        prepared = made.next()
        body = json.loads(prepared.body)
        assert len(body["prompt"]) == prepared.prompt_tokens
        assert body["max_tokens"] == body["min_tokens"] == prepared.tokens
        found.append(body)
        if prepared.resume is not None:
            prepared.resume()
    return found


def shared(one: list[int], other: list[int]) -> int:
    """Return how many tokens two prompts begin with in common."""
    pairs = zip(one, other, strict=False)
    most = min(len(one), len(other))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), most)


def most_shared(prompts: list[list[int]]) -> int:
    """Return how many tokens any two prompts begin with in common: neighbours, once sorted."""
    return max(itertools.starmap(shared, itertools.pairwise(sorted(prompts))))


@each_row(
    "made, mean",
    [
        (fixed_length(300), 300),
        (uniform_lengths(100, 300), 200),
        (lognormal(255, 768, 0.99), 255),
        (lognormal(2048, 7437, 1.36), 2048),
        (lognormal(28, 512, 0.85), 28),
        (lognormal(500, 600, 1.0), 500),
    ],
)
def test_lengths_have_their_mean_also_where_long_ones_are_cut(made: Lengths, mean: float) -> None:
    drawn = list(itertools.islice(lengths(made.form(), 5), 20_000))
    assert made.mean == mean
    assert fmean(drawn) == pytest.approx(mean, rel=0.04)
    assert made.low <= min(drawn)
    assert max(drawn) <= made.most
    assert drawn == list(itertools.islice(lengths(made.form(), 5), 20_000))
    if made.kind != "fixed":
        assert drawn != list(itertools.islice(lengths(made.form(), 6), 20_000))


def test_uniform_lengths_include_both_ends() -> None:
    drawn = Counter(itertools.islice(lengths(uniform_lengths(3, 6).form(), 1), 8000))
    assert set(drawn) == {3, 4, 5, 6}
    assert min(drawn.values()) > 1850


@each_row("text", ["512", "256-1024", "lognormal:255:768"])
def test_lengths_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_lengths(text)) == text


@each_row(
    "text",
    [
        *("", "0", "-5", "5-", "9-3", "1-2-3", "a", "1.5", "lognormal", "lognormal:5", "²"),
        *("lognormal:9:9", "lognormal:0:9", "lognormal:1:2:3", "fixed:5", "5 - 9"),
    ],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(FleetError, match="write"):
        parse_lengths(text)


@each_row(
    "make",
    [
        lambda: lognormal(10, 20, 0.0),
        lambda: Workload("w", fixed_length(1), fixed_length(1), "", prefix_tokens=-1),
        lambda: Workload("w", fixed_length(1), fixed_length(1), "", prefix_groups=0),
        lambda: Workload("w", fixed_length(1), fixed_length(1), "", turns=0),
        lambda: TokenRange(-1, 500),
        lambda: TokenRange(0, 63),
        lambda: ordinary_ids(90),
    ],
)
def test_a_workload_that_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(FleetError):
        make()


@each_row("vocabulary", [128, 512, 8192, 10_192, 32_000, 151_936])
def test_ids_are_inside_of_the_vocabulary(vocabulary: int) -> None:
    ids = ordinary_ids(vocabulary)
    assert 0 < ids.low < ids.high < vocabulary
    prompts = [
        body["prompt"]
        for body in bodies(Workload("w", uniform_lengths(1, 200), fixed_length(2), ""), 50, ids=ids)
    ]
    assert all(ids.low <= each < ids.high for prompt in prompts for each in prompt)


@each_row("ids", [IDS, TINY])
@each_row("length", [16, 700, 40_000])
def test_no_two_prompts_have_a_block_in_common(ids: TokenRange, length: int) -> None:
    """8 tokens and more tell them apart; the smallest block of a prefix cache has 16."""
    work = Workload("w", fixed_length(length), fixed_length(4), "")
    prompts = [
        body["prompt"]
        for process in range(3)
        for salt in ("monday", "tuesday")
        for body in bodies(
            work, 40 if length < 1000 else 3, ids=ids, process=process, processes=3, salt=salt
        )
    ]
    assert most_shared(prompts) < 8


def test_prompts_of_a_run_differ_from_their_first_token_on() -> None:
    work = Workload("w", uniform_lengths(1, 40), fixed_length(4), "")
    assert most_shared([body["prompt"] for body in bodies(work, 500)]) == 0


def test_another_salt_changes_tokens_and_no_length() -> None:
    work = Workload("w", uniform_lengths(20, 900), uniform_lengths(1, 50), "")
    monday, tuesday = (bodies(work, 30, salt=salt) for salt in ("monday", "tuesday"))
    assert [len(each["prompt"]) for each in monday] == [len(each["prompt"]) for each in tuesday]
    assert [each["max_tokens"] for each in monday] == [each["max_tokens"] for each in tuesday]
    assert all(a["prompt"] != b["prompt"] for a, b in zip(monday, tuesday, strict=True))
    assert bodies(work, 30) == bodies(work, 30)


@each_row("prefix, groups", [(0, 1), (5, 1), (300, 1), (300, 4), (40_000, 2)])
def test_requests_of_a_group_share_its_prefix_and_no_more(prefix: int, groups: int) -> None:
    work = Workload(
        "w", fixed_length(50), fixed_length(2), "", prefix_tokens=prefix, prefix_groups=groups
    )
    # Of two processes: a system prompt is the same, whichever client sends it.
    prompts = [
        body["prompt"]
        for process in range(2)
        for body in bodies(
            work, 40 if prefix < 1000 else 6, process=process, processes=2, seed=process
        )
    ]
    by_prefix: dict[tuple[int, ...], list[list[int]]] = {}
    for prompt in prompts:
        assert len(prompt) == prefix + 50
        by_prefix.setdefault(tuple(prompt[:prefix]), []).append(prompt)
    assert len(by_prefix) == (groups if prefix else 1)
    assert {most_shared(group) for group in by_prefix.values()} == {prefix}
    if len(by_prefix) > 1:
        assert most_shared([list(each) for each in by_prefix]) < 8


def test_each_turn_repeats_the_ones_before_it() -> None:
    work = Workload(
        "w", uniform_lengths(5, 20), uniform_lengths(3, 9), "", prefix_tokens=10, turns=4
    )
    seen: list[list[int]] = []
    turns: Counter[int] = Counter()
    for body in bodies(work, 400):
        prompt = body["prompt"]
        assert prompt[:10] == (seen[0][:10] if seen else prompt[:10])
        before = max((old for old in seen if old == prompt[: len(old)]), key=len, default=None)
        # Behind it: an answer of 3 to 9 tokens, and what the user says next.
        if before is not None:
            assert 3 + 5 <= len(prompt) - len(before) <= 9 + 20
        turns[sum(old == prompt[: len(old)] for old in seen) + 1] += 1
        assert len(prompt) + body["max_tokens"] <= work.most_tokens
        seen.append(prompt)
    assert set(turns) == {1, 2, 3, 4}
    # A quarter of all requests are first turns: the mix is there from the first request on.
    assert 70 < turns[1] < 150


def test_a_turn_does_not_come_before_the_answer_to_the_last() -> None:
    work = Workload("w", fixed_length(10), fixed_length(3), "", turns=4)
    made = TokenRequests(work.requests("m", IDS, "salt")(0, 1), 1, 0, 1)
    prompts = [json.loads(made.next().body)["prompt"] for _ in range(200)]
    assert most_shared(prompts) < 10


def test_a_conversation_has_a_header_of_its_own_for_the_gateway() -> None:
    work = Workload("w", fixed_length(10), fixed_length(3), "", turns=3)
    form = work.requests("m", IDS, "salt", session_header="x-session-id")(0, 1)
    made = TokenRequests(form, 1, 0, 1)
    names: dict[bytes, list[list[int]]] = {}
    for _ in range(120):
        prepared = made.next()
        name, value = prepared.header.split(b": ")
        assert (name, value[-2:]) == (b"x-session-id", b"\r\n")
        names.setdefault(value, []).append(json.loads(prepared.body)["prompt"])
        if prepared.resume is not None:
            prepared.resume()
    assert max(map(len, names.values())) == 3
    for turns in names.values():
        for earlier, later in itertools.pairwise(turns):
            assert later[: len(earlier)] == earlier
    single = Workload("w", fixed_length(10), fixed_length(3), "")
    form = single.requests("m", IDS, "salt", session_header="x-session-id")(0, 1)
    assert TokenRequests(form, 1, 0, 1).next().header == b""


def test_requests_of_a_trace_share_the_blocks_that_it_names() -> None:
    form = Workload("w", fixed_length(1), fixed_length(1), "").requests("m", IDS, "salt")(0, 1)
    made = TokenRequests(form, 1, 0, 1)

    def prompt(count: int, blocks: list[int]) -> list[int]:
        prepared = made.replayed(count, 5, blocks)
        found: list[int] = json.loads(prepared.body)["prompt"]
        assert len(found) == count == prepared.prompt_tokens
        return found

    assert shared(prompt(1500, [7, 8, 9]), prompt(1400, [7, 8, 10])) == 1024
    assert shared(prompt(1500, [7, 8, 9]), prompt(1400, [7, 8, 9])) == 1400
    assert shared(prompt(100, [3]), prompt(100, [4])) == 0
    assert shared(prompt(100, []), prompt(100, [])) == 0
    assert shared(prompt(2000, [7]), prompt(2000, [7])) == 512


def test_what_does_not_fit_the_context_is_refused_with_its_numbers() -> None:
    work = Workload("w", uniform_lengths(5, 100), fixed_length(20), "", prefix_tokens=30, turns=3)
    assert work.most_tokens == 30 + 3 * 120
    work.check_context(390)
    with pytest.raises(FleetError) as refusal:
        work.check_context(389)
    assert "390 tokens (a prefix of 30 + 3 turns of (100 + 20)" in str(refusal.value)
    assert "has 389 (`max_model_len`): write" in str(refusal.value)


def test_presets_have_the_means_that_their_reasons_name() -> None:
    assert set(PRESETS) == {"chat", "rag", "code", "batch"}
    assert PRESETS["chat"].mean_prompt_tokens == 1154
    assert PRESETS["chat"].mean_tokens == 211
    for work in PRESETS.values():
        assert work.reason
        work.check_context(8192)
        sizes = [len(body["prompt"]) for body in bodies(work, 300)]
        assert fmean(sizes) == pytest.approx(work.mean_prompt_tokens, rel=0.2)
