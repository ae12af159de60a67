"""
List the metrics of Prometheus and Alertmanager that rules and panels use. Pure.

The list was read from Prometheus 2.42.0 and Alertmanager 0.25.0 (Debian 12). Their /metrics are
recorded in tests/unit/monitoring/recorded/. The two servers were run with only a failing webhook
and an invalid list of targets, which makes them export every name.
"""

from __future__ import annotations

from typing import Literal

from gpufleet.monitoring.metrics.metric import Job, Metric

_MADE = "written by Prometheus at every scrape; prometheus.io/docs/concepts/jobs_instances"


def _of_prometheus(
    kind: Literal["counter", "gauge"], name: str, help_text: str, *labels: str
) -> Metric:
    return _metric(Job.PROMETHEUS, kind, f"prometheus_{name}", help_text, labels)


def _of_alertmanager(
    kind: Literal["counter", "gauge"], name: str, help_text: str, *labels: str
) -> Metric:
    return _metric(Job.ALERTMANAGER, kind, f"alertmanager_{name}", help_text, labels)


def _metric(
    job: Job,
    kind: Literal["counter", "gauge"],
    name: str,
    help_text: str,
    labels: tuple[str, ...],
) -> Metric:
    return Metric(
        name=name,
        job=job,
        type=kind,
        help=help_text,
        labels=labels,
        source="Prometheus 2.42.0, Alertmanager 0.25.0, recorded",
    )


def _made(name: str, help_text: str, *labels: str, only: str = "") -> Metric:
    return Metric(
        name=name,
        job=Job.PROMETHEUS,
        type="gauge",
        help=help_text,
        labels=labels,
        only=only,
        source=_MADE,
    )


# Prometheus itself writes these. Every target has the first three, with its own job and instance.
MADE = (
    _made("up", "Whether the last scrape of a target succeeded (1)"),
    _made("scrape_duration_seconds", "How long the last scrape of a target took, failed ones too"),
    _made("scrape_samples_scraped", "How many samples the last scrape of a target brought"),
    _made(
        "ALERTS",
        "Always 1, a series for each alert that is pending or firing, with its labels",
        "alertname",
        "alertstate",
        "severity",
        only="while an alert is pending or firing",
    ),
)

PROMETHEUS = (
    _of_prometheus(
        "gauge",
        "config_last_reload_successful",
        "Whether Prometheus could read its configuration and rules when it last tried (1)",
    ),
    _of_prometheus(
        "counter",
        "rule_evaluation_failures_total",
        "Rules that could not be evaluated, by group",
        "rule_group",
    ),
    _of_prometheus(
        "counter",
        "rule_group_iterations_missed_total",
        "Evaluations of a group that were skipped because the previous one took too long",
        "rule_group",
    ),
    _of_prometheus(
        "gauge",
        "notifications_alertmanagers_discovered",
        "Alertmanagers that Prometheus sends alerts to",
    ),
    _of_prometheus(
        "counter",
        "notifications_dropped_total",
        "Alerts that reached no Alertmanager at all",
    ),
    _of_prometheus(
        "counter",
        "sd_file_read_errors_total",
        "Lists of targets that could not be read; the last good one stays in force",
    ),
    _of_prometheus(
        "counter",
        "tsdb_head_samples_appended_total",
        "Samples that were stored",
        "type",
    ),
    _of_prometheus("gauge", "tsdb_head_series", "Series that were written to lately"),
    _of_prometheus(
        "counter",
        "tsdb_wal_writes_failed_total",
        "Writes to Prometheus' log of samples that failed, as on a full disk",
    ),
)

ALERTMANAGER = (
    _of_alertmanager(
        "gauge",
        "config_last_reload_successful",
        "Whether Alertmanager could read its configuration when it last tried (1)",
    ),
    _of_alertmanager(
        "counter",
        "notifications_total",
        "Notifications that were to be sent, by kind of receiver",
        "integration",
    ),
    _of_alertmanager(
        "counter",
        "notifications_failed_total",
        "Notifications that could not be sent, by kind of receiver",
        "integration",
    ),
    _of_alertmanager("gauge", "silences", "Silences by state", "state"),
)

METRICS: tuple[Metric, ...] = (*MADE, *PROMETHEUS, *ALERTMANAGER)
