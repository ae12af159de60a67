"""
Define parts that several dashboards use: variables, selectors, thresholds and displayed words.
Pure.
"""

from __future__ import annotations

from gpufleet.engines.promql import JOBS
from gpufleet.monitoring.dashboards.panel import (
    Colour,
    Kind,
    Mark,
    Panel,
    Query,
    Step,
    Unit,
    ValueDisplay,
    Variable,
)
from gpufleet.monitoring.rules.vllm_rules import KV_FULL, KV_SATURATED

# Every node has a node exporter, so the targets of this job are all nodes.
NODES = 'label_values(up{job="node"}, instance)'

NODE = Variable("instance", "Node", NODES)
EVERY_NODE = Variable("instance", "Node", NODES, many=True)
GPU = Variable(
    "gpu", "GPU", 'label_values(gpu:temperature_celsius{instance=~"$instance"}, gpu)', many=True
)
MODEL = Variable("model", "Model", f"label_values(up{{{JOBS}}}, model)")
STAGE = Variable("stage", "Stage", f'label_values(up{{{JOBS},model="$model"}}, stage)', many=True)

ANY_IS_BAD = (Step(None, Colour.GOOD), Step(1, Colour.BAD))
ANY_IS_TO_LOOK_AT = (Step(None, Colour.GOOD), Step(1, Colour.LOOK))
KV_STEPS = (
    Step(None, Colour.GOOD),
    Step(KV_SATURATED, Colour.LOOK),
    Step(KV_FULL, Colour.BAD),
)

UP = (ValueDisplay(1, "up", Colour.GOOD), ValueDisplay(0, "DOWN", Colour.BAD))
YES_IS_BAD = (ValueDisplay(0, "no", Colour.GOOD), ValueDisplay(1, "YES", Colour.BAD))
YES_IS_TO_LOOK_AT = (ValueDisplay(0, "no", Colour.GOOD), ValueDisplay(1, "yes", Colour.LOOK))
# For timelines. Most of their bands show good states, so only bad states have a strong colour.
YES_STANDS_OUT = (ValueDisplay(0, " ", Colour.QUIET), ValueDisplay(1, "yes", Colour.BAD))
THERE = (ValueDisplay(1, " ", Colour.NEUTRAL),)  # for a series that shows only its labels

DEPLOYS = Mark(
    "Deploy",
    'max by (instance, deploy) (changes(gpufleet_deploy_timestamp_seconds{instance=~"$instance"}[2m])) > bool 0',
    "{{deploy}} on {{instance}}",
)


def stat(
    title: str,
    expr: str,
    what_to_do: str,
    *,
    unit: Unit = Unit.COUNT,
    steps: tuple[Step, ...] = (),
    shown: tuple[ValueDisplay, ...] = (),
    empty: str = "",
    legend: str = "",
    width: int = 3,
    decimals: int | None = None,
) -> Panel:
    """Return a panel with one large number. The colour of its background shows the state."""
    return Panel(
        Kind.STAT,
        title,
        unit,
        (Query(expr, legend),),
        what_to_do,
        width,
        4,
        steps=steps,
        shown=shown,
        empty=empty,
        decimals=decimals,
    )


def lines(
    title: str,
    unit: Unit,
    queries: tuple[Query, ...],
    what_to_do: str,
    *,
    width: int = 8,
    height: int = 8,
    steps: tuple[Step, ...] = (),
    minimum: float | None = 0,
    maximum: float | None = None,
    stacked: bool = False,
    empty: str = "",
) -> Panel:
    """Return a panel that shows values over time. `steps` are drawn as lines."""
    return Panel(
        Kind.LINES,
        title,
        unit,
        queries,
        what_to_do,
        width,
        height,
        steps=steps,
        lines=bool(steps),
        minimum=minimum,
        maximum=maximum,
        stacked=stacked,
        empty=empty,
    )


def timeline(
    title: str,
    queries: tuple[Query, ...],
    what_to_do: str,
    *,
    shown: tuple[ValueDisplay, ...] = THERE,
    width: int = 12,
    height: int = 8,
    empty: str = "",
) -> Panel:
    """
    Return a panel with a band for each series. The colours of a band show its states over time.
    """
    return Panel(
        Kind.TIMELINE,
        title,
        Unit.STATE,
        queries,
        what_to_do,
        width,
        height,
        shown=shown,
        empty=empty,
    )


def heatmap(
    title: str, unit: Unit, expr: str, what_to_do: str, *, width: int = 12, height: int = 8
) -> Panel:
    """Return a panel that shows how the distribution of a histogram changes over time."""
    return Panel(Kind.HEATMAP, title, unit, (Query(expr),), what_to_do, width, height)
