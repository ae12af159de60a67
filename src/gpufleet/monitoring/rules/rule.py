"""Define the parts of a rule file: recording rules and alerts. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class AlertSeverity(StrEnum):
    """The urgency of an alert, the label `severity` by which Alertmanager routes."""

    PAGE = "page"  # wakes a person: clients are hurt, or soon will be
    TICKET = "ticket"  # on the next working day


@dataclass(frozen=True)
class Recording:
    """
    A recording rule: a value computed in advance, for rules and panels.

    Attributes:
        record: the name, level:metric:operation (prometheus.io/docs/practices/rules).
        expr: PromQL.
        help: the meaning and unit.
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
        name: CamelCase; its runbook is `docs/alerts/<kebab-case>.md`.
        expr: PromQL; its series have `instance` and, of a GPU, `gpu` and `UUID`; of vLLM `stage`.
        severity: the severity, which selects the receiver.
        for_seconds: the seconds for which the expression must be true.
        summary: one line with Prometheus' templates, e.g. "{{ $labels.instance }}: ...".
        action: the first action, in one or two sentences.
        keep_seconds: the seconds that it keeps firing after its end, against flapping.
        needs: settings required to render it, e.g. "watchdog".
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
        """The file name of the runbook in docs/alerts/, without suffix."""
        return runbook_page(self.name)


def runbook_page(alert: str) -> str:
    """
    Return the file name of an alert's runbook in docs/alerts/, without suffix.

    >>> runbook_page("GpuLost")
    'gpu-lost'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", alert).lower()
