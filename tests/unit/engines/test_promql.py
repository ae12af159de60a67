"""Selectors of the servers' metrics, for every engine at once."""

from __future__ import annotations

import promql_parser as promql

from gpufleet.engines.engine import Measure
from gpufleet.engines.promql import metric, responses, with_status
from tests.unit.monitoring.offline import matches

VLLM = {"__name__": "http_requests_total", "job": "vllm", "method": "POST", "handler": "/v1/rerank"}
SGLANG = {
    "__name__": "sglang:http_responses_total",
    "job": "vllm",
    "method": "POST",
    "endpoint": "/v1/rerank",
}


def selected(selector: str, series: dict[str, str]) -> bool:
    """Return whether Prometheus selects a series, which lacks the labels that are not given."""
    node = promql.parse(selector)
    return node.name in {None, series["__name__"]} and all(
        matches(each, series.get(each.name, "")) for each in node.matchers.matchers
    )


def test_a_measure_of_several_engines_is_selected_by_the_newest_name_of_each() -> None:
    selector = metric(Measure.RUNNING, 'model="m"')
    itl = metric(Measure.ITL)

    for name in ("vllm:num_requests_running", "sglang:num_running_reqs"):
        assert selected(selector, {"__name__": name, "model": "m"})
        assert not selected(selector, {"__name__": name, "model": "other"})
    assert not selected(selector, {"__name__": "vllm:num_requests_waiting", "model": "m"})
    assert selected(itl, {"__name__": "vllm:inter_token_latency_seconds_bucket"})
    assert not selected(itl, {"__name__": "vllm:time_per_output_token_seconds_bucket"})


def test_a_measure_of_one_engine_is_selected_by_its_name_alone() -> None:
    assert metric(Measure.REJECTED) == "vllm:admission_rejections_total"
    assert metric(Measure.REJECTED, 'model="m"') == 'vllm:admission_rejections_total{model="m"}'


def test_of_a_histogram_the_buckets_are_selected_unless_another_part_is_named() -> None:
    for part, ending in (("", "_bucket"), ("_count", "_count")):
        selector = metric(Measure.TTFT, part=part)
        for engine in ("vllm", "sglang"):
            name = f"{engine}:time_to_first_token_seconds{ending}"
            assert selected(selector, {"__name__": name})
            assert not selected(selector, {"__name__": f"{name}_other"})


def test_answers_to_clients_are_counted_for_every_engine_and_probes_for_none() -> None:
    answers = responses('job="vllm"')

    for series, path in ((VLLM, "handler"), (SGLANG, "endpoint")):
        assert selected(answers, series)
        assert selected(answers, {**series, path: "/v1/completions"})
        assert selected(answers, {**series, path: "/rerank"})
        assert not selected(answers, {**series, path: "/health"})
        assert not selected(answers, {**series, "method": "GET"})
        assert not selected(answers, {**series, "job": "node"})


def test_answers_are_told_apart_by_their_status_or_its_class() -> None:
    errors, others = responses('job="vllm"', only="5.."), responses('job="vllm"', but="2..")

    for series, status in ((VLLM, "status"), (SGLANG, "status_code")):
        for said, is_error, is_other in (
            ("503", True, True),
            ("5xx", True, True),
            ("404", False, True),
            ("200", False, False),
        ):
            assert selected(errors, {**series, status: said}) is is_error, said
            assert selected(others, {**series, status: said}) is is_other, said


def test_the_status_of_every_engine_is_under_one_label() -> None:
    joined = promql.parse(with_status("x"))

    assert [arg.val for arg in joined.args[1:]] == ["status", "", "status_code", "status"]
