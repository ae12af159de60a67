"""Every query of every dashboard, as a Prometheus can be asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpufleet.monitoring.dashboards.grafana import dashboards

# Two and more scrapes are in it, however seldom they are.
RATE_INTERVAL = "2m"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


class PanelQuery(NamedTuple):
    """One query; unpacks as (dashboard, panel, expr)."""

    dashboard: str
    panel: str
    expr: str


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its variables' values; a variable without one stays as it is."""
    return _VARIABLE.sub(lambda match: values.get(match[1], match[0]), text)


def queries(chosen: Mapping[str, str] | None = None) -> list[PanelQuery]:
    """
    Return all queries with their variables filled in: those chosen, `.*` for the others.

    A variable that stands in `=` needs a value: `instance`, `model`.
    """
    return [query for query, _ in _all(chosen or {})]


def may_be_empty(chosen: Mapping[str, str] | None = None) -> set[PanelQuery]:
    """Return those whose panel says what it means when there is nothing."""
    return {query for query, empty in _all(chosen or {}) if empty}


def _all(chosen: Mapping[str, str]) -> Iterator[tuple[PanelQuery, str]]:
    for text in dashboards().values():
        dashboard: dict[str, Any] = json.loads(text)
        names = [variable["name"] for variable in dashboard["templating"]["list"]]
        values = {**dict.fromkeys(names, ".*"), "__rate_interval": RATE_INTERVAL, **chosen}
        for panel in dashboard["panels"]:
            empty = panel.get("fieldConfig", {}).get("defaults", {}).get("noValue", "")
            for target in panel.get("targets", ()):
                expr = fill(target["expr"], values)
                yield PanelQuery(dashboard["title"], panel["title"], expr), empty
