"""A dashboard's queries, put to a Prometheus."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from gpufleet.errors import FleetError

Json = dict[str, Any]

_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), *(?P<label>\w+)\)")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_TIMEOUT = 30  # seconds; Prometheus' own limit of a query is 120
_OPENER = build_opener(ProxyHandler({}))  # no proxy of the environment: Prometheus is near


class QueryRefusedError(Exception):
    """Prometheus did not answer a query, and said why."""


@dataclass(frozen=True)
class Series:
    """One series: its labels, its legend, and its values as (seconds since 1970, number)."""

    labels: Mapping[str, str]
    name: str
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]


@dataclass(frozen=True)
class Answer:
    """What one query brought: series, or Prometheus' own words why not."""

    ref: str
    series: tuple[Series, ...]
    error: str = ""
    limit: bool = False


@dataclass(frozen=True)
class Span:
    """The time that is looked at, in seconds since 1970, and the step between two values."""

    start: float
    end: float
    step: int


@dataclass(frozen=True)
class Asking:
    """
    One Prometheus, and how it is asked.

    Attributes:
        url: without a final slash.
        scrape: seconds between two scrapes, of which Grafana makes `$__rate_interval`.
    """

    url: str
    span: Span
    scrape: int = 15

    @property
    def rate_interval(self) -> int:
        """Four scrapes, or a step and one (grafana.com, Prometheus template variables)."""
        return max(self.span.step + self.scrape, 4 * self.scrape)

    def chosen(self, dashboard: Json, wanted: Mapping[str, str]) -> dict[str, str]:
        """
        Return a value for every variable: the wanted one, all of them, or the first.

        Raises FleetError when Prometheus cannot be reached.
        """
        values: dict[str, str] = {}
        for variable in dashboard["templating"]["list"]:
            name = variable["name"]
            if variable["type"] != "query":
                continue
            if name in wanted:
                values[name] = wanted[name]
            elif variable["includeAll"]:
                values[name] = variable["allValue"]
            else:
                values[name] = next(iter(self._values(filled(variable["definition"], values))), "")
        return values

    def answers(self, panel: Json, values: Mapping[str, str]) -> tuple[Answer, ...]:
        """Ask all queries of a panel."""
        return tuple(self._answer(panel, target, values) for target in panel["targets"])

    def marks(self, dashboard: Json, values: Mapping[str, str]) -> tuple[tuple[float, str], ...]:
        """Return moments that are marked in every panel, with what happened."""
        found = []
        for mark in dashboard["annotations"]["list"]:
            if "target" not in mark:
                continue
            for item in self._range(self._filled(mark["target"]["expr"], values)):
                text = _legend(mark["textFormat"], item["metric"])
                times = [time for time, value in _points(item["values"]) if value > 0]
                # Marks one after another are one: the query looks back over more than a step.
                found += [
                    (time, text)
                    for before, time in zip([-math.inf, *times], times, strict=False)
                    if time - before > 3 * max(self.span.step, 60)
                ]
        return tuple(sorted(found))

    def _answer(self, panel: Json, target: Json, values: Mapping[str, str]) -> Answer:
        expr = self._filled(target["expr"], values)
        limit = any(
            override["matcher"] == {"id": "byFrameRefID", "options": target["refId"]}
            for override in panel["fieldConfig"]["overrides"]
        )
        try:
            found = self._instant(expr) if target["instant"] else self._range(expr)
        except QueryRefusedError as error:
            return Answer(target["refId"], (), str(error), limit)
        series = (
            Series(item["metric"], _legend(target["legendFormat"], item["metric"]), points)
            for item in found
            if (points := _points(item.get("values") or [item["value"]]))
        )
        return Answer(target["refId"], tuple(series), limit=limit)

    def _filled(self, expr: str, values: Mapping[str, str]) -> str:
        return filled(expr, {**values, "__rate_interval": f"{self.rate_interval}s"})

    def _range(self, expr: str) -> list[Json]:
        span = self.span
        found: list[Json] = self._ask(
            "query_range", query=expr, start=span.start, end=span.end, step=span.step
        )["result"]
        return found

    def _instant(self, expr: str) -> list[Json]:
        answer = self._ask("query", query=expr, time=self.span.end)
        if answer["resultType"] == "scalar":
            return [{"metric": {}, "value": answer["result"]}]
        found: list[Json] = answer["result"]
        return found

    def _values(self, query: str) -> list[str]:
        match = _LABEL_VALUES.fullmatch(query)
        if match is None:
            raise FleetError(f"{query!r} is not label_values(selector, label).")
        found = self._ask(
            f"label/{match['label']}/values",
            **{"match[]": match["selector"], "start": self.span.start, "end": self.span.end},
        )
        return sorted(found)

    def _ask(self, what: str, **parameters: object) -> Any:
        url = f"{self.url}/api/v1/{what}?{urlencode(parameters)}"
        try:
            with _OPENER.open(url, timeout=_TIMEOUT) as answer:
                return json.load(answer)["data"]
        except HTTPError as error:
            raise QueryRefusedError(_reason(error)) from error
        except (URLError, TimeoutError, ConnectionError) as error:
            raise FleetError(f"Prometheus at {self.url} does not answer: {error}") from error


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its variables' values; a variable without one stays as it is."""
    return _VARIABLE.sub(lambda match: values.get(match[1], match[0]), text)


def _reason(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError):
        return str(error)


def _legend(template: str, labels: Mapping[str, str]) -> str:
    if not template:
        return ", ".join(f"{key}={labels[key]}" for key in sorted(labels)) or "value"
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda match: labels.get(match[1], ""), template).strip()


def _points(values: list[list[Any]]) -> tuple[tuple[float, float], ...]:
    found = ((float(time), float(value)) for time, value in values)
    return tuple((time, value) for time, value in found if math.isfinite(value))
