"""Define the dashboard of upgrades: versions over time, and the cost of each change. Pure."""

from __future__ import annotations

from gpufleet.engines.engine import Measure
from gpufleet.engines.promql import metric
from gpufleet.monitoring.dashboards.common import (
    DEPLOYS,
    EVERY_NODE,
    YES_STANDS_OUT,
    lines,
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
_RATE = "[$__rate_interval]"


def _versions(title: str, label: str, what_to_do: str, info: str = "gpufleet_node_info") -> Panel:
    """Return a panel with a band for each version on each node."""
    return timeline(
        title,
        (
            Query(
                f'max by (instance, {label}) ({info}{{{_ON},{label}!=""}})',
                f"{{{{instance}}}}  {{{{{label}}}}}",
            ),
        ),
        what_to_do,
        height=6,
        empty="no node reports it",
    )


RAN = Row(
    "Which versions ran when",
    (
        _versions(
            "Driver, loaded",
            "driver_loaded",
            "Where one band ends and the next begins, the driver was upgraded. In a gap, the node or "
            "its driver was missing.",
        ),
        timeline(
            "vLLM, by stage",
            (
                Query(
                    f"max by (instance, stage, release) (gpufleet_stage_info{{{_ON}}})",
                    "{{instance}}  {{stage}}  {{release}}",
                ),
            ),
            "If one model has two releases, a roll-out is running or has stopped half-way.",
            height=6,
            empty="no node has a stage",
        ),
        _versions("Kernel", "kernel", "For a new kernel, the driver's module must be built again."),
        _versions(
            "Lock",
            "lock",
            "All nodes of a group should have the same lock file. If a group has two lock files, only part of it is upgraded.",
        ),
    ),
)

FORCE = Row(
    "Is the new version active?",
    (
        timeline(
            "Driver parts that differ",
            (
                Query(
                    f"max by (instance, part) (gpufleet_driver_mismatch{{{_ON}}})",
                    "{{instance}}  {{part}}",
                ),
            ),
            "Red for some minutes, between installation and reload, is expected. If it stays red longer, "
            "the upgrade has stopped.",
            shown=YES_STANDS_OUT,
            width=8,
            height=6,
            empty="no driver is loaded",
        ),
        timeline(
            "Reboot pending",
            (
                Query(
                    f"max by (instance, reason) (gpufleet_reboot_pending{{{_ON}}})",
                    "{{instance}}  {{reason}}",
                ),
            ),
            "Plan a reboot, or let the next driver upgrade reboot the node.",
            shown=(ValueDisplay(0, " ", Colour.QUIET), ValueDisplay(1, "yes", Colour.LOOK)),
            width=8,
            height=6,
        ),
        timeline(
            "No check passed since the driver change",
            (Query(f"max by (instance) (gpufleet_node_unchecked{{{_ON}}})", "{{instance}}"),),
            "vLLM's units do not start on the node until a check has passed. Run `gpufleet deploy check INVENTORY`.",
            shown=YES_STANDS_OUT,
            width=8,
            height=6,
        ),
    ),
)

COST = Row(
    "What it cost",
    (
        lines(
            "Stages running",
            Unit.COUNT,
            (Query(f"sum by (instance) (gpufleet_stage_active{{{_ON}}})", "{{instance}}"),),
            "If the number stays lower after an upgrade, a stage did not start again.",
            width=8,
            stacked=True,
            empty="no node has a stage",
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
            "A gap shows how much clients lost during the upgrade.",
            width=8,
            stacked=True,
            empty="no model is served",
        ),
        lines(
            "Restarts, 10 min",
            Unit.COUNT,
            (
                Query(
                    f"max by (instance, stage) (increase(gpufleet_stage_restarts_total{{{_ON}}}[10m]))",
                    "{{instance}} {{stage}}",
                ),
                Query(
                    f"max by (instance, stage) (increase(gpufleet_watchdog_restarts_total{{{_ON}}}[10m]))",
                    "{{instance}} {{stage}}, watchdog",
                ),
            ),
            "After an upgrade, no restarts are expected. If there are any, the new release is unstable.",
            width=8,
            empty="no node has a stage",
        ),
    ),
)

DONE = Row(
    "What was done",
    (
        Panel(
            Kind.TABLE,
            "Last deploys and checks",
            Unit.AGO,
            (),
            "A check older than the last deploy does not cover that deploy.",
            14,
            6,
            columns=(
                Column("Node", label="instance", link="gpufleet-node"),
                Column(
                    "deploys/node.py",
                    f'1000 * max by (instance) (gpufleet_deploy_timestamp_seconds{{{_ON},deploy="node"}})',
                    unit=Unit.AGO,
                ),
                Column(
                    "deploys/vllm.py",
                    f'1000 * max by (instance) (gpufleet_deploy_timestamp_seconds{{{_ON},deploy="vllm"}})',
                    unit=Unit.AGO,
                ),
                Column(
                    "Checked",
                    f"1000 * max by (instance) (gpufleet_check_timestamp_seconds{{{_ON}}})",
                    unit=Unit.AGO,
                ),
                Column(
                    "Drift compared",
                    f"1000 * max by (instance) (gpufleet_drift_timestamp_seconds{{{_ON}}})",
                    unit=Unit.AGO,
                ),
            ),
            empty="no deploy was recorded",
        ),
        lines(
            "Silences",
            Unit.COUNT,
            (Query("max by (state) (alertmanager_silences)", "{{state}}"),),
            "An upgrade opens a silence for its nodes and closes it at the end. A silence that stays open "
            "hides later alerts.",
            width=10,
            height=6,
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="gpufleet-upgrades",
    title="gpufleet: upgrades",
    question="Which versions ran when, was each upgrade finished, and what did it cost?",
    variables=(EVERY_NODE,),
    marks=(DEPLOYS,),
    rows=(RAN, FORCE, COST, DONE),
    hours=24,
)
