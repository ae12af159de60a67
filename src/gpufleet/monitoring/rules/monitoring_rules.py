"""
Define rules on the monitoring servers themselves. Pure.

Prometheus cannot report that it has failed itself. In that case the alert MonitoringAlive is no
longer sent, and an external service must notice that (docs/alerts/monitoring-alive.md).
"""

from __future__ import annotations

from gpufleet.engines.promql import JOBS
from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording

_ALERTMANAGER = ("alertmanager",)
# Servers and exporters serve hundreds of samples. If there are fewer than this, a different program
# listens on the port, or all collectors of the exporter have failed.
FEWEST_SAMPLES = 30

RECORDINGS: tuple[Recording, ...] = ()

ALERTS: tuple[Alert, ...] = (
    Alert(
        "MonitoringAlive",
        "vector(1)",
        AlertSeverity.TICKET,
        0,
        "Alerts are evaluated and sent",
        "None. This alert always fires and goes only to `heartbeat`. Act when it stops arriving.",
        needs=_ALERTMANAGER,
    ),
    Alert(
        "MonitoringServerDown",
        'up{job=~"prometheus|alertmanager"} == 0',
        AlertSeverity.PAGE,
        300,  # on a large fleet, a restart takes minutes to replay the log of samples
        "{{ $labels.instance }}: {{ $labels.job }} does not answer",
        "Run `systemctl status` for its unit. While this server is down, no notification is sent.",
    ),
    Alert(
        "MonitoringBlind",
        # No node has values: there are no targets, or samples cannot be stored (a full disk).
        'absent(up{job="node"})',
        AlertSeverity.PAGE,
        600,
        "Prometheus has no values from any node",
        "On Prometheus' node, check the disk, the targets (targets/node*.json) and Prometheus' log.",
    ),
    Alert(
        "MonitoringTargetsUnreadable",
        # Prometheus reads an invalid file again every five minutes, and counts the error each time.
        "increase(prometheus_sd_file_read_errors_total[15m]) > 0",
        AlertSeverity.TICKET,
        600,
        "{{ $labels.instance }}: Prometheus cannot read one of its target lists",
        "Prometheus' log names the file. Until it is repaired, Prometheus uses the last good list "
        "and does not scrape new nodes.",
    ),
    Alert(
        "MonitoringTargetEmpty",
        f'scrape_samples_scraped{{job=~"node|vllm|gateway"}} < {FEWEST_SAMPLES}'
        " and on (instance, job, stage, server) up == 1",
        AlertSeverity.TICKET,
        900,
        "{{ $labels.instance }}: {{ $labels.job }} answers with only {{ $value }} samples",
        "Read the target's /metrics. Either a different program listens on this port, or the "
        "exporter's collectors fail.",
    ),
    Alert(
        "MonitoringStageUnseen",
        # Only `stage` is compared: a replica that spans nodes has its server on only one of them.
        f"count by (stage) (gpufleet_stage_info) unless on (stage) up{{{JOBS}}}",
        AlertSeverity.TICKET,
        1800,  # deploys/monitoring.py is run some time after deploys/vllm.py
        "Prometheus scrapes no server of stage {{ $labels.stage }}",
        "Run deploys/monitoring.py, which writes the target lists. Prometheus cannot scrape a server "
        "that listens only on its own node (vllm.listen).",
    ),
    Alert(
        "PrometheusReloadFailed",
        "prometheus_config_last_reload_successful == 0",
        AlertSeverity.TICKET,
        300,
        "{{ $labels.instance }}: Prometheus rejected its new configuration and keeps the old one",
        "`promtool check config` on the node shows the error. Do not restart Prometheus before the "
        "repair, because the start would fail.",
    ),
    Alert(
        "PrometheusRulesFail",
        "sum by (instance, rule_group) (increase(prometheus_rule_evaluation_failures_total[5m]))"
        " > 0",
        AlertSeverity.TICKET,
        600,  # a join of series may fail in the minute in which a target changes its name
        "{{ $labels.instance }}: Prometheus cannot evaluate a rule of group {{ $labels.rule_group }}",
        "Prometheus' page /rules shows the rule and its error. The rule's alert cannot fire.",
    ),
    Alert(
        "PrometheusRulesLate",
        "sum by (instance, rule_group)"
        " (increase(prometheus_rule_group_iterations_missed_total[10m])) > 0",
        AlertSeverity.TICKET,
        900,
        "{{ $labels.instance }}: evaluating rule group {{ $labels.rule_group }} takes longer than its interval",
        "Prometheus' machine is too busy or too slow for the fleet, so alerts come late.",
    ),
    Alert(
        "PrometheusWithoutAlertmanager",
        "prometheus_notifications_alertmanagers_discovered < 1"
        " or increase(prometheus_notifications_dropped_total[5m]) > 0",
        AlertSeverity.PAGE,
        300,  # alerts are sent again every minute, so an alert lost at a restart does not matter
        "{{ $labels.instance }}: Prometheus cannot reach any Alertmanager",
        "Check Alertmanager's unit and address. This alert reached you through another "
        "Alertmanager, or you see it on Prometheus' own page.",
        needs=_ALERTMANAGER,
    ),
    Alert(
        "AlertmanagerReloadFailed",
        "alertmanager_config_last_reload_successful == 0",
        AlertSeverity.TICKET,
        300,
        "{{ $labels.instance }}: Alertmanager rejected its new configuration and keeps the old one",
        "`amtool check-config` on the node shows the error. Do not restart Alertmanager before the "
        "repair, because the start would fail.",
        needs=_ALERTMANAGER,
    ),
    Alert(
        "AlertmanagerCannotSend",
        "sum by (instance, integration) (increase(alertmanager_notifications_failed_total[10m]))"
        " > 0",
        AlertSeverity.PAGE,
        300,  # Alertmanager retries; only notifications that it has given up are counted
        "{{ $labels.instance }}: Alertmanager cannot send through {{ $labels.integration }}",
        "Alertmanager's log has the receiver's answer. Typical causes are an expired key, a proxy "
        "or a URL that has moved.",
        needs=_ALERTMANAGER,
    ),
)
