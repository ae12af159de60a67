"""Cases for rules, as data, and Prometheus' own promtool that runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from gpufleet.monitoring.rules.rule import Alert
from tests.unit.monitoring.programs import program

PACKAGE, PATH = "prometheus", "usr/bin/promtool"


@dataclass(frozen=True)
class Firing:
    """
    One alert that fires.

    Attributes:
        labels: all of them but `alertname` and `severity`, which the rule gives.
        summary: as the templates render it.
    """

    labels: Mapping[str, str]
    summary: str


@dataclass(frozen=True)
class Case:
    """
    What an alert makes of series.

    Attributes:
        alert: its name.
        why: what the series mean: "a short spike", "the exporter started again".
        series: {series: values}, values every `step` in promtool's notation ("0x10 5x20").
        at: when it is asked, in seconds after the first value.
        fires: what fires then, and nothing else of this name; empty: it is silent.
        step: seconds between two values; rules are evaluated as often as the alert's finest case.
    """

    alert: str
    why: str
    series: Mapping[str, str]
    at: int
    fires: tuple[Firing, ...] = ()
    step: int = 60


def too_early(cases: Iterable[Case], minutes: Mapping[str, int]) -> tuple[Case, ...]:
    """
    Return the first firing case of each alert in `minutes`, asked at that minute and silent.

    Whoever gives the minute before an alert fires holds it to how long it waits.
    """
    firing: dict[str, Case] = {}
    for case in cases:
        if case.fires:
            firing.setdefault(case.alert, case)
    return tuple(
        replace(firing[name], why=f"{firing[name].why}, too early", at=minute * 60, fires=())
        for name, minute in minutes.items()
    )


def check(rules: Path) -> None:
    """Run `promtool check rules` over a file, or over all of a directory; fail on its complaint."""
    files = sorted(rules.glob("*.yml")) if rules.is_dir() else [rules]
    _promtool("check", "rules", *files)


def run(
    cases: Iterable[Case], files: Mapping[str, str], alerts: Iterable[Alert], folder: Path
) -> None:
    """
    Run all cases over rule files, in one promtool; fail with what it says.

    `files` are {name: text}, `alerts` those that are in them; what is run goes to `folder`. Each
    alert is run with the recordings that it needs alone: with all of them it takes ten times as
    long.
    """
    by_name = {alert.name: alert for alert in alerts}
    rules = [
        rule
        for text in files.values()
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
    ]
    of_alert: dict[str, list[Case]] = {}
    for case in cases:
        of_alert.setdefault(case.alert, []).append(case)
    tests = []
    for name, own in of_alert.items():
        group = {"name": name, "rules": _needed(name, rules)}
        (folder / f"{name}.rules.yml").write_text(yaml.safe_dump({"groups": [group]}))
        test = {
            "rule_files": [f"{name}.rules.yml"],
            "evaluation_interval": f"{min(case.step for case in own)}s",
            "tests": [_group(same, by_name[name]) for same in _by_series(own)],
        }
        tests.append(folder / f"{name}.test.yml")
        tests[-1].write_text(yaml.safe_dump(test, sort_keys=False))
    _promtool("test", "rules", *tests)


def _needed(alert: str, rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an alert and every recording that it rests on, in their order."""
    wanted = [rule for rule in rules if rule.get("alert") == alert]
    for rule in wanted:  # grows while it is read
        wanted += [
            other
            for other in rules
            if other not in wanted and other.get("record", "\n") in rule["expr"]
        ]
    return [rule for rule in rules if rule in wanted]


def _by_series(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the cases, those of the same series together: promtool makes a database of each."""
    found: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        found.setdefault((case.step, *case.series.items()), []).append(case)
    return [*found.values()]


def _group(cases: list[Case], alert: Alert) -> dict[str, Any]:
    fixed = {"action": alert.action, "runbook": f"docs/alerts/{alert.page}.md"}
    first = cases[0]
    return {
        "name": f"{alert.name}: {'; '.join(case.why for case in cases)}",
        "interval": f"{first.step}s",
        "input_series": [
            {"series": series, "values": values} for series, values in first.series.items()
        ],
        "alert_rule_test": [
            {
                "eval_time": f"{case.at}s",
                "alertname": case.alert,
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": alert.severity.value, **firing.labels},
                        "exp_annotations": {"summary": firing.summary, **fixed},
                    }
                    for firing in case.fires
                ],
            }
            for case in cases
        ],
    }


def _promtool(*args: str | Path) -> None:
    # Of its time a third is the collection of garbage, and what threads cost that share a core.
    sparing = {"GOGC": "400", "GOMAXPROCS": "1"}
    done = subprocess.run(
        [program(PACKAGE, PATH), *args],
        env=os.environ | sparing,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
