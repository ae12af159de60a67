"""Every expression finds something in what real servers served: names do not rot unseen.

Recordings are raw; how each was made stands in recorded/README.md.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gpufleet.monitoring.metrics import gateway_metrics, prometheus_metrics, vllm_metrics
from gpufleet.monitoring.metrics.catalogue import METRICS, SERIES
from gpufleet.monitoring.metrics.metric import Job, Metric, Release
from gpufleet.monitoring.rules import gateway_rules, monitoring_rules, vllm_rules
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.monitoring.rules.files import RuleSettings, groups, rule_files
from gpufleet.settings.monitoring_settings import Objectives
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.monitoring.offline import (
    TARGET,
    Recorded,
    Sample,
    computed,
    listed,
    missing,
    names,
    of_engine,
    recorded,
    selectors,
)
from tests.unit.monitoring.panels import queries
from tests.unit.monitoring.programs import program

PROMISED = {"tiny": Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, e2e_p99_seconds=30)}
MEASURED = (MeasuredReplica("tiny", "tiny-0", "gpu-01", "any", 10, dt.date(2026, 11, 20)),)
RECORDINGS, ALERTS = vllm_rules.rules(PROMISED, MEASURED)
EXPRESSIONS = [*(each.expr for each in RECORDINGS), *(each.expr for each in ALERTS)]
RELEASES: dict[str, Release] = {
    "vllm-0.28.0": (0, 28),
    "vllm-0.30.0": (0, 30),
    "vllm-0.32.0": (0, 32),
    "vllm-0.32.0-rerank": (0, 32),
}
# What one release has and another has not; of all others every expression must find something.
LATER = {"VllmTurnsRequestsAway"}
NOT_OF_SGLANG = {
    # It has no reason with the number of finished requests.
    "model:broken_requests:ratio_10m",
    # What was recorded has no 5xx.
    "model:http_errors:ratio_10m",
    "VllmErrors",
    # No series before the first retracted request.
    "VllmKvCacheFull",
    "VllmPreemptions",
    # The same; and an engine without a label, or requests without a reason, are as good.
    "VllmNoProgress",
    "VllmTurnsRequestsAway",
}
"""Rules that ask for more than a server of SGLang 0.5.23 has."""


def served(name: str) -> Recorded:
    """A release's recording, with what else its rules ask for: our own metrics, and recordings."""
    elsewhere = [metric for metric in METRICS.values() if metric.job is not Job.VLLM]
    return recorded(name, Job.VLLM) + listed(elsewhere) + computed(RECORDINGS)


def is_served_by(metric: Metric, release: Release) -> bool:
    """Whether that release of its server has a metric."""
    after = metric.since is None or release >= metric.since
    return after and (metric.before is None or release < metric.before)


def later(expression: str, release: Release) -> bool:
    """Whether the expression asks for a metric that the release does not have yet."""
    return any(
        not is_served_by(SERIES[name], release) for name in names(expression) if name in SERIES
    )


@pytest.mark.parametrize("name", RELEASES)
def test_every_rule_of_engine_finds_what_it_asks_for_in_a_real_release(name: str) -> None:
    series, release = served(name), RELEASES[name]
    skipped = {each.name for each in ALERTS if later(each.expr, release)}

    found = {
        expression: missing(expression, series)
        for expression in EXPRESSIONS
        if not later(expression, release)
    }

    assert {expression: problems for expression, problems in found.items() if problems} == {}
    assert skipped == (LATER if release < (0, 32) else set())


def test_every_rule_finds_what_it_asks_for_in_a_real_sglang_but_for_those_named() -> None:
    elsewhere = [metric for metric in METRICS.values() if metric.job is not Job.VLLM]
    series = recorded("sglang-0.5.23", Job.VLLM) + listed(elsewhere) + computed(RECORDINGS)
    of_all = {each.record: each.expr for each in RECORDINGS}
    of_all |= {each.name: each.expr for each in ALERTS}
    unfound = {name for name, expr in of_all.items() if missing(expr, series, "sglang")}
    assert unfound == NOT_OF_SGLANG


@pytest.mark.parametrize("name", RELEASES)
def test_every_panel_finds_what_it_asks_for_in_a_real_release(name: str) -> None:
    """Labels too: what a legend or a table shows must be there."""
    shipped = groups(PROMISED, MEASURED)
    every = computed(recording for group in shipped for recording in group.recordings)
    elsewhere = listed(metric for metric in METRICS.values() if metric.job is not Job.VLLM)
    series = recorded(name, Job.VLLM) + elsewhere + every
    asked = queries({"instance": "gpu-01", "model": "tiny"})
    assert len([each for each in asked if "vllm:" in each.expr]) > 20

    found = {
        (each.dashboard, each.panel, each.expr): missing(each.expr, series)
        for each in asked
        if not later(each.expr, RELEASES[name])
    }

    assert {where: problems for where, problems in found.items() if problems} == {}


@pytest.mark.parametrize("name", RELEASES)
def test_every_listed_metric_of_engine_is_served_with_its_type_and_labels(name: str) -> None:
    assert wrong(vllm_metrics.METRICS, recorded(name, Job.VLLM), RELEASES[name]) == []


def test_what_a_release_does_not_have_yet_is_not_in_its_recording() -> None:
    """So `since` is not merely cautious."""
    for name, release in RELEASES.items():
        there = {sample.name for sample in recorded(name, Job.VLLM).samples}
        early = {
            series
            for metric in vllm_metrics.METRICS
            if not is_served_by(metric, release)
            for series in metric.series
        }
        assert there & early == set()


def test_every_rule_of_the_gateway_finds_what_it_asks_for_in_a_real_haproxy() -> None:
    elsewhere = [metric for metric in METRICS.values() if metric.job is not Job.GATEWAY]
    series = recorded("haproxy-2.6", Job.GATEWAY) + listed(elsewhere)
    expressions = [each.expr for each in gateway_rules.ALERTS]

    assert [missing(each, series) for each in expressions] == [[] for _ in expressions]
    assert wrong(gateway_metrics.METRICS, series) == []


def test_every_rule_of_monitoring_finds_what_it_asks_for_in_the_real_servers() -> None:
    made = [each for each in METRICS.values() if each in prometheus_metrics.MADE]
    ours = [each for each in METRICS.values() if each.job in (Job.NODE, Job.VLLM)]
    servers = recorded("prometheus-2.42", Job.PROMETHEUS) + recorded(
        "alertmanager-0.25", Job.ALERTMANAGER
    )
    series = servers + listed(made) + listed(ours)

    assert [missing(each.expr, series) for each in monitoring_rules.ALERTS] == [
        [] for _ in monitoring_rules.ALERTS
    ]
    assert wrong((*prometheus_metrics.PROMETHEUS, *prometheus_metrics.ALERTMANAGER), servers) == []


def wrong(metrics: Iterable[Metric], series: Recorded, release: Release | None = None) -> list[str]:
    """Say what of the metrics is not served as the catalogue says."""
    found = []
    for metric in metrics:
        if release and not is_served_by(metric, release):
            continue
        for name in metric.series:
            there = list(series.named(name))
            if not there:
                found.append(f"{name} is not served")
            elif lacking := set(metric.labels) - set(there[0].labels):
                found.append(f"{name} has no label {lacking}")
            elif series.types[name] != metric.type:
                found.append(f"{name} is a {series.types[name]}, not a {metric.type}")
    return found


@each_row(
    ("right", "rotten", "told"),
    [
        # The mistakes of public dashboards, one each.
        ("kv_cache_usage_perc", "gpu_cache_usage_perc", "there is no such series"),
        ("inter_token_latency_seconds", "time_per_output_token_seconds", "no such series"),
        ("by (instance, stage, model)", "by (instance, stage, pod)", "has no label pod"),
        ('finished_reason="error"', 'finished_reason="failed"', "no series has finished_reason"),
        ('status=~"5.."', 'code=~"5.."', "no series has code"),
        ("model, le)", "model)", "has no label le"),
        (
            "sum by (instance, stage, model) (vllm:num_requests_running)",
            "rate(vllm:num_requests_running[5m])",
            "which is a gauge",
        ),
    ],
)
def test_a_rule_that_rots_is_told(right: str, rotten: str, told: str) -> None:
    """Mutation: whatever is replaced in a rule, somebody hears of it."""
    series = served("vllm-0.30.0")
    of_one = map(of_engine, EXPRESSIONS)
    touched = [each for each in of_one if right in each and not later(each, (0, 30))]
    assert touched

    for each in touched:
        assert told in " ".join(missing(each.replace(right, rotten), series))


@pytest.mark.parametrize("name", RELEASES)
def test_real_prometheus_finds_series_for_every_selector(name: str, tmp_path: Path) -> None:
    """The recording, with every counter moving, in Prometheus' own engine: nothing is empty."""
    assert unanswered(served(name), RELEASES[name], tmp_path) == ""


def test_real_prometheus_misses_a_renamed_metric(tmp_path: Path) -> None:
    """Mutation: the recording as of a release that had renamed the KV cache's gauge."""
    series = served("vllm-0.30.0")
    renamed = tuple(
        replace(sample, name="vllm:gpu_cache_usage_perc")
        if sample.name == "vllm:kv_cache_usage_perc"
        else sample
        for sample in series.samples
    )

    told = unanswered(Recorded(renamed, series.types), RELEASES["vllm-0.30.0"], tmp_path)

    assert "absent(vllm:kv_cache_usage_perc)" in told
    assert "absent_over_time(stage:kv_cache_usage:max[300s])" in told


def unanswered(series: Recorded, release: Release, folder: Path) -> str:
    """Ask promtool for every selector of every rule and for every recording; return what fails."""
    declared = RuleSettings(PROMISED, settings=frozenset({"watchdog"}), measured=MEASURED)
    files = rule_files(declared)
    (folder / "vllm.rules.yml").write_text(files["vllm.rules.yml"])
    expressions = [each for each in EXPRESSIONS if not later(each, release)]
    asked = {
        f"absent_over_time({selector}{window})" if window else f"absent({selector})"
        for each in expressions
        for selector, window in selectors(each).items()
    } | {f"absent({of_engine(each.expr)})" for each in RECORDINGS}
    used = {name for each in expressions for name in names(each)}
    inputs = [
        {"series": written(sample), "values": values(sample, series)}
        for sample in (*series.samples, Sample("up", {"instance": "gpu-01", "job": "node"}))
        # What is recorded by the rules under test must come from them.
        if sample.name in used and sample.name not in {each.record for each in RECORDINGS}
    ]
    tests = {
        "rule_files": ["vllm.rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": inputs,
                "promql_expr_test": [
                    {"expr": expression, "eval_time": "20m", "exp_samples": []}
                    for expression in sorted(asked)
                ],
            }
        ],
    }
    (folder / "tests.yml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [program("prometheus", "usr/bin/promtool"), "test", "rules", folder / "tests.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def written(sample: Sample) -> str:
    """A series as promtool reads it; where any value will do, one that matches nobody's regex."""
    labels = ", ".join(
        f"{name}={json.dumps(ANY.get((sample.name, name), 'any') if value is None else value)}"
        for name, value in sample.labels.items()
        if name != "__name__"
    )
    return f"{sample.name}{{{labels}}}"


# What Prometheus makes for every target has any job; the rules under test ask for these two.
ANY = {
    ("up", "job"): "vllm",
    ("scrape_duration_seconds", "job"): "vllm",
    **{("up", name): value for name, value in TARGET[Job.VLLM].items()},
    # A measured rate is asked for by the replica.
    **{("gpufleet_stage_info", name): TARGET[Job.VLLM][name] for name in ("stage", "model")},
}


def values(sample: Sample, series: Recorded) -> str:
    """Counters move by one a minute; everything else stays as it was recorded."""
    value = 0.0 if math.isnan(sample.value) else sample.value
    moving = series.types.get(sample.name) in ("counter", "histogram")
    return f"{value!r}+{int(moving)}x30"


def test_recordings_are_as_they_came_off_the_wire() -> None:
    """Nobody trims or mends them: every sample has its HELP and TYPE, and no label is ours."""
    for name in RELEASES:
        text = (ROOT / f"tests/unit/monitoring/recorded/{name}.txt").read_text()
        families = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
        assert len(families) > 80
        assert "python_info" in families
        assert not re.search(r'\b(instance|stage|job)="', text)
