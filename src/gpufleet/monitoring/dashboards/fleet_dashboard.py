"""Define the dashboard of all nodes: alerts, nodes, stages, capacity and versions. Pure."""

from __future__ import annotations

from gpufleet.engines.engine import Measure
from gpufleet.engines.promql import JOBS, metric
from gpufleet.monitoring.dashboards.common import (
    ANY_IS_BAD,
    ANY_IS_TO_LOOK_AT,
    EVERY_NODE,
    KV_STEPS,
    UP,
    YES_IS_BAD,
    YES_IS_TO_LOOK_AT,
    lines,
    stat,
    timeline,
)
from gpufleet.monitoring.dashboards.panel import (
    Colour,
    Column,
    Dashboard,
    Kind,
    Panel,
    Query,
    Row,
    Unit,
    ValueDisplay,
)

_ON = 'instance=~"$instance"'


def _replica(vector: str, operation: str = "max") -> str:
    """Return a vector with one series per replica on a node, `gpu-01/tiny-0`."""
    joined = f'label_join({vector}, "replica", "/", "instance", "stage")'
    return f"{operation} by (replica) ({joined})"


NOW = Row(
    "Is anything wrong now?",
    (
        stat(
            "Alerts that page",
            f'count(ALERTS{{alertstate="firing",severity="page",{_ON}}}) or vector(0)',
            "The alerts are listed below. Each alert has a runbook in docs/alerts/.",
            steps=ANY_IS_BAD,
        ),
        stat(
            "Tickets",
            f'count(ALERTS{{alertstate="firing",severity="ticket",{_ON}}}) or vector(0)',
            "Tickets can wait for the next working day. They are listed below.",
            steps=ANY_IS_TO_LOOK_AT,
        ),
        stat(
            "Nodes down",
            f'sum(1 - up{{job="node",{_ON}}})',
            "Open the node's dashboard to see whether the node is off or only its exporter is down.",
            steps=ANY_IS_BAD,
        ),
        stat(
            "GPUs missing",
            f'sum(gpufleet_gpus{{state="expected",{_ON}}}) - sum(gpufleet_gpus{{state="present",{_ON}}})',
            "Run `gpufleet check`, then reboot the node. If the GPU is still missing, replace it.",
            steps=ANY_IS_BAD,
        ),
        stat(
            "Stages not running",
            f"sum(1 - gpufleet_stage_active{{{_ON}}})",
            "The journal of the stage's unit shows the reason.",
            steps=ANY_IS_BAD,
            empty="no node has a stage",
        ),
        stat(
            "Findings that block",
            f'sum(gpufleet_check_findings{{severity=~"block|unknown",{_ON}}})',
            "Run `gpufleet check`, which shows how to fix each finding.",
            steps=ANY_IS_BAD,
            empty="no check was recorded",
        ),
        stat(
            "Drift",
            f'sum(gpufleet_drift_differences{{matters=~"now|next_boot",{_ON}}})',
            "Run `gpufleet drift`. Then deploy, or change the settings to match the node.",
            steps=ANY_IS_TO_LOOK_AT,
            empty="no drift was recorded",
        ),
        stat(
            "Reboots pending",
            f"sum(max by (instance) (gpufleet_reboot_pending{{{_ON}}}))",
            "Plan reboots, because the installed and the running versions differ.",
            steps=ANY_IS_TO_LOOK_AT,
        ),
    ),
)

_SEVERITY = (
    ValueDisplay("page", "page", Colour.BAD),
    ValueDisplay("ticket", "ticket", Colour.LOOK),
)
ALERTS = Row(
    "Firing alerts",
    (
        Panel(
            Kind.TABLE,
            "Alerts that fire now",
            Unit.COUNT,
            (
                Query(
                    "max by (severity, alertname, instance, gpu, stage, model) "
                    f'(ALERTS{{alertstate="firing",{_ON}}})'
                ),
            ),
            "Pages come first. The runbook of each alert is in docs/alerts/.",
            14,
            7,
            columns=(
                Column("Severity", label="severity", shown=_SEVERITY, width=90),
                Column("Alert", label="alertname"),
                Column("Node", label="instance", link="gpufleet-node", width=110),
                Column("GPU", label="gpu", width=60),
                Column("Stage", label="stage", width=100),
                Column("Model", label="model", link="gpufleet-model", width=100),
            ),
            empty="no alert fires",
        ),
        timeline(
            "Alerts that fired",
            (
                Query(
                    f'2 * max by (alertname, instance) (ALERTS{{alertstate="firing",severity="page",{_ON}}})'
                    f' or max by (alertname, instance) (ALERTS{{alertstate="firing",{_ON}}})',
                    "{{alertname}} {{instance}}",
                ),
            ),
            "The first alert is often the cause of the others.",
            shown=(ValueDisplay(1, " ", Colour.LOOK), ValueDisplay(2, " ", Colour.BAD)),
            width=10,
            height=7,
            empty="no alert fired in this time",
        ),
    ),
)

NODES = Row(
    "Nodes",
    (
        Panel(
            Kind.TABLE,
            "Every node",
            Unit.COUNT,
            (
                Query(
                    f"max by (instance, driver_loaded, kernel, release) (gpufleet_node_info{{{_ON}}})"
                ),
            ),
            "Click a node's name to open its dashboard. A blank cell has no measured value, so it does not mean that all is well.",
            24,
            7,
            columns=(
                Column("Node", label="instance", link="gpufleet-node"),
                Column("Answers", f'min by (instance) (up{{job="node",{_ON}}})', shown=UP),
                Column("GPUs", f'max by (instance) (gpufleet_gpus{{state="present",{_ON}}})'),
                Column(
                    "Missing",
                    f'max by (instance) (gpufleet_gpus{{state="expected",{_ON}}}) - max by (instance) (gpufleet_gpus{{state="present",{_ON}}})',
                    steps=ANY_IS_BAD,
                ),
                Column("Stages", f"sum by (instance) (gpufleet_stage_active{{{_ON}}})"),
                Column(
                    "Not running",
                    f"sum by (instance) (1 - gpufleet_stage_active{{{_ON}}})",
                    steps=ANY_IS_BAD,
                ),
                Column(
                    "Problems",
                    f'sum by (instance) (gpufleet_check_findings{{severity=~"block|unknown",{_ON}}})',
                    steps=ANY_IS_BAD,
                ),
                Column(
                    "Warnings",
                    f'sum by (instance) (gpufleet_check_findings{{severity="warn",{_ON}}})',
                    steps=ANY_IS_TO_LOOK_AT,
                ),
                Column(
                    "Drift",
                    f'sum by (instance) (gpufleet_drift_differences{{matters=~"now|next_boot",{_ON}}})',
                    steps=ANY_IS_TO_LOOK_AT,
                ),
                Column(
                    "Mismatch",
                    f"max by (instance) (gpufleet_driver_mismatch{{{_ON}}})",
                    shown=YES_IS_BAD,
                ),
                Column(
                    "Reboot",
                    f"max by (instance) (gpufleet_reboot_pending{{{_ON}}})",
                    shown=YES_IS_TO_LOOK_AT,
                ),
                Column(
                    "Unchecked",
                    f"max by (instance) (gpufleet_node_unchecked{{{_ON}}})",
                    shown=YES_IS_BAD,
                ),
                Column("Driver", label="driver_loaded", width=120),
                Column("Kernel", label="kernel", width=140),
                Column("vLLM", label="release", width=80),
                Column(
                    "Facts from",
                    f"1000 * max by (instance) (gpufleet_facts_timestamp_seconds{{{_ON}}})",
                    unit=Unit.AGO,
                    width=120,
                ),
            ),
        ),
    ),
)

_STAGES = f"gpufleet_stage_active{{{_ON}}}"
_RATE = "[$__rate_interval]"
SERVES = Row(
    "Which stages serve",
    (
        Panel(
            Kind.TABLE,
            "Every stage",
            Unit.COUNT,
            (
                Query(
                    "max by (replica, model, release) (label_join("
                    f'gpufleet_stage_info{{{_ON}}}, "replica", "/", "instance", "stage"))'
                ),
            ),
            "Click a model's name to open its dashboard. If a unit is active but its stage does not "
            "answer, the stage is still starting or hangs. Read the unit's journal.",
            24,
            7,
            columns=(
                Column("Stage", label="replica"),
                Column("Model", label="model", link="gpufleet-model"),
                Column("vLLM", label="release", width=80),
                Column("Unit", _replica(_STAGES), shown=UP),
                Column("Answers", _replica(f"up{{{JOBS},{_ON}}}", "min"), shown=UP),
                Column("Running", _replica(metric(Measure.RUNNING, _ON), "sum")),
                Column("Waiting", _replica(metric(Measure.WAITING, _ON), "sum")),
                Column(
                    "KV cache",
                    _replica(metric(Measure.KV_USE, _ON)),
                    unit=Unit.RATIO,
                    steps=KV_STEPS,
                ),
                Column(
                    "Tokens out",
                    _replica(f"rate({metric(Measure.GENERATED, _ON)}{_RATE})", "sum"),
                    unit=Unit.TOKENS_PER_SECOND,
                ),
                Column(
                    "Requests",
                    _replica(f"rate({metric(Measure.FINISHED, _ON)}{_RATE})", "sum"),
                    unit=Unit.REQUESTS_PER_SECOND,
                ),
                Column(
                    "Restarts, 1 h",
                    f"round({_replica(f'increase(gpufleet_stage_restarts_total{{{_ON}}}[1h])')})",
                    steps=ANY_IS_TO_LOOK_AT,
                ),
                Column(
                    "Stalled", _replica(f"gpufleet_watchdog_stalled{{{_ON}}}"), shown=YES_IS_BAD
                ),
            ),
            empty="no node has a stage",
        ),
    ),
)

CAPACITY = Row(
    "How much capacity is left",
    (
        lines(
            "KV cache in use",
            Unit.RATIO,
            (Query(f"max by (model) ({metric(Measure.KV_USE, _ON)})", "{{model}}"),),
            "If the value stays above 85 %, requests queue and are preempted. Add a replica, or allow less "
            "context.",
            width=6,
            steps=KV_STEPS,
            maximum=1,
            empty="no model is served",
        ),
        lines(
            "Requests that wait",
            Unit.COUNT,
            (Query(f"sum by (model) ({metric(Measure.WAITING, _ON)})", "{{model}}"),),
            "If the queue does not empty, add a replica.",
            width=6,
            empty="no model is served",
        ),
        lines(
            "Tokens generated",
            Unit.TOKENS_PER_SECOND,
            (
                Query(
                    f"sum by (model) (rate({metric(Measure.GENERATED, _ON)}{_RATE}))",
                    "{{model}}",
                ),
            ),
            "If this value drops while requests wait, a replica hangs.",
            width=6,
            stacked=True,
            empty="no model is served",
        ),
        lines(
            "GPUs' work",
            Unit.RATIO,
            (Query(f"avg by (instance) (gpu:utilization_ratio{{{_ON}}})", "{{instance}}"),),
            "Full load without generated tokens means that a collective operation hangs. No load while requests wait means that a stage is down.",
            width=6,
            maximum=1,
        ),
    ),
)

VERSIONS = Row(
    "Versions in use",
    (
        Panel(
            Kind.TABLE,
            "Number of nodes with each version",
            Unit.COUNT,
            (),
            "If there is one row, all nodes have the same versions. If there are more rows, an upgrade is running or nodes have drifted.",
            14,
            6,
            columns=(
                Column("Driver", label="driver_loaded"),
                Column("Fabric manager", label="fabric_manager"),
                Column("Kernel", label="kernel"),
                Column("vLLM", label="release"),
                Column("Lock", label="lock"),
                Column(
                    "Nodes",
                    "count by (driver_loaded, fabric_manager, kernel, release, lock) "
                    f"(gpufleet_node_info{{{_ON}}})",
                ),
            ),
        ),
        lines(
            "Drift, by when it takes effect",
            Unit.COUNT,
            (Query(f"sum by (matters) (gpufleet_drift_differences{{{_ON}}})", "{{matters}}"),),
            "Drift of kind `next_boot` has no effect until the next boot.",
            width=10,
            height=6,
            empty="no drift was recorded",
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="gpufleet-fleet",
    title="gpufleet: fleet",
    question="Is anything wrong now, where is it, and which stages serve?",
    variables=(EVERY_NODE,),
    rows=(NOW, ALERTS, NODES, SERVES, CAPACITY, VERSIONS),
)
