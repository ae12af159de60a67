"""Results of other tools are read by their own keys, with what they leave out."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.foreign_results import read_foreign
from gpufleet.load_test.foreign_values import ForeignResult
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DATA = ROOT / "tests/data/load_test"
VLLM = json.loads((DATA / "vllm_bench_serve.json").read_text())
GUIDELLM = json.loads((DATA / "guidellm.json").read_text())
AIPERF = json.loads((DATA / "aiperf.json").read_text())


def read_all(document: object, folder: Path) -> tuple[ForeignResult, ...]:
    file = folder / "result.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_foreign(file)


def said(found: ForeignResult) -> str:
    return "\n".join(found.reservations)


# -- vllm bench serve


def test_a_result_of_vllm_is_read_in_seconds_with_its_failures() -> None:
    (found,) = read_foreign(DATA / "vllm_bench_serve.json")
    assert (found.tool, found.version) == ("vllm bench serve", None)
    assert found.model == "meta-llama/Llama-3.1-8B"
    assert (found.rate, found.concurrency, found.seconds) == (4.0, None, 251.5)
    assert (found.requests, found.completed, found.failed) == (1000, 990, 10)
    assert found.ttft == {"p50": 0.08, "p90": 0.16, "p95": 0.2, "p99": 0.32}
    assert found.tpot == found.itl == {"p50": 0.008, "p99": 0.032}
    assert found.e2e == {}
    assert found.output_tokens_per_second == 503.9
    assert "latencies and rates exclude 10 failed requests" in said(found)
    assert "vary less than in a Poisson process" in said(found)
    assert "goodput excludes failed requests" in said(found)
    assert "the file has no e2e" in said(found)
    assert "--max-concurrency" not in said(found)


def test_with_a_bound_on_concurrency_vllm_counts_from_the_send(tmp_path: Path) -> None:
    (found,) = read_all({**VLLM, "max_concurrency": 16, "request_rate": "inf"}, tmp_path)
    assert (found.rate, found.concurrency) == (None, 16)
    assert "latencies begin when the client sends a request, not when the request was due" in said(
        found
    )
    assert "--max-concurrency 16" in said(found)
    assert "Poisson" not in said(found)


def test_zeros_that_vllm_writes_for_no_answer_are_no_latencies(tmp_path: Path) -> None:
    zeros = {key: 0.0 for key in VLLM if key.endswith("_ms")}
    (found,) = read_all({**VLLM, **zeros, "completed": 0, "failed": 1000}, tmp_path)
    assert found.ttft == found.tpot == found.itl == {}
    assert (found.completed, found.failed) == (0, 1000)
    # An endpoint that does not stream has no first token.
    (found,) = read_all({**VLLM, "median_ttft_ms": 0.0, "p99_ttft_ms": 0.0}, tmp_path)
    assert found.ttft == {}
    assert "the file has no TTFT" in said(found)


def test_a_release_of_vllm_that_counts_no_failures_is_counted(tmp_path: Path) -> None:
    older = {key: value for key, value in VLLM.items() if key != "failed"}
    (found,) = read_all(older, tmp_path)
    assert (found.requests, found.completed, found.failed) == (1000, 990, 10)


def test_results_that_vllm_appends_are_levels_of_one_file(tmp_path: Path) -> None:
    lines = [json.dumps({**VLLM, "request_rate": rate}) for rate in (1.0, 2.0, 4.0)]
    assert [each.rate for each in read_all("\n".join(lines), tmp_path)] == [1.0, 2.0, 4.0]


def test_a_rate_that_rises_is_no_level(tmp_path: Path) -> None:
    (found,) = read_all({**VLLM, "ramp_up_strategy": "linear"}, tmp_path)
    assert "its rate rises during the run, so the result is not" in said(found)


# -- guidellm


def test_each_benchmark_of_guidellm_is_a_level() -> None:
    open_loop, closed = read_foreign(DATA / "guidellm.json")
    assert (open_loop.tool, open_loop.version) == ("guidellm", "0.8.1")
    assert open_loop.model == closed.model == "meta-llama/Llama-3.1-8B"
    assert (open_loop.rate, open_loop.concurrency) == (4.0, None)
    assert (closed.rate, closed.concurrency) == (None, 16)
    assert (open_loop.requests, open_loop.completed, open_loop.failed) == (240, 230, 4)
    assert open_loop.ttft["p99"] == 0.32
    assert open_loop.output_tokens_per_second == 499.2
    assert "4 failed requests are in no latency" in said(open_loop)
    assert "6 requests that had not ended when the run ended" in said(open_loop)
    assert "the tool's own warning: requests were sent late" in said(open_loop)


def test_guidellms_itl_is_a_mean_of_each_answer_and_its_tpot_has_the_first_token() -> None:
    found, _ = read_foreign(DATA / "guidellm.json")
    assert found.tpot == {"p50": 0.008, "p90": 0.016, "p95": 0.02, "p99": 0.032}
    assert found.itl == {}
    assert "gpufleet shows it as TPOT" in said(found)


def test_guidellms_latency_from_the_targeted_start_is_taken_where_it_is(tmp_path: Path) -> None:
    found, _ = read_foreign(DATA / "guidellm.json")
    assert found.e2e["p99"] == 5.0
    assert "TTFT begins when the client sends a request" in said(found)
    older = copy.deepcopy(GUIDELLM)
    older["benchmarks"][0]["metrics"]["request_scheduled_latency"] = None
    found, _ = read_all(older, tmp_path)
    assert found.e2e["p99"] == 4.8
    assert "latencies begin when the client sends a request" in said(found)


def test_percentiles_of_no_value_are_no_latencies() -> None:
    _, closed = read_foreign(DATA / "guidellm.json")
    assert closed.e2e == closed.ttft == {}
    assert (closed.completed, closed.failed) == (0, 12)
    assert "the file has no TTFT, no TPOT, no e2e" in said(closed)


def test_strategies_of_guidellm_that_are_no_poisson_process_are_named(tmp_path: Path) -> None:
    def strategy(**said_by: Any) -> ForeignResult:
        document = copy.deepcopy(GUIDELLM)
        document["benchmarks"][0]["config"]["strategy"] = said_by
        return read_all(document, tmp_path)[0]

    constant = strategy(type_="constant", rate=5.0)
    assert constant.rate == 5.0
    assert "at equal intervals" in said(constant)
    assert strategy(type_="synchronous").concurrency == 1
    full = strategy(type_="throughput", max_concurrency=512)
    assert (full.rate, full.concurrency) == (None, 512)
    assert "strategy trace is not a single level" in said(strategy(type_="trace", time_scale=1.0))


def test_an_unknown_schema_of_guidellm_is_a_reservation(tmp_path: Path) -> None:
    newer = {**GUIDELLM, "metadata": {"version": 3, "guidellm_version": "0.9.0"}}
    assert "does not know version 3 of its report schema" in said(read_all(newer, tmp_path)[0])
    first = {**GUIDELLM, "metadata": {"version": 1}}
    assert "schema" not in said(read_all(first, tmp_path)[0])


# -- aiperf


def test_a_result_of_aiperf_is_read_by_its_units() -> None:
    (found,) = read_foreign(DATA / "aiperf.json")
    assert (found.tool, found.version) == ("aiperf", "0.13.0")
    assert found.model == "meta-llama/Llama-3.1-8B"
    assert (found.rate, found.concurrency, found.seconds) == (None, 16, 60.0)
    assert (found.requests, found.completed, found.failed) == (452, 450, 2)
    assert found.ttft == {"p50": 0.2, "p90": 0.25, "p95": 0.3, "p99": 0.4}
    assert found.tpot["p99"] == 0.024
    assert found.itl["p99"] == 0.04
    assert found.e2e["p50"] == 2.0
    assert found.output_tokens_per_second == 960.0
    assert "2 failed requests are in no latency" in said(found)
    assert "latencies begin when the client sends a request" in said(found)


def test_a_unit_of_aiperf_that_is_unknown_is_never_guessed(tmp_path: Path) -> None:
    other = {**AIPERF, "time_to_first_token": {**AIPERF["time_to_first_token"], "unit": "ticks"}}
    (found,) = read_all(other, tmp_path)
    assert found.ttft == {}
    assert "the file has no TTFT" in said(found)


def test_a_counter_that_aiperf_leaves_out_is_zero(tmp_path: Path) -> None:
    def without(key: str) -> ForeignResult:
        return read_all({k: v for k, v in AIPERF.items() if k != key}, tmp_path)[0]

    clean, broken = without("error_request_count"), without("request_count")
    assert (clean.requests, clean.failed) == (450, 0)
    assert (broken.requests, broken.completed) == (2, 0)


def test_a_run_of_aiperf_that_was_cut_short_is_named(tmp_path: Path) -> None:
    cut = {**AIPERF, "is_complete": False, "incomplete_reason": "stalled\x1b[2J"}
    (found,) = read_all(cut, tmp_path)
    assert "the run did not end as planned: stalled" in said(found)
    assert "\x1b" not in said(found)
    (found,) = read_all({**AIPERF, "was_cancelled": True}, tmp_path)
    assert "the run did not end as planned" in said(found)


def test_loads_of_both_forms_of_aiperfs_configuration_are_read(tmp_path: Path) -> None:
    def load(**config: Any) -> tuple[float | None, int | None]:
        (found,) = read_all({**AIPERF, "input_config": config}, tmp_path)
        return found.rate, found.concurrency

    assert load(loadgen={"request_rate": 3.0}) == (3.0, None)
    assert load(loadgen={"concurrency": 8}) == (None, 8)
    poisson = {"name": "main", "type": "poisson", "rate": 2.5, "concurrency": 100}
    assert load(phases=[{"name": "warm", "kind": "warmup", "rate": 9.0}, poisson]) == (2.5, 100)
    assert load() == (None, None)


# -- any other file


@each_row(
    "content, words",
    [
        ("", "is empty"),
        ("{", "is incomplete"),
        ("[1, 2]", "is not a result of"),
        ('{"a": 1}', "is not a result of"),
        ('{"benchmarks": []}', "no level of load"),
        ('{"benchmarks": [1]}', "no level of load"),
        ('{"a": 1}\n{"b"', "line 2"),
        ("[" * 100_000, "too many nested levels"),
    ],
    ids=lambda value: value[:12],
)
def test_a_file_of_another_kind_is_a_sentence(content: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError) as raised:
        read_all(content, tmp_path)
    (problem,) = raised.value.problems
    assert str(tmp_path / "result.json") in problem


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="No such file"):
        read_foreign(tmp_path / "none.json")


def damaged(value: object) -> list[object]:
    """Return copies of a document in which one value each is of another kind."""
    odd = (None, "text", -1, True, [], float("nan"), 10**400)
    found: list[object] = []
    if isinstance(value, dict):
        for key, below in value.items():
            found += [{**value, key: each} for each in (*odd, *damaged(below))]
    elif isinstance(value, list):
        for at, below in enumerate(value):
            found += [[*value[:at], each, *value[at + 1 :]] for each in (*odd, *damaged(below))]
    return found


def test_a_value_of_another_kind_is_not_known_and_never_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    seen = 0
    for document in (VLLM, GUIDELLM, AIPERF):
        for each in damaged(document):
            file.write_text(json.dumps(each))
            try:
                results = read_foreign(file)
            except FleetError:
                continue
            for found in results:
                seen += 1
                for times in (found.ttft, found.tpot, found.itl, found.e2e):
                    assert all(0 <= each < 1e300 for each in times.values())
    assert seen > 700
