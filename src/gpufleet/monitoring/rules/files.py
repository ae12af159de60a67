"""Render Prometheus' rule files from gpufleet's rules and the operator's settings. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.monitoring.rules import (
    fleet_rules,
    gateway_rules,
    gpu_rules,
    monitoring_rules,
    node_rules,
    vllm_rules,
)
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording
from gpufleet.settings.monitoring_settings import AlertChange, Objectives

# With these values every alert exists, including those that need an objective or a measurement.
_ALL_OBJECTIVES = {"any": Objectives(ttft_p99_seconds=1, itl_p99_seconds=1, e2e_p99_seconds=1)}
_ALL_MEASURED = (MeasuredReplica("any", "any-0", "any", "any", 1.0, dt.date(1970, 1, 1)),)


@dataclass(frozen=True)
class RuleSettings:
    """
    The settings that the rules depend on.

    Attributes:
        objectives: the objectives of each model.
        alerts: the operator's changes of each alert, from `monitoring.alerts`.
        settings: those names in `Alert.needs` that are set, for example "watchdog".
        runbooks_url: the address of docs/alerts/.
        measured: the running replicas that have a stored measurement which applies to them.
    """

    objectives: Mapping[str, Objectives] = field(default_factory=dict)
    alerts: Mapping[str, AlertChange] = field(default_factory=dict)
    settings: frozenset[str] = frozenset()
    runbooks_url: str = "docs/alerts"
    measured: tuple[MeasuredReplica, ...] = ()


@dataclass(frozen=True)
class Rules:
    """
    One group of rules. The recordings come before the alerts, so that alerts use their new values.
    """

    name: str
    recordings: tuple[Recording, ...]
    alerts: tuple[Alert, ...]


def groups(
    objectives: Mapping[str, Objectives], measured: Iterable[MeasuredReplica] = ()
) -> tuple[Rules, ...]:
    """Return all of gpufleet's rules. Each group becomes a file with its name."""
    return (
        Rules("gpu", gpu_rules.RECORDINGS, gpu_rules.ALERTS),
        Rules("node", node_rules.RECORDINGS, node_rules.ALERTS),
        Rules("fleet", fleet_rules.RECORDINGS, fleet_rules.ALERTS),
        Rules("vllm", *vllm_rules.rules(objectives, measured)),
        Rules("gateway", gateway_rules.RECORDINGS, gateway_rules.ALERTS),
        Rules("monitoring", monitoring_rules.RECORDINGS, monitoring_rules.ALERTS),
    )


def all_groups() -> tuple[Rules, ...]:
    """
    Return all rules that can exist: with every objective set, and with a measurement for every
    model.
    """
    return groups(_ALL_OBJECTIVES, _ALL_MEASURED)


def hold_seconds(changes: Iterable[Mapping[str, AlertChange]] = ()) -> dict[str, int]:
    """
    Return for each alert how many seconds its expression must be true before the alert fires.

    `changes` has the `monitoring.alerts` of each monitoring node. If they differ, the shortest time
    is returned.
    """
    found = {}
    for alert in (alert for group in all_groups() for alert in group.alerts):
        changed = [each[alert.name].for_seconds for each in changes if alert.name in each]
        found[alert.name] = min(
            (alert.for_seconds if seconds is None else seconds for seconds in changed),
            default=alert.for_seconds,
        )
    return found


def rule_files(declared: RuleSettings) -> dict[str, str]:
    """
    Return `{"gpu.rules.yml": text, ...}`. Groups without rules have no file.

    Raises FleetError if the settings change an alert that does not exist.
    """
    shipped = groups(declared.objectives, declared.measured)
    _check_names(declared, shipped)
    files = {}
    for group in shipped:
        alerts = _wanted(group.alerts, declared)
        rules = [
            *(_recording(recording) for recording in group.recordings),
            *(_alert(alert, declared) for alert in alerts),
        ]
        if rules:
            files[f"{group.name}.rules.yml"] = _text(group.name, rules)
    return files


def _check_names(declared: RuleSettings, shipped: Iterable[Rules]) -> None:
    known = [alert.name for group in (*shipped, *all_groups()) for alert in group.alerts]
    wrong = [
        f"monitoring.alerts.{name}: there is no alert of this name{suggestion(name, known)}"
        for name in declared.alerts
        if name not in known
    ]
    if wrong:
        raise FleetError(*wrong)


def _wanted(alerts: Iterable[Alert], declared: RuleSettings) -> list[Alert]:
    return [
        alert
        for alert in alerts
        if set(alert.needs) <= declared.settings
        and (alert.name not in declared.alerts or declared.alerts[alert.name].enabled)
    ]


def _recording(recording: Recording) -> dict[str, Any]:
    return {"record": recording.record, "expr": recording.expr}


def _alert(alert: Alert, declared: RuleSettings) -> dict[str, Any]:
    change = declared.alerts.get(alert.name, AlertChange())
    seconds = alert.for_seconds if change.for_seconds is None else change.for_seconds
    severity = alert.severity if change.severity is None else AlertSeverity(change.severity)
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expr, "for": f"{seconds}s"}
    if alert.keep_seconds:
        rule["keep_firing_for"] = f"{alert.keep_seconds}s"
    return {
        **rule,
        "labels": {"severity": severity.value},
        "annotations": {
            "summary": alert.summary,
            "action": alert.action,
            "runbook": f"{declared.runbooks_url}/{alert.page}.md",
        },
    }


class _Readable(yaml.SafeDumper):
    """A YAML dumper that keeps the line breaks of expressions."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _text(name: str, rules: list[dict[str, Any]]) -> str:
    written = yaml.dump(
        {"groups": [{"name": name, "rules": rules}]},
        Dumper=_Readable,
        sort_keys=False,
        width=10_000,  # columns: a long line reads better than one that is folded anywhere
    )
    return f"# Written by gpufleet: changes belong under `monitoring.alerts`.\n{written}"
