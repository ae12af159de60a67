"""Define the parts of a rule file: recording rules and alerts. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class AlertSeverity(StrEnum):
    """The urgency of an alert. Alertmanager routes alerts by it (label `severity`)."""

    PAGE = "page"  # wakes a person, because clients are affected or will be soon
    TICKET = "ticket"  # can wait until the next working day


@dataclass(frozen=True)
class Recording:
    """
    A recording rule: a value that Prometheus computes in advance, for rules and panels.

    Attributes:
        record: the name, in the form level:metric:operation (prometheus.io/docs/practices/rules).
        expr: the expression in PromQL.
        help: the meaning and the unit.
        labels: the labels of its series.
    """

    record: str
    expr: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alert:
    """
    A condition that an operator must act on.

    Attributes:
        name: the name in CamelCase. The runbook is `docs/alerts/<kebab-case>.md`.
        expr: the expression in PromQL. Its series have the label `instance`. Those of GPUs also have
            `gpu` and `UUID`, and those of vLLM also have `stage`.
        severity: the severity, which selects the receiver.
        for_seconds: how many seconds the expression must be true before the alert fires.
        summary: one line with Prometheus' templates, for example "{{ $labels.instance }}: ...".
        action: what to do first, in one or two sentences.
        keep_seconds: how many seconds the alert still fires after its expression is no longer true,
            so that it does not end and begin again and again.
        needs: the settings without which the alert does not exist, for example "watchdog".
    """

    name: str
    expr: str
    severity: AlertSeverity
    for_seconds: int
    summary: str
    action: str
    keep_seconds: int = 0
    needs: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """The file name of the alert's runbook in docs/alerts/, without suffix."""
        return runbook_page(self.name)


def runbook_page(alert: str) -> str:
    """
    Return the file name of an alert's runbook in docs/alerts/, without suffix.

    >>> runbook_page("GpuLost")
    'gpu-lost'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", alert).lower()
