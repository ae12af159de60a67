"""Pages of /metrics of any engine, read by what they measure; one of tests is a folder more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpufleet import engines as room
from gpufleet.doctor.replica_speed import replica_speeds
from gpufleet.engines.engine import Measure, engines, line_beginnings
from gpufleet.engines.metrics_page import expected_name, read_page
from gpufleet.load_test.other_clients import read_counts
from gpufleet.load_test.outcomes import Contract
from gpufleet.on_node.change import wait
from gpufleet.on_node.watchdog import verdict
from gpufleet.planning.stage import Stage
from gpufleet.serving.unit import render_unit
from gpufleet.settings.serving_settings import EngineSettings, Served
from gpufleet.upgrade.gates import baseline
from gpufleet.upgrade.plan import replica_load
from gpufleet.upgrade.run import node_questions
from tests.support.checkout import ROOT
from tests.support.program_parameters import parameters

STAND_IN = '''
"""An engine of tests."""

from gpufleet.engines.engine import (
    Engine,
    FlagRules,
    Launcher,
    Measure,
    ProgressMetrics,
    ResponseCounter,
)

ENGINE = Engine(
    name="standin",
    title="Stand-in",
    prefix="standin:",
    metrics={
        Measure.RUNNING: ("standin:active",),
        Measure.WAITING: ("standin:queued",),
        Measure.KV_USE: ("standin:cache",),
        Measure.FINISHED: ("standin:done_total",),
        Measure.TTFT: ("standin:first_seconds",),
        Measure.ITL: ("standin:pause_seconds",),
        Measure.E2E: ("standin:whole_seconds",),
    },
    responses=ResponseCounter("standin:answers_total", "route", "code", "standin:active"),
    progress=ProgressMetrics(
        marks=("standin:active", "standin:done_total"),
        work=("standin:active",),
        engine_label="rank",
    ),
    program="bin/stand-in",
    launcher=Launcher("/stand-in", lambda templates: b"", lambda release: ("/stand-in", release)),
    flags=FlagRules(lambda: (), lambda version: None, lambda schema, argv, variables: ()),
    arguments=lambda stage, model, node: [
        (("serving", stage.model, "port"), ("--listen", f"{node.listen}:{stage.port}"))
    ],
    environment=lambda stage, model, node, release, toolkit: {"RELEASE": release},
    replica_variables=lambda model: {},
    rank=None,
)
'''


def buckets(name: str, late: int) -> str:
    counts = {"0.5": 90 - late, "+Inf": 90}
    return "".join(f'{name}_bucket{{rank="0",le="{le}"}} {n}\n' for le, n in counts.items())


PAGE = (
    'standin:active{rank="0"} 2\nstandin:active{rank="1"} 1\n'
    'standin:queued{rank="0"} 4\nstandin:cache{rank="0"} 0.5\nstandin:done_total{rank="0"} 90\n'
    'standin:answers_total{route="/v1/completions",code="200"} 88\n'
    'standin:answers_total{route="/v1/completions",code="500"} 1\n'
    'standin:answers_total{route="/v1/completions",code="503"} 1\n'
    'standin:answers_total{route="/health",code="200"} 9\n'
    + buckets("standin:first_seconds", late=1)
    + buckets("standin:pause_seconds", late=2)
    + buckets("standin:whole_seconds", late=3)
)


@pytest.fixture
def third_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One folder more, and no edit elsewhere."""
    package = tmp_path / "standin"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path)])
    yield "standin"
    sys.modules.pop("gpufleet.engines.standin", None)


def test_every_reader_of_metrics_understands_an_engine_that_is_one_folder_more(
    third_engine: str,
) -> None:
    assert third_engine in {each.name for each in engines()}
    load = replica_load.read(PAGE)
    assert isinstance(load, replica_load.Sample)
    assert (load.running, load.waiting, load.kv_usage, load.finished) == (3, 4, 0.5, 90)

    counters = baseline.counters(PAGE)
    assert counters.latencies[baseline.TTFT] == {0.5: 89, float("inf"): 90}
    assert counters.finished is None, "it exports no reasons"
    assert counters.answered == {"2xx": 88, "5xx": 2}

    seen = read_counts(PAGE, Contract(ttft_seconds=0.5, itl_seconds=0.5, e2e_seconds=0.5))
    assert isinstance(seen, dict)
    assert {name: each.late for name, each in seen.items()} == {"ttft": 1, "itl": 2, "e2e": 3}

    look = {"text": PAGE}
    said = {"replicas": {"tiny-0": {"servers": {"a:8000": [look, look]}}}}
    speed = replica_speeds({"gpu-01": said})["tiny-0"]
    assert not isinstance(speed, str)
    assert (speed.running, speed.waiting, speed.kv_use) == (3, 4, 0.5)


def test_a_drain_and_the_watchdog_are_told_the_names_of_an_engine_that_is_one_folder_more(
    third_engine: str,
) -> None:
    asked = node_questions.wait_quiet(["vllm-a-0.service"], 5)
    gauges = parameters(asked.program)["metrics"]
    assert {"standin:active", "standin:queued"} < {*gauges}
    assert wait.parse_requests(PAGE, gauges) == 7

    found = verdict.engines(PAGE, [vars(each.progress) for each in engines()])
    assert {rank: each.work for rank, each in found.items()} == {"0": 2, "1": 1}


class StandIn(EngineSettings):
    """The settings of the engine of tests."""

    engine: ClassVar[Any] = "standin"


def test_a_stage_of_an_engine_that_is_one_folder_more_has_a_unit(third_engine: str) -> None:
    settings = StandIn(version="1.0.0", lock="lock", listen="127.0.0.1")
    stage = Stage("m", 0, "gpu-01", (0,), ("GPU-a",), 8000, 1)
    text = render_unit(stage, Served(model="/srv/m"), settings, release="standin-1.0.0-ab").content
    release = "/opt/vllm/releases/standin-1.0.0-ab"
    assert "Description=Stand-in: m, replica 0\n" in text
    assert f"ExecStart=/stand-in {release} \\\n    {release}/bin/stand-in \\\n    --listen" in text
    assert "Environment=RELEASE=standin-1.0.0-ab\n" in text


def test_a_page_is_that_of_the_engine_whose_prefix_its_names_have(third_engine: str) -> None:
    recorded = (ROOT / "tests/data/vllm-0.32.0.metrics").read_text()
    assert [read_page(text).engine.name for text in (recorded, PAGE)] == ["vllm", third_engine]  # type: ignore[union-attr]
    assert read_page("node_load1 0.5\n").engine is None
    assert expected_name(Measure.RUNNING, read_page(PAGE)) == "standin:active"
    assert "vllm:num_requests_running" in expected_name(Measure.RUNNING)


def test_the_older_name_of_a_measure_is_read_where_the_newer_one_is_missing() -> None:
    page = read_page('vllm:time_per_output_token_seconds_bucket{le="+Inf"} 3\n')
    assert page.values(Measure.ITL) == (3,)


def test_no_two_engines_share_a_prefix_and_each_has_what_waves_and_drains_need() -> None:
    prefixes = [each.prefix for each in engines()]
    assert len({*prefixes}) == len(prefixes)
    for each in engines():
        assert {Measure.RUNNING, Measure.WAITING, Measure.KV_USE, Measure.FINISHED} <= {
            *each.metrics
        }
        assert {*each.progress.work} <= {*each.progress.marks}
        named = [*each.progress.marks, *(n for names in each.metrics.values() for n in names)]
        assert all(name.startswith(each.prefix) for name in named)
    assert all(line.endswith("{") for line in line_beginnings(*Measure))
