"""
Render gpufleet's dashboards as Grafana's JSON. They are the same for every fleet. Pure.

The format is the classic model, which Grafana 10 to 13 accept as a file. schemaVersion 42 is the
default of @grafana/schema 13.2.3 (raw/dashboard). All features that are used exist since Grafana
10.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from string import ascii_uppercase
from typing import Any, TypeVar

from gpufleet.monitoring.dashboards import (
    fleet_dashboard,
    gpu_dashboard,
    model_dashboard,
    node_dashboard,
    upgrades_dashboard,
)
from gpufleet.monitoring.dashboards.panel import (
    Colour,
    Column,
    Dashboard,
    Kind,
    Mark,
    Panel,
    Place,
    Query,
    Row,
    Step,
    ValueDisplay,
    Variable,
    place_panels,
)
from gpufleet.monitoring.metrics import catalogue
from gpufleet.monitoring.rules import files

SCHEMA = 42
DASHBOARDS: tuple[Dashboard, ...] = (
    fleet_dashboard.DASHBOARD,
    node_dashboard.DASHBOARD,
    gpu_dashboard.DASHBOARD,
    model_dashboard.DASHBOARD,
    upgrades_dashboard.DASHBOARD,
)
TAG = "gpufleet"  # the tag by which dashboards link to each other

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")

Json = dict[str, Any]
_Marked = TypeVar("_Marked", Step, ValueDisplay)


def dashboards() -> dict[str, str]:
    """Return `{"gpufleet-fleet.json": text, ...}` for Grafana's file provisioning."""
    return {
        f"{dashboard.uid}.json": json.dumps(grafana(dashboard), indent=2, ensure_ascii=False) + "\n"
        for dashboard in DASHBOARDS
    }


def grafana(dashboard: Dashboard) -> Json:
    """Return one dashboard as Grafana's JSON."""
    return {
        "annotations": {"list": [_own_marks(), *map(_mark, dashboard.marks)]},
        "description": dashboard.question,
        "editable": False,  # the next deploy would overwrite a change
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [_links()],
        "panels": [
            _row(item, place, number) if isinstance(item, Row) else _panel(item, place, number)
            for number, (item, place) in enumerate(place_panels(dashboard.rows), start=1)
        ],
        "refresh": "30s",
        "schemaVersion": SCHEMA,
        "tags": [TAG],
        "templating": {"list": [_source_variable(), *map(_variable, dashboard.variables)]},
        "time": {"from": f"now-{dashboard.hours}h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": dashboard.title,
        "uid": dashboard.uid,
        "version": 1,
        "weekStart": "",
    }


def description(panel: Panel) -> str:
    """Return the description of a panel in Markdown: what to do, and the meaning of its metrics."""
    known = meanings()
    named = dict.fromkeys(
        name for query in panel.all_queries for name in _NAME.findall(query.expr) if name in known
    )
    parts = [panel.what_to_do, *(f"`{name}`: {known[name]}." for name in named)]
    if panel.empty:
        parts.append(f"Empty: {panel.empty}.")
    return "\n\n".join(parts)


@cache
def meanings() -> Mapping[str, str]:
    """Return the meaning of every series and recording that queries may use."""
    return {
        **{name: metric.help for name, metric in catalogue.SERIES.items()},
        **{
            recording.record: recording.help.rstrip(".")
            for group in files.all_groups()
            for recording in group.recordings
        },
        "ALERTS": "Always 1 while an alert is pending or fires; written by Prometheus itself",
    }


def _row(row: Row, place: Place, number: int) -> Json:
    return {
        "collapsed": False,
        "gridPos": _at(place),
        "id": number,
        "panels": [],
        "title": row.title,
        "type": "row",
    }


def _panel(panel: Panel, place: Place, number: int) -> Json:
    return {
        "datasource": _SOURCE,
        "description": description(panel),
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "gridPos": _at(place),
        "id": number,
        "options": _OPTIONS[panel.kind](panel),
        "targets": [
            _target(panel, letter, query.expr, query.legend)
            for letter, query in zip(ascii_uppercase, panel.all_queries, strict=False)
        ],
        "title": panel.title,
        "transformations": _transformations(panel),
        "type": panel.kind.value,
    }


def _at(place: Place) -> Json:
    return {"h": place.h, "w": place.w, "x": place.x, "y": place.y}


def _target(panel: Panel, letter: str, expr: str, legend: str) -> Json:
    at_once = panel.kind in (Kind.STAT, Kind.TABLE)
    formats = {Kind.TABLE: "table", Kind.HEATMAP: "heatmap"}
    return {
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": expr,
        "format": formats.get(panel.kind, "time_series"),
        "instant": at_once,
        "legendFormat": legend or "{{le}}" if panel.kind is Kind.HEATMAP else legend,
        "range": not at_once,
        "refId": letter,
    }


def _defaults(panel: Panel) -> Json:
    colours = "palette-classic" if panel.kind is Kind.LINES else "thresholds"
    found: Json = {
        "color": {"mode": colours},
        "custom": _CUSTOM[panel.kind](panel),
        "mappings": _mappings(panel.shown),
        "thresholds": _thresholds(panel.steps),
        "unit": panel.unit.value,
    }
    if panel.empty:
        found["noValue"] = panel.empty
    for key, value in (
        ("min", panel.minimum),
        ("max", panel.maximum),
        ("decimals", panel.decimals),
    ):
        if value is not None:
            found[key] = value
    return found


def _thresholds(steps: tuple[Step, ...]) -> Json:
    first = Step(None, Colour.PLAIN)
    return {
        "mode": "absolute",
        "steps": [{"color": step.colour.value, "value": step.at} for step in steps or (first,)],
    }


def _mappings(shown: tuple[ValueDisplay, ...]) -> list[Json]:
    if not shown:
        return []
    options = {
        _key(word.value): {"color": word.colour.value, "index": index, "text": word.text}
        for index, word in enumerate(shown)
    }
    return [{"options": options, "type": "value"}]


def _key(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _lines_custom(panel: Panel) -> Json:
    return {
        "drawStyle": "line",
        "fillOpacity": 30 if panel.stacked else 0,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        "thresholdsStyle": {"mode": "dashed" if panel.lines else "off"},
    }


_CUSTOM: dict[Kind, Callable[[Panel], Json]] = {
    Kind.LINES: _lines_custom,
    Kind.STAT: lambda _: {},
    Kind.TABLE: lambda _: {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
    Kind.HEATMAP: lambda _: {},
    Kind.TIMELINE: lambda _: {"fillOpacity": 80, "lineWidth": 0},
}
_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []}
_OPTIONS: dict[Kind, Callable[[Panel], Json]] = {
    Kind.LINES: lambda _: {
        "legend": {
            "calcs": ["lastNotNull", "max"],
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    Kind.STAT: lambda panel: {
        "colorMode": "background" if panel.steps or panel.shown else "none",
        "graphMode": "none",
        "justifyMode": "center",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "auto",
        "wideLayout": True,
    },
    Kind.TABLE: lambda panel: {
        "cellHeight": "sm",
        "frameIndex": 0,
        "showHeader": True,
        "sortBy": [{"desc": False, "displayName": panel.columns[0].heading}],
    },
    Kind.HEATMAP: lambda panel: {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Oranges",
            "steps": 64,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit.value},
    },
    Kind.TIMELINE: lambda _: {
        "alignValue": "left",
        "legend": _LEGEND,
        "mergeValues": True,
        "rowHeight": 0.85,
        "showValue": "auto",
        "tooltip": {"mode": "single", "sort": "none"},
    },
}


def _overrides(panel: Panel) -> list[Json]:
    limits = [
        _override(
            "byFrameRefID",
            letter,
            ("color", {"fixedColor": Colour.BAD.value, "mode": "fixed"}),
            ("custom.lineStyle", {"dash": [8, 6], "fill": "dash"}),
            ("custom.lineWidth", 2),
            ("custom.fillOpacity", 0),
            ("custom.stacking", {"group": "limit", "mode": "none"}),
        )
        for letter, query in zip(ascii_uppercase, panel.all_queries, strict=False)
        if query.limit
    ]
    return limits + [_column(column) for column in panel.columns]


def _override(matcher: str, name: str, *properties: tuple[str, Any]) -> Json:
    return {
        "matcher": {"id": matcher, "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties],
    }


def _column(column: Column) -> Json:
    properties: list[tuple[str, Any]] = []
    if column.value:
        properties.append(("unit", column.unit.value))
    if column.steps:
        properties.append(("thresholds", _thresholds(_only_bad(column.steps))))
    if column.shown:
        properties.append(("mappings", _mappings(_only_bad(column.shown))))
    if column.steps or column.shown:
        ground = {"mode": "basic", "type": "color-background"}
        properties.append(("custom.cellOptions", ground))
    if column.width is not None:
        properties.append(("custom.width", column.width))
    if column.link:
        properties.append(("links", [_cell_link(column)]))
    return _override("byName", column.heading, *properties)


def _only_bad(marks: tuple[_Marked, ...]) -> tuple[_Marked, ...]:
    """
    Return the marks without the colour for good values, because a red cell is hard to see among
    green cells.
    """
    return tuple(
        replace(mark, colour=Colour.NONE) if mark.colour is Colour.GOOD else mark for mark in marks
    )


def _cell_link(column: Column) -> Json:
    chosen = f"var-{column.label}=${{__value.text}}&var-datasource=${{datasource}}"
    return {"title": "Look closer", "url": f"/d/{column.link}?{chosen}&${{__url_time_range}}"}


def _transformations(panel: Panel) -> list[Json]:
    """
    Return the transformations that turn the answers of a table's queries into rows.

    The answers are joined by the label of the first column. If a query has no answer, the join
    leaves the query out. The transformation `merge` would then not match the rows.
    """
    if panel.kind is not Kind.TABLE:
        return []
    names = [_field(panel, column) for column in panel.columns]
    joined = [{"id": "joinByField", "options": {"byField": names[0], "mode": "outer"}}]
    return [
        *(joined if len(panel.all_queries) > 1 else []),
        {"id": "filterFieldsByName", "options": {"include": {"names": names}}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {},
                "indexByName": {name: index for index, name in enumerate(names)},
                "renameByName": dict(
                    zip(names, (column.heading for column in panel.columns), strict=True)
                ),
            },
        },
    ]


def _field(panel: Panel, column: Column) -> str:
    """
    Return the name that Grafana gives a column (@grafana/prometheus 13.1.4, result_transformer).
    """
    if not column.value:
        return column.label
    queries = panel.all_queries
    number = queries.index(Query(column.value))
    return f"Value #{ascii_uppercase[number]}" if len(queries) > 1 else "Value"


def _source_variable() -> Json:
    return {
        "current": {},
        "hide": 0,
        "includeAll": False,
        "label": "Prometheus",
        "multi": False,
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
        "type": "datasource",
    }


def _variable(variable: Variable) -> Json:
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return {
        "allValue": ".*",
        "current": everything if variable.many else {},
        "datasource": _SOURCE,
        "definition": variable.values,
        "hide": 0,
        "includeAll": variable.many,
        "label": variable.label,
        "multi": variable.many,
        "name": variable.name,
        "options": [],
        "query": {"query": variable.values, "refId": f"variable-{variable.name}"},
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 7,  # natural order: gpu-2 before gpu-10
        "type": "query",
    }


def _links() -> Json:
    return {
        "asDropdown": False,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "tags": [TAG],
        "targetBlank": False,
        "title": "gpufleet",
        "tooltip": "",
        "type": "dashboards",
        "url": "",
    }


def _own_marks() -> Json:
    return {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }


def _mark(mark: Mark) -> Json:
    return {
        "datasource": _SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": mark.colour.value,
        "name": mark.name,
        "tagKeys": "instance",
        "target": {"expr": mark.expr, "interval": "60s", "refId": "Anno"},
        "textFormat": mark.text,
        "titleFormat": mark.name,
    }
