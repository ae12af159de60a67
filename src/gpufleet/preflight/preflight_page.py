"""
Render a preflight as one HTML file, for example for a change request. Pure.

The page loads no other files and runs no scripts: its Content-Security-Policy forbids both. The
same preflight always gives the same bytes. Text from nodes, settings and operators is escaped.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from gpufleet.preflight.line import CHECKS, Line, Preflight, Status
from gpufleet.sanitize import PAGE_STYLE, html_page, html_text

_STYLE = f"{PAGE_STYLE}td:first-child {{ font-weight: bold; white-space: nowrap; }}\n"
_ANSWERS = {
    0: "No line is FAIL or UNKNOWN.",
    1: "At least one line is FAIL: users would notice, or the fleet differs from its settings.",
    2: "No line is FAIL, but at least one is UNKNOWN.",
}


def preflight_page(found: Preflight) -> str:
    """Return the preflight as an HTML page."""
    title = f"Preflight of {found.inventory}"
    when = found.when.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    counts = ", ".join(f"{found.counts[each]} {each}" for each in reversed(Status))
    amiss = [line for line in found.lines if line.status is not Status.OK]
    worst = sorted(amiss, key=lambda line: -line.status.badness)
    body = [
        f"<h1>{html_text(title)}</h1>",
        f'<p class="pale">{html_text(f"{when}, by gpufleet {found.version}")}</p>',
        f"<p><strong>{html_text(_ANSWERS[found.exit_status])}</strong> {html_text(counts)}</p>",
        *(["<h2>What you have to do</h2>", _table(worst)] if worst else []),
        "<h2>All lines</h2>",
        *_all(found),
        "<h2>Signed</h2>",
        "<p>Date, name: ______________________________</p>",
    ]
    return html_page(title, _STYLE, ["<main>", *body, "</main>"])


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
    columns = ("status", "about", "found", "proof", "what to do")
    heads = "".join(f"<th>{each}</th>" for each in columns)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
