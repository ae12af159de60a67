"""What a model finishes against what its replicas were measured to carry: only where that holds."""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.monitoring.rules import capacity_rules
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from tests.unit.monitoring.prometheus import asked, prometheus
from tests.unit.monitoring.promtool import Case, Firing, run, too_early

MINUTE = 60
RELEASE = "0.32.0-1a2b3c4d5e"
# A name with what regular expressions take for something else.
NODE = "gpu-01.example.net"
MEASURED = (
    MeasuredReplica("tiny", "tiny-0", NODE, RELEASE, 10.0, dt.date(2026, 11, 20)),
    MeasuredReplica("tiny", "tiny-1", "gpu-02", RELEASE, 10.0, dt.date(2026, 11, 22)),
    # The same model on other hardware.
    MeasuredReplica("tiny", "tiny-2", "gpu-03", RELEASE, 5.0, dt.date(2026, 11, 24)),
    MeasuredReplica("other", "other-0", NODE, RELEASE, 1.0, dt.date(2026, 11, 24)),
)
NEAR = "VllmNearMeasuredCapacity"


def replica(
    finished: float,
    *,
    stage: str = "tiny-0",
    node: str = NODE,
    release: str = RELEASE,
    up: str = "1x60",
) -> dict[str, str]:
    """Write the series of a replica that finishes so many requests a second."""
    model = stage.rpartition("-")[0]
    labels = f'instance="{node}",stage="{stage}",model="{model}"'
    a_minute = finished * MINUTE
    return {
        f'up{{job="vllm",{labels}}}': up,
        f'vllm:request_success_total{{job="vllm",{labels},engine="0",model_name="x",'
        'finished_reason="stop"}': f"0+{a_minute * 0.75:g}x60",
        f'vllm:request_success_total{{job="vllm",{labels},engine="1",model_name="x",'
        'finished_reason="length"}': f"0+{a_minute * 0.25:g}x60",
        f'gpufleet_stage_info{{job="node",{labels},release="{release}",'
        f'unit="vllm-{stage}.service"}}': "1x60",
    }


def fires(share: str, model: str = "tiny", date: str = "2026-11-20") -> tuple[Firing, ...]:
    summary = (
        f"{model}: the replicas run at {share} of the request rate that was measured as their "
        f"limit on {date}"
    )
    return (Firing({"model": model, "measured": date}, summary),)


_ALL = (
    Case(NEAR, "one replica, at 95 %", replica(9.5), at=40 * MINUTE, fires=fires("95%")),
    Case(NEAR, "one replica, at 85 %", replica(8.5), at=40 * MINUTE),
    Case(
        NEAR,
        "two replicas: one beyond it, one far below",
        {**replica(12), **replica(7, stage="tiny-1", node="gpu-02")},
        at=40 * MINUTE,
        fires=fires("95%"),
    ),
    Case(
        NEAR,
        "one of two is beyond it, both together are not",
        {**replica(12), **replica(5, stage="tiny-1", node="gpu-02")},
        at=40 * MINUTE,
    ),
    Case(
        NEAR,
        "replicas of two kinds, each with its own rate",
        {**replica(9.5), **replica(4.75, stage="tiny-2", node="gpu-03")},
        at=40 * MINUTE,
        fires=fires("95%"),
    ),
    Case(
        NEAR,
        "another model has its own date",
        {**replica(0.95, stage="other-0"), **replica(1)},
        at=40 * MINUTE,
        fires=fires("95%", "other", "2026-11-24"),
    ),
    Case(
        NEAR,
        "one of two replicas is drained: what it would carry, it does not",
        {**replica(9.5), **replica(0, stage="tiny-1", node="gpu-02")},
        at=40 * MINUTE,
        fires=fires("95%"),
    ),
    Case(
        NEAR,
        "one of two replicas is down",
        {**replica(9.5), **replica(0.5, stage="tiny-1", node="gpu-02", up="0x60")},
        at=40 * MINUTE,
        fires=fires("95%"),
    ),
    Case(NEAR, "it has another release by now", replica(9.5, release="0.33.0-ff"), at=40 * MINUTE),
    Case(NEAR, "it moved to another node by now", replica(9.5, node="gpu-04"), at=40 * MINUTE),
    Case(
        NEAR,
        "its node has a name that is only alike",
        replica(9.5, node="gpu-01-example.net"),
        at=40 * MINUTE,
    ),
    Case(
        NEAR,
        "a replica that was not measured counts on neither side",
        {**replica(5), **replica(20, stage="tiny-7", node="gpu-07")},
        at=40 * MINUTE,
    ),
    Case(NEAR, "no requests at all", replica(0), at=40 * MINUTE),
    Case(
        NEAR,
        "ten minutes of a burst",
        {
            series: values if "success" not in series else "0x20 0+427.5x10 4275x30"
            for series, values in replica(9.5).items()
        },
        at=33 * MINUTE,
    ),
)
CASES = (*_ALL, *too_early(_ALL, {NEAR: 10}))


def rules_file(measured: tuple[MeasuredReplica, ...]) -> str:
    return rule_files(RuleSettings(measured=measured))["vllm.rules.yml"]


def test_the_alert_fires_near_what_was_measured_and_nowhere_else(tmp_path: Path) -> None:
    run(CASES, {"vllm.rules.yml": rules_file(MEASURED)}, capacity_rules.ALERTS, tmp_path)


def samples(now: float) -> Iterator[str]:
    """Yield half an hour of two replicas, at 99 % and at 85 % of what they carry."""
    series = {**replica(9.9), **replica(0.85, stage="other-0")}
    families: dict[str, list[str]] = {}
    for name, values in series.items():
        first, _, step = values.partition("x")[0].partition("+")
        for second in range(-1800, 0, 15):
            value = float(first) + float(step or 0) * second / MINUTE + (3600 if step else 0)
            families.setdefault(name.partition("{")[0], []).append(
                f"{name} {value:g} {now + second:.3f}\n"
            )
    for family, lines in families.items():
        yield f"# TYPE {family} unknown\n"
        yield from lines
    yield "# EOF\n"


@pytest.mark.slow
def test_a_real_prometheus_fires_the_alert_and_no_other_model_s(tmp_path: Path) -> None:
    """Its window is real, over samples that are there; the ten minutes of `for` are 5 s here."""
    text = rules_file(MEASURED)
    assert "for: 600s" in text or "for: 10m" in text
    rules = {"vllm.rules.yml": re.sub(r"for: (600s|10m)$", "for: 5s", text, flags=re.MULTILINE)}
    with prometheus(tmp_path, samples(time.time()), rules) as url:
        firing: list[Any] = []
        end = time.monotonic() + 60
        while not firing and time.monotonic() < end:
            time.sleep(1)
            firing = asked(url, f'ALERTS{{alertname="{NEAR}",alertstate="firing"}}', time.time())
        ratio = asked(url, "model:measured_load:ratio", time.time())
        pending = asked(url, f'ALERTS{{alertname="{NEAR}",model="other"}}', time.time())

    # They fall as the samples' end passes out of the window.
    shares = {each["metric"]["model"]: float(each["value"][1]) for each in ratio}
    assert 0.9 < shares["tiny"] < 1
    assert 0.7 < shares["other"] < 0.9
    (alert,) = firing
    assert (alert["metric"]["model"], alert["metric"]["measured"]) == ("tiny", "2026-11-20")
    assert alert["metric"]["severity"] == "ticket"
    assert pending == []


def test_without_a_measurement_there_is_neither_alert_nor_rate() -> None:
    text = rules_file(())

    assert NEAR not in text
    assert "measured" not in text


def test_a_new_result_changes_the_file_and_the_order_of_replicas_does_not() -> None:
    text = rules_file(MEASURED)

    assert rules_file(MEASURED[::-1]) == text
    for changed in ({"requests_per_second": 11.0}, {"measured": dt.date(2026, 11, 19)}):
        assert rules_file((replace(MEASURED[0], **changed), *MEASURED[1:])) != text


def test_a_name_from_a_node_stays_a_name_in_the_expression() -> None:
    """A release is read from a node's unit: it cannot end the string that it stands in."""
    (hostile, *_) = capacity_rules.rules(
        [replace(MEASURED[0], release='x"} or vector(1) #', node='a"|.*')]
    )[0][1:]

    assert 'release="x\\"} or vector(1) #"' in hostile.expr
    assert 'instance=~"a\\\\\\"\\\\|\\\\.\\\\*"' in hostile.expr
