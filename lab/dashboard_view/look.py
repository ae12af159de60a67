"""Colours and words of a value, as a panel's own settings say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.dashboard_view.numbers import written

Json = dict[str, Any]

# Of Grafana's names, those that our dashboards use; what they look like is in `page.CSS`.
GROUNDS = ("green", "super-light-green", "orange", "red", "blue")


@dataclass(frozen=True)
class Look:
    """How one value is shown: its text, and the name of its colour, "" for none."""

    text: str
    colour: str


def look(value: float | str, settings: Mapping[str, Any], now: float) -> Look:
    """Return how a value is shown under `settings`: unit, mappings, thresholds, decimals."""
    for mapping in settings.get("mappings", ()):
        if word := mapping["options"].get(value if isinstance(value, str) else f"{value:g}"):
            return Look(word["text"], word["color"] if word["color"] in GROUNDS else "")
    if isinstance(value, str):
        return Look(value, "")
    colour = ""
    for step in settings.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    text = written(value, settings.get("unit", ""), now, settings.get("decimals"))
    return Look(text, colour if colour in GROUNDS else "")


def limits(settings: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Return the thresholds that are drawn as lines."""
    if settings["custom"].get("thresholdsStyle", {}).get("mode", "off") == "off":
        return []
    steps = settings["thresholds"]["steps"]
    return [(step["value"], step["color"]) for step in steps if step["value"] is not None]


def of_column(panel: Json, heading: str) -> dict[str, Any]:
    """Return the settings of a table's column: the panel's, and what the column has of its own."""
    settings = {"unit": panel["fieldConfig"]["defaults"]["unit"]}
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"] == {"id": "byName", "options": heading}:
            settings |= {item["id"]: item["value"] for item in override["properties"]}
    return settings
