"""Render the report of an upgrade as one HTML file: a timeline, tables, failures.

The page loads and runs nothing (no scripts, fonts or images), because its Content-Security-Policy
forbids this.
Colours follow the reader's light or dark mode. Text from nodes and operators is escaped.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from xml.etree import ElementTree as ET

from gpufleet.formatting import node_ranges
from gpufleet.sanitize import html_page, html_text, xml_text
from gpufleet.upgrade.report.report import PHASES, GroupReport, NodeReport, Report, Span
from gpufleet.upgrade.report.text import OUTCOMES, cells, outcome_of, seconds, totals

# Pixels.
_LABEL, _CHART, _ROW, _BAR, _TOP = 210, 960, 24, 14, 30
_TICKS = 8
# Seconds between two ticks: the first value with at most `_TICKS` ticks is used.
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

_CLASSES = {
    "draining": "drain",
    "drained": "own",
    "changing": "change",
    "changed": "own",
    "switching": "own",
    "switched": "load",
    "ready": "judge",
    "undraining": "own",
    "undrained": "soak",
    "soaked": "soak",
    "failed": "bad",
    "restoring": "back",
    "restored": "back",
    "stuck": "bad",
    "stopping": "drain",
    "down": "own",
}
_LEGEND = (
    ("drain", "drains: gets no new requests, and running requests finish"),
    ("own", "switches: gpufleet changes marks, units and gateways"),
    ("load", "loads its model"),
    ("judge", "answers golden prompts"),
    ("soak", "serves, and gpufleet watches it"),
    ("change", "the layers below vLLM are changed"),
    ("back", "is rolled back"),
    ("bad", "failed, or stuck"),
)
_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1b1f; --pale: #5f6368;
  --line: #dadce0; --drain: #e0a100; --own: #6b7280; --load: #3367d6; --judge: #8e44ad;
  --soak: #2e7d32; --change: #00838f; --back: #d2691e; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #17181c; --ink: #e6e6ea; --pale: #a0a4ab;
  --line: #3a3c42; --drain: #f2c14e; --own: #9aa0aa; --load: #7ba6ff; --judge: #c792ea;
  --soak: #6fcf7c; --change: #4dd0e1; --back: #ffa657; --bad: #ff7b72; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p { margin: .3rem 0; } .pale { color: var(--pale); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left;
  vertical-align: top; } td { overflow-wrap: anywhere; white-space: pre-line; }
.wide { overflow-x: auto; } svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; }
svg .pale { fill: var(--pale); } svg line { stroke: var(--line); }
.drain { fill: var(--drain); } .own { fill: var(--own); } .load { fill: var(--load); }
.judge { fill: var(--judge); } .soak { fill: var(--soak); } .change { fill: var(--change); }
.back { fill: var(--back); } .bad { fill: var(--bad); }
.outcome-finished, .outcome-done { color: var(--soak); } .outcome-returned, .outcome-paused,
.outcome-running { color: var(--back); } .outcome-stopped, .outcome-stuck { color: var(--bad); }
ul { padding-left: 1.2rem; } li { white-space: pre-line; overflow-wrap: anywhere; }
.key { display: inline-block; margin-right: 1.2rem; white-space: nowrap; }
.key svg { display: inline-block; vertical-align: -2px; margin-right: .35rem; }
"""

_COLUMNS = (
    "away: the time in which the gateways sent no requests. It is the sum of drain, load, judged "
    "(golden prompts) and own (all other steps). left: the number of requests that had not "
    "finished when the drain ended."
)
_WINDOWS = "Each cell has the value before the upgrade and the value under load after the change."


def report_html(found: Report) -> str:
    """Return a report as an HTML page."""
    title = f"{found.kind} {found.id}"
    said = OUTCOMES[found.outcome] + (f": {'; '.join(found.why)}" if found.why else "")
    body = [
        f"<h1>{html_text(title)}: {html_text(found.what)}</h1>",
        f'<p class="pale">by {html_text(found.by)}, of {html_text(found.inventory)}</p>',
        f'<p class="outcome-{found.outcome}"><strong>{html_text(said)}</strong></p>',
        *(f"<p>{html_text(each)}</p>" for each in totals(found)),
    ]
    if any(group.spans for group in found.groups):
        body += ["<h2>Timeline</h2>", _legend(found), _timeline(found)]
    if found.groups:
        body += ["<h2>Groups</h2>", _groups(found), f'<p class="pale">{_COLUMNS}</p>']
        body += ["<h2>Requests and times</h2>", _replicas(found), f'<p class="pale">{_WINDOWS}</p>']
    for heading, lines in (
        ("Gates", list(_judged(found))),
        ("Failures", [f"{g.group.id}: {each}" for g in found.groups for each in g.failures]),
        ("Reasons for the changes", list(_whys(found))),
        ("Notes", [*(f"{g.group.id}: {n}" for g in found.groups for n in g.notes), *found.notes]),
        ("Variables that were rewritten", list(found.declared)),
    ):
        if lines:
            items = "".join(f"<li>{html_text(each)}</li>" for each in lines)
            body.append(f"<h2>{heading}</h2><ul>{items}</ul>")
    return html_page(title, _STYLE, ["<main>", *body, "</main>"])


# -- tables


def _groups(found: Report) -> str:
    head = ("wave", "group", "nodes", "outcome", "away", "drain", "load", "judged", "own", "left")
    rows = [
        (
            f"{group.wave}{' canary' if wave.wave.canary else ''}",
            group.group.id,
            node_ranges(group.group.nodes),
            outcome_of(group),
            *(
                seconds(each) if group.spans else ""
                for each in (
                    group.away_seconds,
                    group.drain_seconds,
                    group.load_seconds,
                    group.judge_seconds,
                    group.own_seconds,
                )
            ),
            str(group.left) if group.spans else "",
        )
        for wave in found.waves
        for group in wave.groups
    ]
    return _table(head, rows)


def _replicas(found: Report) -> str:
    head = ("replica", "requests", "errors", "TTFT p99", "time between tokens p99", "load")
    rows = [cells(each) for group in found.groups for each in group.replicas]
    return _table(head, rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = "".join(f"<th>{html_text(each)}</th>" for each in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html_text(each)}</td>" for each in row) + "</tr>" for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><tr>{heads}</tr>{lines}</table></div>'


def _judged(found: Report) -> Iterator[str]:
    words = {True: "passed", False: "did not pass", None: "has an unknown result"}
    for group in found.groups:
        for each in group.judged:
            why = f": {'; '.join(each.reasons)}" if each.reasons else ""
            yield f"{group.group.id}, {_clock(each.at)}: {each.gate} {words[each.passed]}{why}"


def _whys(found: Report) -> Iterator[str]:
    by_why: dict[tuple[str, ...], list[str]] = {}
    for group in found.groups:
        by_why.setdefault(group.group.why, []).append(group.group.id)
    for why, groups in by_why.items():
        if why:
            yield f"{', '.join(groups)}: {'; '.join(why)}"


# -- the timeline


def _timeline(found: Report) -> str:
    """Return the timeline as SVG: a row for each group, and below it the rows of its nodes."""
    rows: list[tuple[str, str, Sequence[Span]]] = []
    for group in found.groups:
        rows.append((group.group.id, "", group.spans))
        rows += [(each.node, "pale", each.spans) for each in group.nodes if _has_rows(group, each)]
    spans = [span for _, _, each in rows for span in each]
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    long = max(end - start, 1.0)
    height = _TOP + _ROW * len(rows) + 10
    page = ET.Element(
        "svg",
        viewBox=f"0 0 {_LABEL + _CHART + 20} {height}",
        width=str(_LABEL + _CHART + 20),
        height=str(height),
        role="img",
    )
    ET.SubElement(page, "title").text = "the steps of each group over time"
    for at in _ticks(long):
        x = _LABEL + at / long * _CHART
        _shape(page, "line", x1=x, y1=_TOP - 6, x2=x, y2=height - 8)
        _words(page, (x + 3, 14), _clock(start + at), "pale")
    for number, (name, kind, each) in enumerate(rows):
        y = _TOP + number * _ROW
        _words(page, (8 if not kind else 24, y + _BAR - 2), name, kind)
        for span in each:
            x = _LABEL + (span.start - start) / long * _CHART
            width = max(span.seconds / long * _CHART, 1.5)
            phase = PHASES.get(span.phase, span.phase)
            bar = _shape(
                page,
                "rect",
                x=x,
                y=y + (4 if kind else 0),
                width=width,
                height=_BAR - (6 if kind else 0),
                rx=2,
            )
            bar.set("class", _CLASSES[span.phase])
            said = f"{name} {phase}: {_clock(span.start)}, {seconds(span.seconds)}"
            ET.SubElement(bar, "title").text = xml_text(said)
    return ET.tostring(page, encoding="unicode")


def _has_rows(group: GroupReport, node: NodeReport) -> bool:
    # The only node of a group needs no row if it reported nothing beyond the group's row.
    return bool(node.spans) or len(group.nodes) > 1


def _ticks(long: float) -> Iterator[float]:
    step = next((each for each in _STEPS if long / each <= _TICKS), _STEPS[-1])
    return (float(at) for at in range(0, int(long) + 1, step))


def _legend(found: Report) -> str:
    """Return the legend of the colours that occur."""
    there = {_CLASSES[span.phase] for group in found.groups for span in group.spans}
    keys = (
        f'<span class="key"><svg width="12" height="12"><rect width="12" height="12" rx="2" '
        f'class="{name}"/></svg>{words}</span>'
        for name, words in _LEGEND
        if name in there
    )
    return f"<p>{''.join(keys)}</p>"


def _shape(page: ET.Element, kind: str, **numbers: float) -> ET.Element:
    return ET.SubElement(page, kind, {key: f"{value:.5g}" for key, value in numbers.items()})


def _words(page: ET.Element, start: tuple[float, float], words: str, kind: str) -> None:
    shape = _shape(page, "text", x=start[0], y=start[1])
    if kind:
        shape.set("class", kind)
    shape.text = xml_text(words)


def _clock(at: float) -> str:
    return dt.datetime.fromtimestamp(at, dt.UTC).strftime("%H:%M:%S")
