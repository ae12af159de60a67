"""Render Prometheus' rule files, from gpufleet's rules and the operators' settings. Pure."""

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

# With these, every alert exists, also those that need a promise or a measurement.
_ALL_OBJECTIVES = {"any": Objectives(ttft_p99_seconds=1, itl_p99_seconds=1, e2e_p99_seconds=1)}
_ALL_MEASURED = (MeasuredReplica("any", "any-0", "any", "any", 1.0, dt.date(1970, 1, 1)),)


@dataclass(frozen=True)
class RuleSettings:
    """
    Settings that rules depend on.

    Attributes:
        objectives: the objectives by model.
        alerts: the operator's changes by alert, from `monitoring.alerts`.
        settings: the names from `Alert.needs` that are present, e.g. "watchdog".
        runbooks_url: the address of docs/alerts/.
        measured: running replicas with an applicable stored measurement.
    """

    objectives: Mapping[str, Objectives] = field(default_factory=dict)
    alerts: Mapping[str, AlertChange] = field(default_factory=dict)
    settings: frozenset[str] = frozenset()
    runbooks_url: str = "docs/alerts"
    measured: tuple[MeasuredReplica, ...] = ()


@dataclass(frozen=True)
class Rules:
    """One group of rules. Its recordings precede its alerts, which then see new values."""

    name: str
    recordings: tuple[Recording, ...]
    alerts: tuple[Alert, ...]


def groups(
    objectives: Mapping[str, Objectives], measured: Iterable[MeasuredReplica] = ()
) -> tuple[Rules, ...]:
    """Return all shipped rules. Each group becomes a file of its name."""
    return (
        Rules("gpu", gpu_rules.RECORDINGS, gpu_rules.ALERTS),
        Rules("node", node_rules.RECORDINGS, node_rules.ALERTS),
        Rules("fleet", fleet_rules.RECORDINGS, fleet_rules.ALERTS),
        Rules("vllm", *vllm_rules.rules(objectives, measured)),
        Rules("gateway", gateway_rules.RECORDINGS, gateway_rules.ALERTS),
        Rules("monitoring", monitoring_rules.RECORDINGS, monitoring_rules.ALERTS),
    )


def all_groups() -> tuple[Rules, ...]:
    """Return all possible rules, for every objective set and every model measured."""
    return groups(_ALL_OBJECTIVES, _ALL_MEASURED)


def hold_seconds(changes: Iterable[Mapping[str, AlertChange]] = ()) -> dict[str, int]:
    """
    Return the seconds, by alert, for which its expression must be true before it fires.

    `changes` has `monitoring.alerts` of each monitoring node; the shortest time applies.
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
    Return `{"gpu.rules.yml": text, ...}`, without groups that have no rules.

    Raises FleetError for changes to unknown alerts.
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
