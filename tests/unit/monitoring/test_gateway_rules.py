"""Alerts on the gateway, and on monitoring itself: each fires, and stays silent, where it must."""

from __future__ import annotations

from pathlib import Path

from gpufleet.monitoring.rules import gateway_rules, monitoring_rules
from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from tests.unit.monitoring.promtool import Case, Firing, run, too_early

MINUTE = 60
SETTINGS = frozenset({"alertmanager"})
MODEL = {"instance": "gw-01", "proxy": "tiny"}
NODE = {"instance": "gpu-01"}
MONITOR = {"instance": "mon-01"}


def haproxy(name: str, proxy: str = "tiny", **labels: str) -> str:
    """Write a series of HAProxy's."""
    return _series(f"haproxy_{name}", instance="gw-01", job="gateway", proxy=proxy, **labels)


def status(server: str, state: str, proxy: str = "tiny") -> str:
    """Write a server's state."""
    return haproxy("server_status", proxy, server=server, state=state)


def answers(code: str) -> str:
    """Write a backend's answers."""
    return haproxy("backend_http_responses_total", code=code)


def prometheus(name: str, **labels: str) -> str:
    """Write a series of Prometheus' own."""
    return _series(f"prometheus_{name}", instance="mon-01", job="prometheus", **labels)


def alertmanager(name: str, **labels: str) -> str:
    """Write a series of Alertmanager's own."""
    return _series(f"alertmanager_{name}", instance="mon-01", job="alertmanager", **labels)


def up(instance: str, job: str, **labels: str) -> str:
    """Write whether a target was scraped."""
    return _series("up", instance=instance, job=job, **labels)


def samples(**labels: str) -> str:
    """Write how many samples a target of node gpu-01 had."""
    return _series("scrape_samples_scraped", instance="gpu-01", **labels)


def _series(name: str, **labels: str) -> str:
    written = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{written}}}"


GATEWAY = (
    Case(
        "GatewayDown",
        "no answer",
        {up("gw-01", "gateway"): "1x3 0x30"},
        at=8 * MINUTE,
        fires=(
            Firing({"instance": "gw-01", "job": "gateway"}, "gw-01: the gateway does not answer"),
        ),
    ),
    Case("GatewayDown", "a reload", {up("gw-01", "gateway"): "1x3 0 1x30"}, at=6 * MINUTE),
    Case(
        "GatewayNoServer",
        "both servers of a model are down",
        {
            haproxy("backend_active_servers"): "2x3 0x30",
            status("tiny-0", "DOWN"): "0x3 1x30",
            status("tiny-1", "DOWN"): "0x3 1x30",
        },
        at=6 * MINUTE,
        fires=(Firing(MODEL, "gw-01: no server of tiny is up, so clients get 503"),),
    ),
    Case(
        "GatewayNoServer",
        "one of two is down",
        {haproxy("backend_active_servers"): "1x30", status("tiny-1", "DOWN"): "1x30"},
        at=6 * MINUTE,
    ),
    Case(
        "GatewayNoServer",
        "a backend that never has servers, of errors or statistics",
        {
            haproxy("backend_active_servers", "refused"): "0x30",
            haproxy("backend_active_servers"): "1x30",
            status("tiny-0", "UP"): "1x30",
        },
        at=20 * MINUTE,
    ),
    Case(
        "GatewayServerDown",
        "one server, for forty minutes",
        {status("tiny-0", "DOWN"): "0x60", status("tiny-1", "DOWN"): "0x3 1x60"},
        at=40 * MINUTE,
        fires=(
            Firing(
                {**MODEL, "server": "tiny-1"},
                "gw-01: the gateway has seen server tiny-1 of tiny as down for half an hour",
            ),
        ),
    ),
    Case(
        "GatewayServerDown",
        "a model that loads for 20 minutes",
        {status("tiny-1", "DOWN"): "1x20 0x60"},
        at=20 * MINUTE,
    ),
    Case(
        "GatewayServerDown",
        "drained for an upgrade",
        {status("tiny-1", "DOWN"): "0x60", status("tiny-1", "DRAIN"): "1x60"},
        at=50 * MINUTE,
    ),
    Case(
        "GatewayErrors",
        "ten of a hundred",
        {answers("2xx"): "0+90x60", answers("5xx"): "0+10x60"},
        at=20 * MINUTE,
        fires=(Firing(MODEL, "gw-01: 10% of the answers for tiny are 5xx"),),
    ),
    Case(
        "GatewayErrors",
        "for four minutes",
        {answers("2xx"): "0+90x60", answers("5xx"): "0x9 0+10x60"},
        at=14 * MINUTE,
    ),
    Case(
        "GatewayErrors",
        "ten of a thousand",
        {answers("2xx"): "0+990x60", answers("5xx"): "0+10x60"},
        at=20 * MINUTE,
    ),
    Case(
        "GatewayErrors",
        "ten in five minutes, which is half of them",
        {answers("2xx"): "0+2x60", answers("5xx"): "0+2x60"},
        at=20 * MINUTE,
        fires=(Firing(MODEL, "gw-01: 50% of the answers for tiny are 5xx"),),
    ),
    Case(
        "GatewayErrors",
        "fewer than ten in five minutes, too few to say",
        {answers("2xx"): "0+1.9x60", answers("5xx"): "0+1.9x60"},
        at=20 * MINUTE,
    ),
    Case(
        "GatewayErrors",
        "no traffic",
        {answers("2xx"): "9x60", answers("5xx"): "9x60"},
        at=20 * MINUTE,
    ),
    Case(
        "GatewayErrors",
        "clients' own mistakes",
        {answers("2xx"): "0+9x60", answers("4xx"): "0+90x60", answers("5xx"): "0x60"},
        at=20 * MINUTE,
    ),
    Case(
        "GatewayQueue",
        "always somebody",
        {haproxy("backend_current_queue"): "3x60"},
        at=15 * MINUTE,
        fires=(Firing(MODEL, "gw-01: 3 requests wait at the gateway for tiny"),),
    ),
    Case(
        "GatewayQueue",
        "a burst of five minutes",
        {haproxy("backend_current_queue"): "0x5 90x5 0x60"},
        at=10 * MINUTE,
    ),
)

SERVERS = (
    Case(
        "MonitoringAlive",
        "with nothing at all",
        {up("gpu-01", "node"): "1x60"},
        at=0,
        fires=(Firing({}, "Alerts are evaluated and sent"),),
    ),
    Case(
        "MonitoringServerDown",
        "Alertmanager does not answer",
        {up("mon-01", "alertmanager"): "1x3 0x30", up("mon-01", "prometheus"): "1x60"},
        at=10 * MINUTE,
        fires=(
            Firing(
                {"instance": "mon-01", "job": "alertmanager"},
                "mon-01: alertmanager does not answer",
            ),
        ),
    ),
    Case(
        "MonitoringServerDown",
        "a restart of three minutes",
        {up("mon-01", "alertmanager"): "1x3 0x3 1x30", up("gpu-01", "node"): "0x60"},
        at=7 * MINUTE,
    ),
    Case(
        "MonitoringBlind",
        "nothing of any node",
        {up("mon-01", "prometheus"): "1x60", up("gpu-01", "node"): "1x5 stale"},
        at=20 * MINUTE,
        fires=(Firing({"job": "node"}, "Prometheus has no values from any node"),),
    ),
    Case("MonitoringBlind", "every node is down", {up("gpu-01", "node"): "0x60"}, at=1200),
    Case(
        "MonitoringBlind",
        "for the first five minutes",
        {up("gpu-01", "node"): "_x5 1x60"},
        at=5 * MINUTE,
    ),
    Case(
        "MonitoringTargetsUnreadable",
        "read every five minutes, in vain",
        {prometheus("sd_file_read_errors_total"): "0x4 1x4 2x4 3x4 4x4"},
        at=20 * MINUTE,
        fires=(
            Firing(
                {**MONITOR, "job": "prometheus"},
                "mon-01: Prometheus cannot read one of its target lists",
            ),
        ),
    ),
    Case(
        "MonitoringTargetsUnreadable",
        "once, an hour ago",
        {prometheus("sd_file_read_errors_total"): "0x4 1x80"},
        at=70 * MINUTE,
    ),
    Case(
        "MonitoringTargetEmpty",
        "something else listens on an exporter's port",
        {up("gpu-01", "node"): "1x60", samples(job="node"): "3x60"},
        at=20 * MINUTE,
        fires=(Firing({**NODE, "job": "node"}, "gpu-01: node answers with only 3 samples"),),
    ),
    Case(
        "MonitoringTargetEmpty",
        "one of a stage's three servers; another one is down",
        {
            up("gpu-01", "vllm", stage="tiny-0", model="tiny", server="3"): "0x60",
            samples(job="vllm", stage="tiny-0", model="tiny", server="3"): "0x60",
            up("gpu-01", "vllm", stage="tiny-0", model="tiny", server="1"): "1x60",
            up("gpu-01", "vllm", stage="tiny-0", model="tiny", server="2"): "1x60",
            samples(job="vllm", stage="tiny-0", model="tiny", server="1"): "900x60",
            samples(job="vllm", stage="tiny-0", model="tiny", server="2"): "0x60",
        },
        at=20 * MINUTE,
        fires=(
            Firing(
                {**NODE, "job": "vllm", "stage": "tiny-0", "model": "tiny", "server": "2"},
                "gpu-01: vllm answers with only 0 samples",
            ),
        ),
    ),
    Case(
        "MonitoringTargetEmpty",
        "the target is down: that has its own alert",
        {up("gpu-01", "node"): "0x60", samples(job="node"): "0x60"},
        at=20 * MINUTE,
    ),
    Case(
        "MonitoringTargetEmpty",
        "as many as an exporter has",
        {up("gpu-01", "node"): "1x60", samples(job="node"): "900x60"},
        at=20 * MINUTE,
    ),
    Case(
        "MonitoringStageUnseen",
        "a stage that no list of targets has",
        {
            _series("gpufleet_stage_info", instance="gpu-01", job="node", stage="new-0"): "1x60",
            _series("gpufleet_stage_info", instance="gpu-01", job="node", stage="tiny-0"): "1x60",
            up("gpu-01", "vllm", stage="tiny-0", model="tiny"): "0x60",
        },
        at=40 * MINUTE,
        fires=(Firing({"stage": "new-0"}, "Prometheus scrapes no server of stage new-0"),),
    ),
    Case(
        "MonitoringStageUnseen",
        "a rank on another node than its endpoint",
        {
            _series("gpufleet_stage_info", instance="gpu-01", job="node", stage="big-0"): "1x60",
            _series("gpufleet_stage_info", instance="gpu-02", job="node", stage="big-0"): "1x60",
            up("gpu-01", "vllm", stage="big-0", model="big"): "1x60",
        },
        at=40 * MINUTE,
    ),
    Case(
        "PrometheusReloadFailed",
        "it refuses its configuration",
        {prometheus("config_last_reload_successful"): "1x3 0x60"},
        at=10 * MINUTE,
        fires=(
            Firing(
                {**MONITOR, "job": "prometheus"},
                "mon-01: Prometheus rejected its new configuration and keeps the old one",
            ),
        ),
    ),
    Case(
        "PrometheusReloadFailed",
        "it takes the next one",
        {prometheus("config_last_reload_successful"): "1x3 0x2 1x60"},
        at=10 * MINUTE,
    ),
    Case(
        "PrometheusRulesFail",
        "a group fails every time",
        {
            prometheus("rule_evaluation_failures_total", rule_group="vllm"): "0+4x60",
            prometheus("rule_evaluation_failures_total", rule_group="gpu"): "0x60",
        },
        at=20 * MINUTE,
        fires=(
            Firing(
                {**MONITOR, "rule_group": "vllm"},
                "mon-01: Prometheus cannot evaluate a rule of group vllm",
            ),
        ),
    ),
    Case(
        "PrometheusRulesFail",
        "once, while a target changed its name",
        {prometheus("rule_evaluation_failures_total", rule_group="vllm"): "0x9 1x60"},
        at=14 * MINUTE,
    ),
    Case(
        "PrometheusRulesLate",
        "every other evaluation is left out",
        {prometheus("rule_group_iterations_missed_total", rule_group="gpu"): "0+2x60"},
        at=30 * MINUTE,
        fires=(
            Firing(
                {**MONITOR, "rule_group": "gpu"},
                "mon-01: evaluating rule group gpu takes longer than its interval",
            ),
        ),
    ),
    Case(
        "PrometheusRulesLate",
        "one, at a start",
        {prometheus("rule_group_iterations_missed_total", rule_group="gpu"): "0x3 1x60"},
        at=13 * MINUTE,
    ),
    Case(
        "PrometheusWithoutAlertmanager",
        "it knows of none",
        {prometheus("notifications_alertmanagers_discovered"): "0x60"},
        at=10 * MINUTE,
        fires=(
            Firing(
                {**MONITOR, "job": "prometheus"},
                "mon-01: Prometheus cannot reach any Alertmanager",
            ),
        ),
    ),
    Case(
        "PrometheusWithoutAlertmanager",
        "it knows of one that does not answer",
        {
            prometheus("notifications_alertmanagers_discovered"): "1x60",
            prometheus("notifications_dropped_total"): "0+1x60",
        },
        at=20 * MINUTE,
        fires=(
            Firing(
                {**MONITOR, "job": "prometheus"},
                "mon-01: Prometheus cannot reach any Alertmanager",
            ),
        ),
    ),
    Case(
        "PrometheusWithoutAlertmanager",
        "one alert was lost, when both started",
        {
            prometheus("notifications_alertmanagers_discovered"): "1x60",
            prometheus("notifications_dropped_total"): "0x5 1x60",
        },
        at=9 * MINUTE,
    ),
    Case(
        "AlertmanagerReloadFailed",
        "it refuses its configuration",
        {alertmanager("config_last_reload_successful"): "1x3 0x60"},
        at=10 * MINUTE,
        fires=(
            Firing(
                {**MONITOR, "job": "alertmanager"},
                "mon-01: Alertmanager rejected its new configuration and keeps the old one",
            ),
        ),
    ),
    Case(
        "AlertmanagerReloadFailed",
        "it takes the next one",
        {alertmanager("config_last_reload_successful"): "1x3 0x2 1x60"},
        at=10 * MINUTE,
    ),
    Case(
        "AlertmanagerCannotSend",
        "a webhook refuses everything",
        {
            alertmanager("notifications_failed_total", integration="webhook"): "0+1x60",
            alertmanager("notifications_failed_total", integration="email"): "0x60",
        },
        at=20 * MINUTE,
        fires=(
            Firing(
                {**MONITOR, "integration": "webhook"},
                "mon-01: Alertmanager cannot send through webhook",
            ),
        ),
    ),
    Case(
        "AlertmanagerCannotSend",
        "one was given up, an hour ago",
        {alertmanager("notifications_failed_total", integration="webhook"): "0x3 1x90"},
        at=70 * MINUTE,
    ),
)


# The minute before the first firing case of each fires: it has not held for long enough.
EARLY = {
    "GatewayDown": 5,
    "GatewayNoServer": 4,
    "GatewayServerDown": 33,
    "GatewayErrors": 5,
    "GatewayQueue": 9,
    "MonitoringServerDown": 8,
    "MonitoringBlind": 15,
    "MonitoringTargetsUnreadable": 14,
    "MonitoringTargetEmpty": 14,
    "MonitoringStageUnseen": 29,
    "PrometheusReloadFailed": 8,
    "PrometheusRulesFail": 10,
    "PrometheusRulesLate": 15,
    "PrometheusWithoutAlertmanager": 4,
    "AlertmanagerReloadFailed": 8,
    "AlertmanagerCannotSend": 5,
}

CASES = (*GATEWAY, *SERVERS, *too_early((*GATEWAY, *SERVERS), EARLY))


def test_alerts_on_gateway_and_monitoring_fire_where_they_must(tmp_path: Path) -> None:
    files = rule_files(RuleSettings(settings=SETTINGS))
    written = {name: files[name] for name in ("gateway.rules.yml", "monitoring.rules.yml")}
    alerts = (*gateway_rules.ALERTS, *monitoring_rules.ALERTS)
    run(CASES, written, alerts, tmp_path)


def test_every_alert_on_them_has_cases_both_ways() -> None:
    """But MonitoringAlive, whose silence is what somebody else has to notice."""
    alerts = (*gateway_rules.ALERTS, *monitoring_rules.ALERTS)
    both = {(alert.name, fires) for alert in alerts for fires in (True, False)}

    assert {(case.alert, bool(case.fires)) for case in CASES} == both - {("MonitoringAlive", False)}


def test_every_alert_on_them_that_waits_has_a_case_before_it_fires() -> None:
    alerts = (*gateway_rules.ALERTS, *monitoring_rules.ALERTS)

    assert set(EARLY) == {alert.name for alert in alerts if alert.for_seconds}


def test_rules_of_alertmanager_are_left_out_where_there_is_none() -> None:
    files = rule_files(RuleSettings())

    assert "alert: AlertmanagerCannotSend" not in files["monitoring.rules.yml"]
    assert "alert: MonitoringBlind" in files["monitoring.rules.yml"]
    assert "alert: GatewayDown" in files["gateway.rules.yml"]  # also of a HAProxy of your own
