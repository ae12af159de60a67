"""Parts of a rule file: recording rules and alerts. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class AlertSeverity(StrEnum):
    """Urgency of an alert: the label `severity`, by which Alertmanager routes."""

    PAGE = "page"  # wakes a person: clients are hurt, or soon will be
    TICKET = "ticket"  # on the next working day


@dataclass(frozen=True)
class Recording:
    """
    A recording rule: a value computed in advance, for rules and panels.

    Attributes:
        record: its name, level:metric:operation (prometheus.io/docs/practices/rules).
        expr: PromQL.
        help: what it is, with its unit.
        labels: those that its series have.
    """

    record: str
    expr: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alert:
    """
    Something that an operator must act on.

    Attributes:
        name: CamelCase; its runbook is `docs/alerts/<kebab-case>.md`.
        expr: PromQL; its series have `instance` and, of a GPU, `gpu` and `UUID`; of vLLM `stage`.
        severity: which receiver gets it.
        for_seconds: how long it must hold.
        summary: one line with Prometheus' templates, e.g. "{{ $labels.instance }}: ...".
        action: what to do first, one or two sentences.
        keep_seconds: how long it keeps firing after its cause has ended, against flapping.
        needs: settings without which it is not rendered, e.g. "watchdog". Empty: always.
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
        """The file of its runbook in docs/alerts/, without suffix."""
        return runbook_page(self.name)


def runbook_page(alert: str) -> str:
    """
    Return the file of an alert's runbook in docs/alerts/, without suffix.

    >>> runbook_page("GpuLost")
    'gpu-lost'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", alert).lower()
