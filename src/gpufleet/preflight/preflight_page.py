"""A preflight as one file for a browser or a printer, for a change request.  Pure.

Nothing is loaded from elsewhere and nothing runs: the page forbids itself both by its policy. The
same preflight gives the same bytes. What nodes, settings and operators wrote is text, never markup.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from gpufleet.preflight.line import CHECKS, Line, Preflight, Status
from gpufleet.sanitize import html_page, html_text

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1b1f; --pale: #5f6368;
  --line: #dadce0; --ok: #2e7d32; --warn: #b45309; --unknown: #8e44ad; --fail: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #17181c; --ink: #e6e6ea; --pale: #a0a4ab;
  --line: #3a3c42; --ok: #6fcf7c; --warn: #ffa657; --unknown: #c792ea; --fail: #ff7b72; } }
@media print { :root { --ground: #ffffff; --ink: #000000; --pale: #444444; --line: #999999;
  --ok: #000000; --warn: #000000; --unknown: #000000; --fail: #000000; }
  body { margin: 0; max-width: none; font-size: 10pt; } tr { break-inside: avoid; }
  thead { display: table-header-group; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p { margin: .3rem 0; } .pale { color: var(--pale); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left;
  vertical-align: top; } td { overflow-wrap: anywhere; }
td:first-child { font-weight: bold; white-space: nowrap; }
.OK { color: var(--ok); } .WARN { color: var(--warn); } .UNKNOWN { color: var(--unknown); }
.FAIL { color: var(--fail); }
"""
_ANSWERS = {
    0: "Nothing fails, and nothing is unknown.",
    1: "Something fails: users would notice.",
    2: "Nothing fails that is known; something is not known.",
}


def preflight_page(found: Preflight) -> str:
    """Return the page's text."""
    title = f"Preflight of {found.inventory}"
    when = found.when.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    counts = ", ".join(f"{found.counts[each]} {each}" for each in reversed(Status))
    amiss = [line for line in found.lines if line.status is not Status.OK]
    worst = sorted(amiss, key=lambda line: -line.status.badness)
    body = [
        f"<h1>{html_text(title)}</h1>",
        f'<p class="pale">{html_text(f"{when}, by gpufleet {found.version}")}</p>',
        f"<p><strong>{html_text(_ANSWERS[found.exit_status])}</strong> {html_text(counts)}</p>",
        *(["<h2>What is to be done</h2>", _table(worst)] if worst else []),
        "<h2>All lines</h2>",
        *_all(found),
        "<h2>Signed</h2>",
        "<p>Date, name: ______________________________</p>",
    ]
    return html_page(title, _STYLE, body)


def _all(found: Preflight) -> Iterator[str]:
    for check, question in CHECKS.items():
        yield f"<h3>{html_text(question[:1].upper() + question[1:])}</h3>"
        yield _table([line for line in found.lines if line.check == check])


def _table(lines: list[Line]) -> str:
    rows = "".join(
        f'<tr><td class="{line.status}">{line.status}</td>'
        + "".join(
            f"<td>{html_text(each)}</td>"
            for each in (line.subject, line.verdict.what, line.verdict.proof, line.verdict.remedy)
        )
        + "</tr>"
        for line in lines
    )
    heads = "".join(f"<th>{each}</th>" for each in ("", "about", "found", "proof", "what to do"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
