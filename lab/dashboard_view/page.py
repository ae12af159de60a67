"""A whole dashboard as one HTML page that needs nothing else. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from lab.dashboard_view.drawing import TITLE, Frame, Marks, drawn
from lab.dashboard_view.questions import Answer, Span

Json = dict[str, Any]

COLUMN, ROW, GAP = 52, 30, 8  # pixels; 24 columns and their gaps are 1432
EDGE = 16
HEAD = 76

CSS = """
:root { color-scheme: light dark;
  --page: #eef0f3; --panel: #ffffff; --ink: #1c2025; --pale: #5b6370; --grid: #e1e4e9;
  --green: #2b7a3f; --orange: #b45a00; --red: #c4162a; --blue: #3465b5; --none: #f3f4f6;
  --s0: #2563c4; --s1: #c2570c; --s2: #2b7a3f; --s3: #7c3aad; --s4: #b3246b;
  --s5: #0b7f86; --s6: #8a6d00; --s7: #5b6370; --s8: #a33b2a; --s9: #4b55c9; }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) {
  --page: #111317; --panel: #1a1d22; --ink: #e4e7eb; --pale: #9aa3ae; --grid: #2c3138;
  --green: #2f7d43; --orange: #b8610a; --red: #d0283c; --blue: #3b6dbf; --none: #22262c;
  --s0: #6ea3f7; --s1: #f2994a; --s2: #6fc281; --s3: #b98ae0; --s4: #ee6fae;
  --s5: #4cc3cb; --s6: #dcbc3c; --s7: #9aa3ae; --s8: #e88071; --s9: #959df5; } }
:root[data-theme=dark] { color-scheme: dark;
  --page: #111317; --panel: #1a1d22; --ink: #e4e7eb; --pale: #9aa3ae; --grid: #2c3138;
  --green: #2f7d43; --orange: #b8610a; --red: #d0283c; --blue: #3b6dbf; --none: #22262c;
  --s0: #6ea3f7; --s1: #f2994a; --s2: #6fc281; --s3: #b98ae0; --s4: #ee6fae;
  --s5: #4cc3cb; --s6: #dcbc3c; --s7: #9aa3ae; --s8: #e88071; --s9: #959df5; }
* { box-sizing: border-box; margin: 0; }
body { background: var(--page); color: var(--ink); padding: 16px; width: 1464px;
  font: 12px/1.35 "DejaVu Sans", Verdana, system-ui, sans-serif; }
header { height: 60px; }
h1 { font-size: 20px; font-weight: 600; }
header p { color: var(--pale); padding-top: 3px; }
main { display: grid; gap: 8px; grid-template-columns: repeat(24, 52px); grid-auto-rows: 30px; }
h2 { font-size: 14px; font-weight: 600; align-self: end; padding-bottom: 3px; }
section { background: var(--panel); border-radius: 4px; padding: 0 8px; overflow: hidden;
  position: relative; }
h3 { font-size: 12px; font-weight: 600; height: 28px; line-height: 28px; overflow: hidden;
  white-space: nowrap; text-overflow: ellipsis; cursor: help; }
.short h3 { text-align: center; font-size: 11px; }
svg { display: block; overflow: visible; }
text { fill: var(--pale); font-size: 11px; }
text.end { text-anchor: end; } text.middle { text-anchor: middle; } text.on { fill: #fff; }
.grid { stroke: var(--grid); } .curve { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.mark { stroke: var(--blue); stroke-dasharray: 3 3; } .flag { fill: var(--blue); }
.curve.promised { stroke: var(--red); stroke-width: 2; stroke-dasharray: 8 6; }
circle.promised { fill: var(--red); }
.limit-orange { stroke: var(--orange); stroke-dasharray: 8 5; }
.limit-red { stroke: var(--red); stroke-dasharray: 8 5; }
.limit-green { stroke: var(--green); stroke-dasharray: 8 5; }
.area { stroke: none; opacity: .3; }
.fill-super-light-green { fill: var(--green); opacity: .25; }
.fill-green { fill: var(--green); } .fill-orange { fill: var(--orange); }
.fill-red { fill: var(--red); } .fill-blue { fill: var(--blue); } .heat { fill: var(--s1); }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; line-height: 17px; font-size: 11px;
  color: var(--pale); }
.legend b { color: var(--ink); font-weight: 600; } .legend span { white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 3px; margin-right: 5px;
  vertical-align: middle; }
.legend i.promised { background: repeating-linear-gradient(90deg, var(--red) 0 4px,
  transparent 4px 6px); }
.stat { height: calc(100% - 36px); border-radius: 3px; display: flex; align-items: center;
  justify-content: center; font-weight: 600; white-space: nowrap; }
.ground-green { background: var(--green); color: #fff; }
.ground-orange { background: var(--orange); color: #fff; }
.ground-red { background: var(--red); color: #fff; }
.ground-blue { background: var(--blue); color: #fff; }
.ground-none { background: var(--none); }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--pale); font-size: 11px; height: 22px;
  border-bottom: 1px solid var(--grid); white-space: nowrap; padding: 0 6px; }
td { height: 27px; padding: 0 6px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
.failed { color: var(--red); font-weight: 600; font-size: 14px; text-align: center;
  padding-top: 14px; }
.nothing { color: var(--pale); text-align: center; padding-top: 14px; font-size: 12px; }
.lacks { color: var(--red); }
""" + "".join(
    f".curve.series-{n} {{ stroke: var(--s{n}); }} .area.series-{n}, circle.series-{n} "
    f"{{ fill: var(--s{n}); }} i.series-{n} {{ background: var(--s{n}); }}\n"
    for n in range(10)
)


def size(dashboard: Json) -> tuple[int, int]:
    """Return the page's width and height in pixels."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    return 24 * COLUMN + 23 * GAP + 2 * EDGE, HEAD + rows * (ROW + GAP) - GAP + EDGE


def page(
    dashboard: Json,
    values: Mapping[str, str],
    answers: Mapping[int, Sequence[Answer]],
    span: Span,
    marks: Marks,
    *,
    theme: str = "auto",
) -> str:
    """Return the page of a dashboard whose queries were answered, by the panels' ids."""
    panels = "\n".join(
        _panel(panel, answers.get(panel["id"], ()), span, marks) for panel in dashboard["panels"]
    )
    chosen = ", ".join(
        f"{variable['label']}: {value if (value := values[variable['name']]) != '.*' else 'all'}"
        for variable in dashboard["templating"]["list"]
        if variable["name"] in values
    )
    start, end = (
        datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")
        for time in (span.start, span.end)
    )
    return (
        f'<!doctype html><html lang="en" data-theme="{theme}"><head><meta charset="utf-8">'
        f"<title>{escape(dashboard['title'])}</title><style>{CSS}</style></head><body>"
        f"<header><h1>{escape(dashboard['title'])}</h1>"
        f"<p>{escape(dashboard['description'])} &nbsp; {escape(chosen)} &nbsp; {start} to {end} "
        f"UTC</p></header>\n<main>\n{panels}\n</main></body></html>\n"
    )


def _panel(panel: Json, answers: Sequence[Answer], span: Span, marks: Marks) -> str:
    at = panel["gridPos"]
    place = f"grid-column:{at['x'] + 1}/span {at['w']};grid-row:{at['y'] + 1}/span {at['h']}"
    if panel["type"] == "row":
        return f'<h2 style="{place}">{escape(panel["title"])}</h2>'
    width = at["w"] * (COLUMN + GAP) - GAP
    height = at["h"] * (ROW + GAP) - GAP - TITLE
    inside = drawn(panel, answers, Frame(width, height, span, marks))
    kind = ' class="short"' if panel["type"] == "stat" else ""
    return (
        f'<section{kind} style="{place}"><h3 title="{escape(panel["description"])}">'
        f"{escape(panel['title'])}</h3>{inside}</section>"
    )
