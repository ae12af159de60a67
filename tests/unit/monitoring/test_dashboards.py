"""Dashboards hold what they promise: every panel says what it is, and none is empty."""

from __future__ import annotations

import datetime as dt
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from gpufleet.errors import FleetError
from gpufleet.monitoring.dashboards.grafana import dashboards
from gpufleet.monitoring.dashboards.panel import Kind, Panel, Query, Row, Unit, place_panels
from gpufleet.monitoring.metrics import catalogue
from gpufleet.monitoring.rules import files
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.settings.monitoring_settings import Objectives
from tests.support.rows import each_row
from tests.unit.monitoring import offline
from tests.unit.monitoring.example_fleet import STAGES, open_metrics
from tests.unit.monitoring.panels import fill, may_be_empty, queries
from tests.unit.monitoring.prometheus import asked, prometheus

PROMISED = {
    model: Objectives(ttft_p99_seconds=2, itl_p99_seconds=0.1, e2e_p99_seconds=30)
    for model in sorted({model for _, _, model in STAGES})
}
MEASURED = tuple(
    MeasuredReplica(model, stage, node, "0.32.0", 2.5, dt.date(2026, 11, 20))
    for node, stage, model in STAGES
)
JSON: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in dashboards().items()}
# The panel types of Grafana 13 among those that we use (@grafana/schema 13.2.3, composable/).
TYPES = {"timeseries", "stat", "table", "heatmap", "state-timeline", "row"}
# Of Grafana itself, beside a dashboard's own variables.
BUILT_IN = {"__rate_interval", "__value", "__url_time_range"}

PANELS = [
    pytest.param(dashboard, panel, id=f"{dashboard['uid']}-{panel['title']}")
    for dashboard in JSON.values()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]


def names(expr: str) -> set[str]:
    """Return the series that an expression names, as PromQL's own grammar sees them."""
    found = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)
        for part in ("expr", "lhs", "rhs", "vector_selector"):
            if (inner := getattr(node, part, None)) is not None:
                visit(inner)
        for argument in getattr(node, "args", ()) or ():
            visit(argument)

    visit(promql_parser.parse(offline.of_engine(expr)))
    return found


@each_row("query", queries({"instance": "gpu-01", "model": "chat"}), ids=str)
def test_a_query_names_only_what_is_measured_or_recorded(query: Any) -> None:
    recorded = {
        recording.record
        for group in files.groups(PROMISED, MEASURED)
        for recording in group.recordings
    }

    assert names(query.expr)
    assert names(query.expr) - catalogue.SERIES.keys() - recorded == set()


@each_row(("dashboard", "panel"), PANELS)
def test_a_panel_says_what_it_is(dashboard: dict[str, Any], panel: dict[str, Any]) -> None:
    """Title, unit, and a description with its metrics' meaning; its variables are declared."""
    text = json.dumps(panel)
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    named = set().union(*(names(_plain(target["expr"])) for target in panel["targets"]))

    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"] in set(Unit)
    assert all(f"`{name}`: " in panel["description"] for name in named)
    assert len(panel["description"].split("\n\n")[0]) > 15
    assert set(re.findall(r"\$\{?(\w+)", text)) <= declared | BUILT_IN


def _plain(expr: str) -> str:
    return re.sub(r"\$\w+", "5m", expr)


@each_row("dashboard", JSON.values(), ids=list(JSON))
def test_ids_are_unique_and_panels_fill_the_grid(dashboard: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    bottom = max(y for _, y in taken) + 1

    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert set(taken) == {(x, y) for x in range(24) for y in range(bottom)}


def test_uids_and_titles_are_unique() -> None:
    for key in ("uid", "title"):
        assert len({dashboard[key] for dashboard in JSON.values()}) == len(JSON)
    assert all(len(dashboard["uid"]) <= 40 for dashboard in JSON.values())
    assert {f"{dashboard['uid']}.json" for dashboard in JSON.values()} == set(JSON)


@each_row("dashboard", JSON.values(), ids=list(JSON))
def test_grafana_gets_what_it_needs(dashboard: dict[str, Any]) -> None:
    """What @grafana/schema 13.2.3 requires of the classic model, and nothing it has given up."""
    assert {"schemaVersion", "panels", "templating", "annotations", "time", "uid"} <= set(dashboard)
    assert dashboard["id"] is None  # Grafana's own; a file with one collides
    for panel in dashboard["panels"]:
        assert panel["type"] in TYPES
        assert {"gridPos", "id", "title", "type"} <= set(panel)
        if panel["type"] == "row":
            assert isinstance(panel["panels"], list)
            assert isinstance(panel["collapsed"], bool)
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert {"defaults", "overrides"} == set(panel["fieldConfig"])
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None
        assert [step["value"] for step in steps[1:]] == sorted(step["value"] for step in steps[1:])
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert all(target["instant"] != target["range"] for target in panel["targets"])
    for mark in dashboard["annotations"]["list"]:
        assert {"datasource", "enable", "iconColor", "name"} <= set(mark)
    for link in dashboard["links"]:
        assert link["includeVars"]
        assert link["keepTime"]


def test_a_table_of_several_queries_joins_their_rows_and_another_joins_nothing() -> None:
    tables = [
        panel
        for dashboard in JSON.values()
        for panel in dashboard["panels"]
        if panel["type"] == "table"
    ]
    assert {len(table["targets"]) > 1 for table in tables} == {True, False}
    for table in tables:
        joins = [each for each in table["transformations"] if each["id"] == "joinByField"]
        assert len(joins) == (len(table["targets"]) > 1), table["title"]


def test_no_two_columns_of_a_table_have_one_heading() -> None:
    """Grafana colours a column by its heading, and so both."""
    for dashboard in JSON.values():
        for panel in (each for each in dashboard["panels"] if each["type"] == "table"):
            overrides = [each["matcher"]["options"] for each in panel["fieldConfig"]["overrides"]]
            assert len(set(overrides)) == len(overrides), (panel["title"], overrides)


def test_a_number_that_stands_for_a_state_is_shown_in_words() -> None:
    text = "".join(dashboards().values())
    words = re.findall(r'"mappings": \[\s*\{\s*"options": \{.*?"text": "(\w+)"', text, re.DOTALL)
    assert {"up", "no"} <= set(words)


def test_links_lead_to_dashboards_that_know_what_was_chosen() -> None:
    """A cell's link sets a variable of the dashboard that it opens."""
    by_uid = {dashboard["uid"]: dashboard for dashboard in JSON.values()}
    links = [
        re.fullmatch(r"/d/([\w-]+)\?var-(\w+)=.*", url)
        for url in re.findall(r'"url": "(/d/[^"]+)"', "".join(dashboards().values()))
    ]

    assert links
    for link in links:
        assert link is not None
        variables = {variable["name"] for variable in by_uid[link[1]]["templating"]["list"]}
        assert link[2] in variables


def test_the_same_text_comes_out_each_time() -> None:
    assert dashboards() == dashboards()


def test_a_line_of_panels_that_does_not_fill_the_width_is_refused() -> None:
    panel = Panel(Kind.LINES, "half", Unit.COUNT, (Query("up"),), "", 12, 4)

    with pytest.raises(FleetError, match="ends at column 12 of 24"):
        place_panels((Row("row", (panel,)),))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float]]:
    """A real Prometheus with ten minutes of a fleet that exists as numbers, under our rules."""
    now = time.time()
    rules = files.rule_files(files.RuleSettings(objectives=PROMISED, measured=MEASURED))
    # Up to now: a Prometheus that starts takes nothing older than what it finds.
    samples = open_metrics(now - 900, now, 30)
    with prometheus(tmp_path_factory.mktemp("prometheus"), samples, rules) as url:
        for _ in range(300):
            if asked(
                url, "gpu:memory_used_ratio and on() model:objective_error_ratio", time.time()
            ):
                break
            time.sleep(0.2)
        time.sleep(1.5)  # rules that take what other rules recorded
        yield url, time.time()


@each_row(
    "query", queries({"instance": "gpu-01", "model": "chat"}), ids=lambda query: str(query[:2])
)
def test_no_panel_is_empty_on_a_fleet_that_measures_everything(
    query: Any, server: tuple[str, float]
) -> None:
    url, now = server

    assert asked(url, query.expr, now)


def test_variables_are_filled_in_both_spellings() -> None:
    values = {"instance": "gpu-01", "__rate_interval": "60s"}

    text = fill('rate(a{instance="$instance",b="${instance}"}[$__rate_interval])', values)

    assert text == 'rate(a{instance="gpu-01",b="gpu-01"}[60s])'


def test_what_may_be_empty_is_said_by_its_panel() -> None:
    chosen = {"instance": "gpu-01", "model": "chat"}

    assert may_be_empty(chosen) < set(queries(chosen))
