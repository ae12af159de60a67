"""A measurement becomes Benchmark Reports of llm-d, v0.2.1: one for each level of load."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from gpufleet.load_test.report_format import report_of, reports, text
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.load_test.sample_results import (
    CLOSED,
    LEVELS,
    SERIES,
    SUBJECT,
    WORKLOAD,
    measurement,
)

FORMAT = jsonschema.Draft202012Validator(
    json.loads((ROOT / "tests/data/load_test/benchmark_report_fields.json").read_text())
)

WITH_MEANS = tuple(
    replace(
        each,
        ttft={**each.ttft, "mean": 0.05},
        itl={**each.itl, "mean": 0.005},
        e2e={**each.e2e, "mean": 0.7},
    )
    for each in LEVELS
)
IN_CLOSED_LOOP = tuple(replace(each, rate=None, concurrency=4) for each in LEVELS)


def field(document: Any, path: str) -> Any:
    """Return the value at a path: "results.observability"."""
    for step in path.split("."):
        document = document[int(step) if step.isdigit() else step]
    return document


@each_row(
    "changes",
    [
        {},
        {"levels": WITH_MEANS},
        {"levels": IN_CLOSED_LOOP, "loop": "closed"},
        {"closed": CLOSED, "series": SERIES},
        {"target": "gateway gw-1", "replicas": 3},
        {"target": "n-1", "replicas": 2, "workload": {"prompts": "own.jsonl", "turns": 3}},
        {"subject": replace(SUBJECT, gpus={}, driver=None, release="", revision="")},
        {"levels": (replace(LEVELS[0], seconds=0.0, requests=0, kept=0, ttft={}, itl={}, e2e={}),)},
    ],
    ids=str,
)
def test_every_report_has_the_fields_kinds_and_units_of_the_format(changes: dict[str, Any]) -> None:
    found = measurement(**changes)
    written = json.loads(json.dumps(reports(found), allow_nan=False))
    assert len(written) == len(found.levels) + len(found.closed.levels if found.closed else ())
    for each in written:
        FORMAT.validate(each)


@each_row(
    "path, value",
    [
        ("version", "0.3"),
        ("run.colour", "red"),
        ("scenario.stack.0.standardized.replicas", 0),
        ("scenario.load.standardized.source", "invented"),
        ("results.request_performance.aggregate.throughput.request_rate.units", "tokens/s"),
        ("results.request_performance.aggregate.latency.time_to_first_token", {"units": "s"}),
    ],
    ids=str,
)
def test_the_list_of_fields_refuses_what_the_format_has_not(path: str, value: object) -> None:
    wrong = json.loads(json.dumps(report_of(measurement(levels=WITH_MEANS), 0)))
    way, _, last = path.rpartition(".")
    (field(wrong, way) if way else wrong)[last] = value
    with pytest.raises(jsonschema.ValidationError):
        FORMAT.validate(wrong)


def test_reports_of_one_measurement_share_their_experiment_and_differ_in_their_id() -> None:
    one, other = reports(measurement()), reports(measurement(version="0.3.0"))
    assert len({each["run"]["eid"] for each in one}) == 1
    assert len({each["run"]["uid"] for each in one + other}) == len(one) + len(other)
    assert [field(each, "scenario.load.standardized.stage") for each in one] == [0, 1, 2, 3]
    assert one == reports(measurement())


def test_requests_without_an_answer_are_failures_or_incomplete() -> None:
    found = report_of(measurement(), 2)
    aggregate = field(found, "results.request_performance.aggregate")
    assert aggregate["requests"] == {"total": 1000, "failures": 3, "incomplete": 2}
    # 995 answers in 125 s.
    assert aggregate["throughput"]["request_rate"] == {"units": "queries/s", "mean": 7.96}
    assert aggregate["throughput"]["total_token_rate"]["mean"] == 640 * 8


def test_latencies_without_a_mean_are_left_out_for_the_format_takes_none_without() -> None:
    path = "results.request_performance.aggregate.latency"
    assert field(report_of(measurement(), 0), path) == {}
    found = field(report_of(measurement(levels=WITH_MEANS), 0), path)
    assert found["time_to_first_token"] == {
        "units": "s", "mean": 0.05, "p50": 0.04, "p90": 0.08, "p95": 0.1, "p99": 0.16,
    }  # fmt: skip
    assert found["inter_token_latency"]["units"] == "s/token"
    own = field(report_of(measurement(), 0), "results.observability.gpufleet")
    assert own["level"]["ttft"]["p99"] == 0.16
    assert own["level"]["verdict"] == "kept"
    assert own["found"]["missed"] == 8.0


def test_the_stack_names_release_hardware_and_parallelism() -> None:
    arguments = (
        "--tensor-parallel-size 2", "--pipeline-parallel-size=2", "--data-parallel-size 4",
        "--enable-expert-parallel",
    )  # fmt: skip
    found = report_of(measurement(subject=replace(SUBJECT, arguments=arguments)), 0)
    engine = field(found, "scenario.stack.0.standardized")
    assert engine["tool_version"] == "0.32.0-1a2b3c4d5e"
    assert engine["accelerator"] == {
        "model": "NVIDIA H100 80GB HBM3",
        "count": 2,
        "parallelism": {"tp": 2, "pp": 2, "dp": 4, "dp_local": 4, "ep": 8},
    }
    native = field(found, "scenario.stack.0.native")
    assert native["args"]["--pipeline-parallel-size"] == "2"
    assert native["args"]["--enable-expert-parallel"] is None
    assert len(field(found, "scenario.stack")) == 1
    behind = reports(measurement(target="gateway gw-1", replicas=3))[0]
    assert [field(behind, f"scenario.stack.{n}.standardized.kind") for n in (0, 1)] == [
        "inference_engine", "generic",
    ]  # fmt: skip


def test_lengths_are_named_as_drawn_only_where_they_are_the_whole_prompt() -> None:
    def lengths(**workload: Any) -> tuple[Any, Any]:
        found = report_of(measurement(workload={**WORKLOAD, **workload}), 0)
        load = field(found, "scenario.load.standardized")
        return load["input_seq_len"], load["output_seq_len"]

    assert lengths() == (
        {"distribution": "fixed", "value": 512.0},
        {"distribution": "uniform", "value": 128.0, "min": 64, "max": 192},
    )
    assert lengths(prefix_tokens=100)[0] == {"distribution": "other", "value": 612.0}
    # Of three turns the mean prompt has the second's: 2 x 512 and an answer of 128.
    assert lengths(turns=3)[0] == {"distribution": "other", "value": 1152.0}
    assert lengths(output="lognormal:128:1024")[1] == {
        "distribution": "other", "value": 128.0, "min": 1, "max": 1024,
    }  # fmt: skip
    # Of a workload that does not say: tokens a second / answers a second.
    found = report_of(measurement(workload={"prompts": "own.jsonl"}), 0)
    assert field(found, "scenario.load.standardized.input_seq_len.value") == 512.0
    assert field(found, "scenario.load.standardized.source") == "sampled"


def test_a_level_is_of_a_rate_or_of_a_concurrency() -> None:
    opened = field(report_of(measurement(), 1), "scenario.load.standardized")
    closed = field(
        report_of(measurement(levels=IN_CLOSED_LOOP, loop="closed"), 1),
        "scenario.load.standardized",
    )
    assert (opened["rate_qps"], "concurrency" in opened) == (4.0, False)
    assert (closed["concurrency"], "rate_qps" in closed) == (4, False)


def test_the_file_of_a_report_is_json_of_finite_numbers() -> None:
    found = report_of(measurement(), 0)
    assert json.loads(text(found)) == found
    broken = report_of(measurement(levels=(replace(LEVELS[0], mean_concurrency=float("nan")),)), 0)
    with pytest.raises(ValueError, match="JSON compliant"):
        text(broken)
