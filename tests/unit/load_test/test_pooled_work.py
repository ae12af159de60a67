"""Load for models that make no text: asked as the fleet asks them, judged, timed to the end."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from statistics import mean

import pytest

from gpufleet.cli.measure_command import PRESETS as NAMES
from gpufleet.cli.measure_wanted import MeasureOptions, trace_work, work_json
from gpufleet.errors import FleetError
from gpufleet.load_test import media_work, pooled_work, workloads
from gpufleet.load_test.arrivals import Trace, TraceEntry
from gpufleet.load_test.client_places import this_machine
from gpufleet.load_test.level_runs import LevelRuns, Work, measure_client
from gpufleet.load_test.load_target import Target, contract_of
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.pooled_work import PooledWork, parse_work
from gpufleet.load_test.workloads import TokenRange
from gpufleet.load_test.written_prompts import from_jsonl
from gpufleet.on_node.load.request_draws import FEWEST_IDS, WORDS, PooledRequests
from gpufleet.on_node.serving import questions
from gpufleet.settings.serving_settings import ModelKind
from gpufleet.sizing.model_kinds import POOLS
from tests.support.queue_server import QueueServer
from tests.support.rows import each_row
from tests.unit.load_test.test_load_target import FLEET, changed, node

IDS = TokenRange(1000, 21_000)
EASY = Contract(e2e_seconds=5.0, share=0.5)
WORKS = {
    "embed": parse_work("embed", "8-16"),
    "rerank": parse_work("rerank", "4,6-9,3"),
    "classify": parse_work("classify", "12"),
    "reward": parse_work("reward", "12"),
}
ASKED = {"model": None, "replica": None, "gateway": None, "from_node": None, "key_file": None,
         "ca_file": None, "preset": None, "lengths": None, "prompts": None, "trace": None,
         "rate": None, "concurrency": None, "most": None, "share": 0.95, "seconds": 60,
         "guest": None, "processes": None, "seed": 1, "output": None, "as_json": False}  # fmt: skip


def wanted(**more: object) -> MeasureOptions:
    return MeasureOptions(**{**ASKED, **more})  # type: ignore[arg-type]


def drawn(work: PooledWork, count: int, process: int = 0, processes: int = 1) -> list[dict]:
    made = PooledRequests(
        work.requests("m", IDS, "salt")(process, processes), 1, process, processes
    )
    return [json.loads(made.next().body) for _ in range(count)]


def runs(server: QueueServer, work: Work, contract: Contract = EASY) -> LevelRuns:
    target = Target("replica e-0", server.url, "e", "served", ("e-0",), 1)
    return LevelRuns(target, contract, work, IDS, 1, 1)


@pytest.mark.parametrize("kind", sorted(POOLS))
def test_a_request_is_the_question_that_the_fleet_asks_with_drawn_texts(kind: ModelKind) -> None:
    (body,) = drawn(WORKS[kind], 1)
    texts = body.get("documents", ())
    asked = questions.question(kind, "m", body.get("query", body.get("input")), texts)
    assert body == asked.body
    assert WORKS[kind].path == asked.path


def test_texts_have_their_lengths_and_no_two_are_equal() -> None:
    inputs = [body["input"] for part in (0, 1) for body in drawn(WORKS["embed"], 500, part, 2)]
    assert {len(each) for each in inputs} == set(range(8, 17))
    assert all(1000 <= token < 21_000 for each in inputs for token in each)
    assert len({tuple(each[:8]) for each in inputs}) == 1000

    ranked = drawn(WORKS["rerank"], 200)
    assert {len(body["query"].split()) for body in ranked} == {4}
    assert {len(body["documents"]) for body in ranked} == {3}
    texts = [text for body in ranked for text in body["documents"]]
    assert {len(text.split()) for text in texts} == set(range(6, 10))
    assert len(set(texts)) == 600


def test_there_are_enough_words_to_tell_texts_apart() -> None:
    assert len(set(WORDS)) == len(WORDS) >= FEWEST_IDS


@pytest.mark.parametrize("kind", sorted(POOLS))
def test_a_rate_far_below_the_capacity_is_kept_by_answers_that_are_documents(
    kind: ModelKind,
) -> None:
    with QueueServer(slots=4, first_seconds=0.01) as server:
        measured = runs(server, WORKS[kind])
        assert measured.try_largest() >= 0.01
        level = measured.run(20.0, 10.0)

    assert (level.verdict, level.errors, level.ttft, level.itl) == ("kept", {}, {}, {})
    assert level.e2e["p50"] >= 0.01
    assert level.output_tokens_per_second == 0
    assert level.prompt_tokens_per_second > 0
    assert {each.path for each in server.record} == {WORKS[kind].path}
    assert {each.body["model"] for each in server.record} == {"served"}


def test_a_rate_above_the_capacity_is_missed() -> None:
    contract = Contract(e2e_seconds=0.2, share=0.9)
    with QueueServer(slots=1, first_seconds=0.05) as server:
        level = runs(server, WORKS["embed"], contract).run(40.0, 10.0)

    # A busy machine may make the client late, which is no miss of the server's.
    assert level.verdict != "kept"
    assert level.kept < 0.5 * level.requests


@each_row(
    "kind, fault, words",
    [
        ("embed", "not a number", "(wrong answer): the answer is not valid for the model's kind"),
        ("rerank", "not a number", "(wrong answer)"),
        ("classify", "not a number", "(wrong answer)"),
        ("embed", "not a stream", "(wrong answer)"),
        ("embed", "500", "(500)"),
        ("embed", "cut off", "(closed)"),
    ],
)
def test_an_answer_that_its_kind_does_not_give_is_refused_before_any_load(
    kind: ModelKind, fault, words: str
) -> None:
    with QueueServer(slots=1, faults=(fault,)) as server, pytest.raises(FleetError) as refused:
        runs(server, WORKS[kind]).try_largest()
    assert words in str(refused.value)


def test_the_largest_request_is_tried_first() -> None:
    with QueueServer(slots=1) as server:
        runs(server, WORKS["rerank"]).try_largest()
        runs(server, WORKS["embed"]).try_largest()
    ranked, embedded = server.record[0].body, server.record[-1].body
    assert [len(text.split()) for text in ranked["documents"]] == [9, 9, 9]
    assert len(embedded["input"]) == WORKS["embed"].most_tokens == 16


def test_what_a_client_can_send_of_them_is_measured_with_answers_of_their_size() -> None:
    found = measure_client(WORKS["embed"], 1, this_machine())
    assert found.tokens == 0
    assert found.requests_per_second > 0, "how many depends on what else the machine does"
    assert 0 < found.cpu_seconds < 0.05


@pytest.mark.parametrize("kind", sorted(POOLS))
def test_the_answer_that_stands_for_others_is_one_that_this_kind_gives(kind: ModelKind) -> None:
    work = WORKS[kind]
    put = questions.question(kind, "m", documents=["a"] * work.documents)
    judged = questions.judge(kind, put, work.example_answer(), questions.Expected())
    assert not judged.problem


@pytest.mark.parametrize("kind", sorted(POOLS))
def test_each_kind_has_workloads_that_small_encoders_can_read(kind: ModelKind) -> None:
    for each in pooled_work.PRESETS[kind]:
        each.check_context(512)
        texts = [body["input"] for body in drawn(each, 4000)] if kind != "rerank" else []
        lengths = [len(text) for text in texts] or [
            len(text.split()) for body in drawn(each, 200) for text in body["documents"]
        ]
        expected = (each.document or each.input).mean
        assert mean(lengths) == pytest.approx(expected, rel=0.1)
        assert wanted(preset=each.name).work(kind) == each
    with pytest.raises(FleetError, match=r"the longest .* tokens, but the model's context has 100"):
        pooled_work.PRESETS[kind][0].check_context(100)


def test_the_command_names_every_workload_and_none_that_is_not() -> None:
    pooled = itertools.chain.from_iterable(pooled_work.PRESETS.values())
    media = media_work.PICTURES.name, media_work.RECORDINGS.name
    assert set(NAMES) == {*workloads.PRESETS, *(each.name for each in pooled), *media}


def test_without_a_preset_each_kind_has_its_own_first_one() -> None:
    kinds: list[ModelKind] = ["generate", "embed", "rerank", "classify", "reward", "transcribe"]
    found = [wanted().work(kind).name for kind in kinds]
    assert found == ["chat", "documents", "candidates", "documents", "documents", "recordings"]


@each_row(
    "kind, typed, words",
    [
        (
            "embed",
            {"preset": "chat"},
            "--preset chat: the presets for `kind: embed` are documents, queries",
        ),
        ("generate", {"preset": "queries"}, "are chat, rag, code, batch"),
        ("embed", {"lengths": "16,256,20"}, "--lengths 16,256,20: for a reranker"),
        ("embed", {"lengths": "1000,200"}, "--lengths TOKENS"),
        ("rerank", {"lengths": "16"}, "--lengths QUERY,DOCUMENT,COUNT"),
        ("rerank", {"lengths": "16,256,x"}, "--lengths QUERY,DOCUMENT,COUNT"),
        ("rerank", {"lengths": "16,256,0"}, "1 or more documents"),
        ("rerank", {"lengths": "x,256,2"}, "'x' is not a length"),
    ],
)
def test_what_does_not_fit_the_kind_is_refused_with_what_to_write(
    kind: ModelKind, typed: dict[str, str], words: str
) -> None:
    with pytest.raises(FleetError) as refused:
        wanted(**typed).work(kind)
    assert words in str(refused.value)


def test_a_trace_is_refused_whose_answers_have_lengths() -> None:
    trace = Trace((TraceEntry(0.0, 20, 5),))
    for kind in ("rerank", "transcribe"):
        with pytest.raises(FleetError, match="`: use --preset, --lengths or --prompts"):
            trace_work("t.jsonl", trace, kind)
    assert trace_work("t.jsonl", trace, "generate").most_tokens == 25


def test_a_result_tells_kinds_and_documents_apart() -> None:
    assert work_json(WORKS["rerank"], 7, None) == {
        "preset": "lengths", "kind": "rerank", "input": "4", "documents": 3, "document": "6-9",
        "seed": 7,
    }  # fmt: skip
    assert work_json(WORKS["embed"], 7, None) != work_json(WORKS["classify"], 7, None)


def test_own_requests_of_a_kind_are_sent_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    lines = [{"query": "which?", "documents": ["a b", "c"], "top_n": 2, "model": "old"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    work = from_jsonl(file, "rerank")
    work.check_context(1)
    with QueueServer(slots=1) as server:
        runs(server, work).try_largest()
        measure_client(work, 1, this_machine())
    assert server.record[0].body == {**lines[0], "model": "served"}
    assert server.record[0].path == "/rerank"


@each_row(
    "kind, line, form",
    [
        ("embed", {"prompt": "a"}, '{"input": "..."}'),
        ("embed", {"input": ["a", "b"]}, '{"input": "..."}'),
        ("classify", {"input": ""}, '{"input": "..."}'),
        ("rerank", {"input": "a"}, '{"query": "...", "documents": ["...", ...]}'),
        ("rerank", {"query": "a", "documents": []}, '"documents"'),
        ("rerank", {"query": "a", "documents": ["b", 1]}, '"documents"'),
        ("rerank", [1], '"documents"'),
    ],
)
def test_a_line_that_is_no_request_of_the_kind_is_named(
    tmp_path: Path, kind: ModelKind, line: object, form: str
) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(line))
    with pytest.raises(FleetError) as refused:
        from_jsonl(file, kind)
    assert f"{file}: line 1: the line is no" in str(refused.value)
    assert form in str(refused.value)


def of_kind(kind: ModelKind, **objectives: float):
    running = tuple(dataclasses.replace(each, kind=kind) for each in FLEET.running)
    return changed(running=running, settings={name: node(objectives) for name in "ab"})


@pytest.mark.parametrize("kind", sorted(POOLS))
def test_objectives_of_what_makes_no_text_are_times_to_the_whole_answer(kind: ModelKind) -> None:
    assert contract_of("tiny", of_kind(kind, e2e_p99_seconds=0.5), 0.9) == Contract(
        e2e_seconds=0.5, share=0.9
    )
    with pytest.raises(FleetError) as refused:
        contract_of("tiny", of_kind(kind, ttft_p99_seconds=1, itl_p99_seconds=1), 0.9)
    assert [each.split(":")[0] for each in refused.value.problems] == [
        "serving.tiny.objectives.ttft_p99_seconds",
        "serving.tiny.objectives.itl_p99_seconds",
    ]
    assert "write `e2e_p99_seconds`" in refused.value.problems[0]
    with pytest.raises(FleetError, match="set `e2e_p99_seconds`"):
        contract_of("tiny", of_kind(kind), 0.9)
