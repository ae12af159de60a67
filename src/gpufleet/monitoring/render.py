"""
Render all monitoring files by their paths, for a monitoring node or for your own servers. Pure.

The files contain no secrets. `needed_secrets` lists the files of this machine that the operator
must copy, with the paths that they need.

    prometheus/prometheus.yml, rules/*.rules.yml, targets/*.json, credentials/
    alertmanager/alertmanager.yml, credentials/
    grafana/provisioning/{datasources,dashboards}/gpufleet.yml, dashboards/*.json
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from gpufleet import node_paths
from gpufleet.monitoring import alertmanager
from gpufleet.monitoring.prometheus import MARK, Scrape, host_port, local_address, prometheus_yml
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from gpufleet.settings.monitoring_settings import Monitoring, Objectives
from gpufleet.settings.node_variables import NodeVars

DASHBOARDS = node_paths.DASHBOARDS
"""The directory on a monitoring node from which Grafana loads gpufleet's dashboards."""


def rule_settings(
    monitoring: Monitoring,
    nodes: Mapping[str, NodeVars],
    measured: Iterable[MeasuredReplica] = (),
) -> RuleSettings:
    """
    Return the inputs of the rules: objectives, changed alerts, which parts are used, and measured
    rates.
    """
    models = {
        name: served
        for node in nodes.values()
        if node.settings.gpu_node
        for name, served in node.settings.serving.items()
    }
    objectives: dict[str, Objectives] = {
        name: served.objectives for name, served in models.items() if served.objectives
    }
    there = {
        "watchdog": any(served.watchdog.mode != "off" for served in models.values()),
        "alertmanager": monitoring.alertmanager is not None,
    }
    return RuleSettings(
        objectives=objectives,
        alerts=monitoring.alerts,
        settings=frozenset(name for name, is_there in there.items() if is_there),
        runbooks_url=monitoring.runbooks_url.rstrip("/"),
        measured=tuple(measured),
    )


def prometheus(
    monitoring: Monitoring,
    nodes: Mapping[str, NodeVars],
    wanted: Iterable[Scrape],
    measured: Iterable[MeasuredReplica] = (),
) -> dict[str, bytes]:
    """Return the files that Prometheus reads only when it starts or reloads."""
    rules = rule_files(rule_settings(monitoring, nodes, measured))
    return {
        "prometheus.yml": prometheus_yml(monitoring, wanted).encode(),
        **{f"rules/{name}": text.encode() for name, text in sorted(rules.items())},
    }


def targets(wanted: Iterable[Scrape]) -> dict[str, bytes]:
    """Return the files that Prometheus reads again without a reload."""
    return {each.file: each.content.encode() for each in wanted}


def grafana(monitoring: Monitoring) -> dict[str, bytes]:
    """Return Grafana's provisioning files for the data source and the dashboards, by path."""
    server = monitoring.prometheus
    at = host_port(local_address(server.listen), server.port) if server else "127.0.0.1:9090"
    seconds = server.scrape_seconds if server else 15
    source = {
        "name": "gpufleet",
        "uid": "gpufleet",
        "type": "prometheus",
        "access": "proxy",
        "url": f"http://{at}",
        "editable": False,
        "jsonData": {"timeInterval": f"{seconds}s", "httpMethod": "POST"},
    }
    provider = {
        "name": "gpufleet",
        "folder": "gpufleet",
        "type": "file",
        "disableDeletion": False,
        "allowUiUpdates": False,
        "updateIntervalSeconds": 30,
        "options": {"path": DASHBOARDS},
    }
    return {
        "datasources/gpufleet.yml": _yaml({"apiVersion": 1, "datasources": [source]}),
        "dashboards/gpufleet.yml": _yaml({"apiVersion": 1, "providers": [provider]}),
    }


def dashboards() -> dict[str, bytes]:
    """Return the dashboards by file name."""
    from gpufleet.monitoring.dashboards import grafana

    return {name: text.encode() for name, text in sorted(grafana.dashboards().items())}


def render_files(
    monitoring: Monitoring,
    nodes: Mapping[str, NodeVars],
    wanted: Iterable[Scrape],
    measured: Iterable[MeasuredReplica] = (),
) -> dict[str, bytes]:
    """Return all files for an external Prometheus, Alertmanager and Grafana."""
    wanted = tuple(wanted)
    server = prometheus(monitoring, nodes, wanted, measured) | targets(wanted)
    found = {f"prometheus/{path}": content for path, content in server.items()}
    if monitoring.alertmanager:
        text = alertmanager.alertmanager_yml(monitoring.alertmanager)
        found["alertmanager/alertmanager.yml"] = text.encode()
    for path, content in grafana(monitoring).items():
        found[f"grafana/provisioning/{path}"] = content
    return found | {f"grafana/dashboards/{name}": text for name, text in dashboards().items()}


def needed_secrets(monitoring: Monitoring, wanted: Iterable[Scrape]) -> dict[str, str]:
    """
    Return a dict that maps the path of each secret beside the rendered files to its source file on
    this machine.
    """
    found = {f"prometheus/{path}": file for each in wanted for path, file in each.secrets}
    if monitoring.alertmanager:
        own = alertmanager.secret_files(monitoring.alertmanager)
        found |= {f"alertmanager/{path}": file for path, file in own.items()}
    return found


def _yaml(document: Mapping[str, Any]) -> bytes:
    return (MARK + yaml.safe_dump(dict(document), sort_keys=False)).encode()
