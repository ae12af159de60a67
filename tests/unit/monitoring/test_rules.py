"""All rules together: nothing is named that nobody serves, and nothing rings without a page."""

from __future__ import annotations

import datetime as dt
import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gpufleet.errors import FleetError
from gpufleet.monitoring.metrics.catalogue import METRICS, join_lists
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.monitoring.rules.files import RuleSettings, groups, rule_files
from gpufleet.monitoring.rules.rule import Alert, Recording
from gpufleet.settings.monitoring_settings import AlertChange, Objectives
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.monitoring.offline import computed, listed, missing, names
from tests.unit.monitoring.promtool import Case, check

PAGES = ROOT / "docs/alerts"

OBJECTIVES = {"tiny": Objectives(ttft_p99_seconds=2, itl_p99_seconds=0.2, e2e_p99_seconds=30)}
MEASURED = (
    MeasuredReplica("tiny", "tiny-0", "gpu-01", "0.32.0-1a2b3c4d5e", 10, dt.date(2026, 11, 20)),
)
GROUPS = groups(OBJECTIVES, MEASURED)
ALERTS = {alert.name: alert for group in GROUPS for alert in group.alerts}
RECORDINGS = {each.record: each for group in GROUPS for each in group.recordings}
SERIES = listed(METRICS.values()) + computed(RECORDINGS.values())
EVERYTHING = RuleSettings(
    objectives=OBJECTIVES,
    settings=frozenset(need for alert in ALERTS.values() for need in alert.needs),
    measured=MEASURED,
)

CASES: tuple[Case, ...] = tuple(
    case
    for path in sorted((ROOT / "tests/unit/monitoring").glob("test_*_rules.py"))
    for case in importlib.import_module(f"tests.unit.monitoring.{path.stem}").CASES
)

# Labels that exporters have renamed, or that say what `instance` and `UUID` say already.
RENAMED = ("Hostname", "hostname", "modelName", "pci_bus_id", "DCGM_FI_DRIVER_VERSION")


def rules() -> dict[str, str]:
    """Return {name of a rule: its expression}."""
    every: Iterable[tuple[str, Alert | Recording]] = (*ALERTS.items(), *RECORDINGS.items())
    return {name: rule.expr for name, rule in every}


def test_names_are_given_once() -> None:
    """So an operator's change of an alert is a change of one, and a page is of one."""
    alerts = [alert.name for group in GROUPS for alert in group.alerts]
    records = [each.record for group in GROUPS for each in group.recordings]

    assert len(alerts) == len(set(alerts)) == len({alert.page for alert in ALERTS.values()})
    assert len(records) == len(set(records))
    assert not set(records) & set(METRICS)
    with pytest.raises(ValueError, match="listed twice"):
        join_lists(tuple(METRICS.values()), tuple(METRICS.values())[:1])


def test_promtool_takes_every_file(tmp_path: Path) -> None:
    files = rule_files(EVERYTHING)
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    check(tmp_path)
    assert set(files) == {f"{group.name}.rules.yml" for group in GROUPS}


@each_row("name", sorted(rules()))
def test_a_rule_asks_only_for_what_is_listed_or_recorded(name: str) -> None:
    """Names, labels in selectors, in `by` and in `on`: all of them are in the lists of metrics."""
    expression = rules()[name]

    assert missing(expression, SERIES) == []
    assert [label for label in RENAMED if re.search(rf"\b{label}\b", expression)] == []


def test_a_rule_that_names_a_label_of_no_metric_is_told() -> None:
    """The test above can fail: labels that one release of an exporter had, and a typing slip."""
    assert missing("max by (Hostname) (DCGM_FI_DEV_GPU_TEMP)", SERIES)
    assert missing("DCGM_FI_DEV_GPU_TEMPERATURE > 0", SERIES)
    assert missing("gpu:temperature_celsius and on (modelName) up", SERIES)


def test_no_rule_rests_on_the_gauge_that_keeps_the_last_xid() -> None:
    """It is sticky: it stays at its last number until the exporter starts again."""
    assert [name for name, expr in rules().items() if "DCGM_FI_DEV_XID_ERRORS" in names(expr)] == []


@each_row("name", sorted(ALERTS))
def test_an_alert_is_shown_to_fire_and_to_stay_silent(name: str) -> None:
    own = [case for case in CASES if case.alert == name]

    assert [case.why for case in own if case.fires]
    # A heartbeat is never silent: that is its purpose.
    assert [case.why for case in own if not case.fires] or ALERTS[name].expr == "vector(1)"


def test_an_alert_that_waits_is_shown_to_wait() -> None:
    """Its first firing case is asked a minute too early as well: `for` cannot be lost."""
    waiting = {name for name, alert in ALERTS.items() if alert.for_seconds}

    assert {case.alert for case in CASES if case.why.endswith("too early")} == waiting


@each_row("case", CASES, ids=lambda case: f"{case.alert}-{case.why}")
def test_what_fires_says_where(case: Case) -> None:
    """It names its node, unless it is about the whole; and its own severity is not overwritten."""
    for firing in case.fires:
        assert "severity" not in firing.labels
        if "instance" in firing.labels:
            assert firing.labels["instance"] in firing.summary
        else:
            assert "{{ $labels.instance }}" not in ALERTS[case.alert].summary


@each_row("name", sorted(ALERTS))
def test_an_alert_has_a_page_that_says_what_to_type(name: str) -> None:
    """Its title, what is still safe, steps by number or a command, and how it ends."""
    alert = ALERTS[name]
    text = (PAGES / f"{alert.page}.md").read_text()

    assert text.startswith(f"# {name}: ")
    assert "**Still safe:**" in text
    assert "**It ends**" in text
    assert re.search(r"^1\. ", text, re.MULTILINE)
    assert len(text.splitlines()) < 60
    assert "{{" not in alert.action


def test_every_page_is_of_an_alert_and_its_links_lead_somewhere() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")} - {"README"}
    assert pages == {alert.page for alert in ALERTS.values()}

    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            assert target.startswith("https://") or (PAGES / target).exists(), (path.name, target)


def table() -> str:
    """Return the table of all alerts, as docs/alerts/README.md has it."""
    lines = ["| alert | severity | after | says |", "| --- | --- | --- | --- |"]
    for alert in sorted(ALERTS.values(), key=lambda alert: alert.name):
        summary = re.sub(
            r"\{\{ \$labels\.(\w+) \}\}",
            lambda found: {"instance": "NODE", "gpu": "N"}.get(found[1], found[1].upper()),
            alert.summary,
        )
        summary = re.sub(r"\{\{ if .*?\{\{ end \}\}", "...", summary)
        summary = re.sub(r"\{\{.*?\}\}", "N", summary)
        lines.append(
            f"| [{alert.name}]({alert.page}.md) | {alert.severity} | {_said(alert.for_seconds)} | "
            f"{summary} |"
        )
    return "\n".join(lines)


def _said(seconds: int) -> str:
    """Say a duration in its largest whole unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds and seconds % size == 0:
            return f"{seconds // size} {unit}"
    return "at once"


def test_the_table_of_alerts_is_that_of_the_code() -> None:
    text = (PAGES / "README.md").read_text()

    assert table() in text, f"docs/alerts/README.md should have:\n{table()}"


def rendered(declared: RuleSettings) -> Mapping[str, dict[str, object]]:
    """Return {alert: its rule} of all files."""
    return {
        rule["alert"]: rule
        for text in rule_files(declared).values()
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


def test_an_alert_is_as_its_operator_wants_it() -> None:
    plain = rendered(EVERYTHING)
    changes = {
        "RebootPending": AlertChange(for_seconds=60, severity="page"),
        "Drift": AlertChange(enabled=False),
    }
    changed = rendered(
        replace(EVERYTHING, alerts=changes, runbooks_url="https://wiki.example.net/alerts")
    )

    assert plain["RebootPending"]["for"] == "86400s"
    assert changed["RebootPending"]["for"] == "60s"
    assert changed["RebootPending"]["labels"] == {"severity": "page"}
    assert changed["RebootPending"]["annotations"] == {
        "summary": ALERTS["RebootPending"].summary,
        "action": ALERTS["RebootPending"].action,
        "runbook": "https://wiki.example.net/alerts/reboot-pending.md",
    }
    assert set(plain) - set(changed) == {"Drift"}
    assert changed["GpuLost"]["expr"] == plain["GpuLost"]["expr"]


def test_a_change_of_an_alert_that_does_not_exist_is_refused() -> None:
    """An alert that was left out by a misspelt name would go on ringing."""
    changes = {"RebotPending": AlertChange(enabled=False), "Nothing": AlertChange()}

    with pytest.raises(FleetError) as refused:
        rule_files(RuleSettings(alerts=changes))

    assert refused.value.problems == (
        "monitoring.alerts.RebotPending: there is no alert of this name; did you mean "
        "'RebootPending'?",
        "monitoring.alerts.Nothing: there is no alert of this name",
    )


def test_an_alert_without_its_setting_is_not_made() -> None:
    needing = {name for name, alert in ALERTS.items() if alert.needs}

    assert needing
    assert not needing & set(rendered(RuleSettings(OBJECTIVES)))
    assert needing <= set(rendered(EVERYTHING))
