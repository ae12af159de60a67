"""Write a fleet's state as one HTML file, for people without access. Pure.

The page loads no files and runs no code, because its Content-Security-Policy forbids both. The same
document always gives the same bytes. Text from nodes, settings and operators is escaped.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpufleet.formatting import count_of, join_names, node_ranges
from gpufleet.report.fleet_document import Document, Node, Version
from gpufleet.report.node_parts import gpu_names
from gpufleet.report.node_picture import STYLE, node_picture, uses
from gpufleet.sanitize import PAGE_STYLE, html_page, html_text

_STYLE = f"""{PAGE_STYLE}{STYLE}
tbody th {{ min-width: 6em; overflow-wrap: anywhere; }}
thead th {{ overflow-wrap: normal; }} td strong {{ display: inline-block; min-width: 5.5em; }}
h3 {{ font-size: 1rem; margin: .8rem 0 .2rem; }}
ul {{ padding-left: 1.2rem; margin: .3rem 0; }} li, td {{ white-space: pre-line; }}
nav ul {{ list-style: none; padding: 0; }} nav li {{ display: inline-block; margin-right: 1rem; }}
.nodes {{ display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }}
.nodes article {{ border: 1px solid var(--line); border-radius: 6px; padding: 0 .6rem .6rem;
  break-inside: avoid; }}
@media print {{ nav {{ display: none; }} .nodes {{ display: block; }} }}
"""
_SEVERITIES = {"outage": "FAIL", "degraded": "FAIL", "risk": "WARN", "notice": ""}
_UNKNOWN = '<strong class="UNKNOWN">UNKNOWN</strong>'


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and the class of the status if the cell is a status."""

    text: str
    kind: str = ""


def fleet_page(found: Document) -> str:
    """Return a report's document as an HTML page."""
    sections = {
        "summary": ("Summary", _summary(found)),
        "nodes": ("Nodes", _nodes(found)),
        "plan": ("Plan", _plan(found)),
        "capacity": ("Capacity", _capacity(found)),
        "versions": ("Versions", _versions(found)),
        "findings": ("Findings", _findings(found)),
        "drift": ("Drift", _drift(found)),
        "upgrades": ("Last upgrades", _upgrades(found)),
        "certificates": ("Certificates", _certificates(found)),
        "unknown": ("What is not known", _unknown(found)),
    }
    links = "".join(f'<li><a href="#{key}">{head}</a></li>' for key, (head, _) in sections.items())
    title = f"Fleet {found.inventory}"
    body = [
        f"<header><h1>{html_text(title)}</h1>",
        f'<p class="pale">{html_text(_moment(found.when))}, by gpufleet '
        f"{html_text(found.version)}</p>",
        f"<p>{_settings(found)}</p></header>",
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
        "<main>",
        *(
            f'<section aria-labelledby="{key}"><h2 id="{key}">{head}</h2>\n'
            + "\n".join(parts)
            + "</section>"
            for key, (head, parts) in sections.items()
        ),
        "</main>",
        '<footer><p class="pale">Written by <code>gpufleet report</code>, without secrets.'
        "</p></footer>",
    ]
    return html_page(title, _STYLE, body)


# -- words


def _text(words: str) -> str:
    return f"<p>{html_text(words)}</p>"


def _not_known(words: str) -> str:
    return f"<p>{_UNKNOWN}: {html_text(words)}</p>"


def _list(items: Iterable[str]) -> str:
    found = "".join(f"<li>{html_text(each)}</li>" for each in items)
    return f"<ul>{found}</ul>" if found else ""


def _table(heads: Iterable[str], rows: Iterable[Iterable[str | Cell]]) -> str:
    """Return a table. The first cell of each row is the header of the row."""
    names = tuple(heads)
    columns = "".join(f'<th scope="col">{html_text(each)}</th>' for each in names)
    lines = []
    for row in rows:
        cells = [each if isinstance(each, Cell) else Cell(each) for each in row]
        line = f'<th scope="row">{_inner(cells[0])}</th>' + "".join(
            f'<td data-label="{html_text(name)}">{_inner(cell)}</td>'
            for name, cell in zip(names[1:], cells[1:], strict=True)
        )
        lines.append(f"<tr>{line}</tr>")
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _inner(cell: Cell) -> str:
    text = html_text(cell.text)
    return f'<strong class="{cell.kind}">{text}</strong>' if cell.kind else text


def _moment(when: dt.datetime) -> str:
    return when.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _settings(found: Document) -> str:
    at = found.checkout
    if not at.commit:
        return html_text(f"The settings are not in git ({at.problem or 'there is no commit'}).")
    changed = (
        f"{count_of(len(at.changed), 'file')} not committed: {join_names(at.changed)}"
        if at.changed
        else "nothing uncommitted"
    )
    if at.problem:
        changed = f"uncommitted changes are unknown: {at.problem}"
    return f"Settings: commit <code>{html_text(at.commit)}</code>" + html_text(
        f"{f' of {at.date}' if at.date else ''}, {changed}."
    )


# -- sections


def _summary(found: Document) -> Iterator[str]:
    silent = [each.name for each in found.nodes if each.silent]
    unasked = f", of which unknown: {node_ranges(silent)}" if silent else ""
    gpus = [gpu for node in found.nodes for gpu in node.gpus]
    ready = sum(each.serves for each in found.replicas)
    counts: Counter[str] = Counter(each.severity for each in found.findings)
    severities = ", ".join(f"{counts[each]} {each}" for each in _SEVERITIES)
    hidden = " on the nodes that answered" if silent else ""
    yield _table(
        ("what", "found"),
        [
            ("nodes", f"{len(found.nodes)}{unasked}"),
            ("GPUs", (gpu_names(gpus) if gpus else "none") + hidden),
            ("models", _models(found)),
            ("replicas ready", f"{ready} of {len(found.replicas)} found{hidden}"),
            ("findings", severities),
            ("unknown", count_of(len(found.unknown), "part")),
        ],
    )
    yield _list(found.missing)
    bad = [each for each in found.replicas if not each.serves]
    if bad:
        yield "<h3>Replicas that are not ready</h3>"
        yield _table(
            ("replica", "state", "nodes", "why"),
            [
                (
                    each.name,
                    Cell(each.state, "UNKNOWN" if each.state == "unknown" else "FAIL"),
                    node_ranges(each.nodes),
                    "\n".join(each.why),
                )
                for each in bad
            ],
        )


def _models(found: Document) -> str:
    names = sorted({each.name for each in found.models})
    return f"{len(names)}: {', '.join(names)}" if names else "none"


def _nodes(found: Document) -> Iterator[str]:
    yield '<div class="nodes">'
    for each in found.nodes:
        yield f"<article><h3>{html_text(each.name)}</h3>"
        yield from _node(each)
        yield "</article>"
    yield "</div>"


def _node(node: Node) -> Iterator[str]:
    groups = f"groups: {', '.join(node.groups)}" if node.groups else "in no group"
    yield f'<p class="pale">{html_text(groups)}</p>'
    if node.silent:
        yield _not_known(f"silent: {node.silent}")
        return
    if not node.gpu_node:
        yield _text("the node has no GPUs, so gpufleet does not probe it")
        return
    yield _text(f"{gpu_names(node.gpus)}; {node.system}")
    if node.gpus:
        yield node_picture(node)
    yield _list([*uses(node), *node.notes])


def _plan(found: Document) -> Iterator[str]:
    plan = found.plan
    if plan.unknown:
        yield _not_known("the nodes on which replicas would run now: " + "; ".join(plan.unknown))
        return
    if plan.refused:
        yield '<p><strong class="FAIL">NO PLAN</strong>: gpufleet would refuse a deploy.</p>'
        yield _list(plan.refused)
        return
    yield _text(plan.totals)
    yield _table(
        ("model", "nodes", "replicas", "GPUs", "TP", "PP", "DP", "ports"),
        [
            (
                each.model,
                each.nodes,
                each.replicas,
                each.gpus,
                str(each.tensor_parallel),
                str(each.pipeline_parallel),
                str(each.data_parallel),
                each.ports or "none",
            )
            for each in plan.rows
        ],
    )
    yield '<p class="pale">TP, PP, DP: tensor, pipeline and data parallel size.</p>'
    if plan.changes:
        yield "<h3>Changes that a deploy would make</h3>"
        yield _list(plan.changes)
    if plan.reasons:
        yield "<h3>Reasons</h3>"
        yield _list(plan.reasons)
    if plan.candidates:
        yield "<h3>Considered choices</h3>"
        yield _table(
            ("model", "nodes", "division", "choice", "fits", "why"),
            [
                (
                    each.model,
                    each.nodes,
                    each.division,
                    Cell("chosen", "OK") if each.chosen else "not chosen",
                    each.verdict,
                    each.reason,
                )
                for each in plan.candidates
            ],
        )


def _capacity(found: Document) -> Iterator[str]:
    if not found.capacity:
        yield _text("no model is declared")
        return
    rows: list[tuple[str | Cell, ...]] = []
    for each in found.capacity:
        if each.source == "measured" and each.measured and each.requests_per_second is not None:
            days = max(0, (found.when - each.measured).days)
            what = f"{each.requests_per_second:.3g} requests/s each"
            age = f"{each.measured:%Y-%m-%d}, {count_of(days, 'day')} old"
            source: str | Cell = f"measured on {age}"
        elif each.source == "estimate":
            tokens = f"{each.kv_tokens:,} KV-cache tokens" if each.kv_tokens is not None else ""
            most = f"{each.concurrency:.3g} requests of full length at once"
            what = ", ".join(e for e in (tokens, most if each.concurrency is not None else "") if e)
            source = "estimate from its memory"
        else:
            what, source = "not known", Cell("UNKNOWN", "UNKNOWN")
        rows.append((each.model, each.replicas or "all", what, source, each.why))
    yield _table(("model", "replicas", "capacity", "source", "reason"), rows)
    yield (
        '<p class="pale">A measured capacity comes from <code>gpufleet measure</code>, and is the '
        "load at which the model still meets its objectives. An estimate shows what fits into "
        "memory, and does not show the speed.</p>"
    )


def _versions(found: Document) -> Iterator[str]:
    alike: dict[Version, list[str]] = {}
    for node in found.nodes:
        for each in node.versions:
            alike.setdefault(each, []).append(node.name)
    order = {part: place for place, part in enumerate(dict.fromkeys(v.part for v in alike))}
    rows = [
        (
            each.part,
            Cell("not known", "UNKNOWN") if each.found is None else each.found or "not there",
            each.declared or "no lock",
            _agreement(each),
            node_ranges(names),
        )
        for each, names in sorted(alike.items(), key=lambda one: (order[one[0].part], min(one[1])))
    ]
    if rows:
        yield _table(("part", "found", "lock or settings", "agrees", "nodes"), rows)
    if silent := [each.name for each in found.nodes if each.silent]:
        yield _not_known(f"versions of {node_ranges(silent)}")
    if found.models:
        yield "<h3>Models</h3>"
        yield _table(
            (
                "model",
                "source",
                "revision",
                "adapters",
                "vLLM",
                "replicas",
                "files with a hash",
                "nodes",
            ),
            [
                (
                    each.name,
                    each.source,
                    each.revision or "none",
                    "\n".join(each.adapters) or "none",
                    each.release or "not known",
                    each.declared,
                    str(len(each.files)),
                    node_ranges(each.nodes),
                )
                for each in found.models
            ],
        )


def _agreement(version: Version) -> str | Cell:
    if version.agrees is None:
        return Cell("UNKNOWN", "UNKNOWN") if version.declared else "no lock"
    return Cell("as declared", "OK") if version.agrees else Cell("differs", "FAIL")


def _findings(found: Document) -> Iterator[str]:
    if not found.findings:
        yield _text("nothing was found")
        return
    yield _table(
        ("severity", "what", "evidence", "cause", "what to do"),
        [
            (
                Cell(each.severity, _SEVERITIES[each.severity]),
                each.what,
                "\n".join(each.evidence) or "none",
                each.cause or "not known",
                "\n".join(filter(None, (each.do, each.page))) or "nothing",
            )
            for each in found.findings
        ],
    )


def _drift(found: Document) -> Iterator[str]:
    drift = found.drift
    if not drift.whole:
        yield _text(
            "gpufleet compared drivers, locks, and changes at the next boot. It did not compare "
            "changes that deploys would make: gpufleet report --drift also compares these."
        )
    yield _list(f"gpufleet would refuse a deploy: {each}" for each in drift.refused)
    states: dict[str, list[str]] = {}
    for node in drift.nodes:
        states.setdefault(node.state, []).append(node.node)
    yield _list(f"{state}: {node_ranges(names)}" for state, names in sorted(states.items()))
    rows: list[tuple[str | Cell, ...]] = []
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for node in drift.nodes:
        for each in node.moved:
            key = (each.matters, each.what, each.source, each.remedy)
            alike.setdefault(key, []).append(node.node)
        for why in node.unread:
            alike.setdefault(("", why, "", ""), []).append(node.node)
    for (matters, *others), names in alike.items():
        when: str | Cell = matters or Cell("UNKNOWN", "UNKNOWN")
        rows.append((node_ranges(names), when, *(each or "none" for each in others)))
    if rows:
        yield _table(("nodes", "matters", "what", "says", "remedy"), rows)


def _upgrades(found: Document) -> Iterator[str]:
    if not found.upgrades:
        yield _text("this machine has no record of an upgrade of this inventory")
        return
    yield _table(
        ("upgrade", "began", "ended", "by", "what", "outcome"),
        [
            (
                f"{each.kind} {each.id}",
                _moment(each.started),
                _moment(each.ended),
                each.by,
                each.what,
                "\n".join((each.outcome, *each.why)),
            )
            for each in found.upgrades
        ],
    )


def _certificates(found: Document) -> Iterator[str]:
    if not found.certificates:
        yield _text("gpufleet deploys no certificate to this inventory")
        return
    yield _table(
        ("server", "status", "ends", "found", "proof"),
        [
            (
                each.server,
                Cell(each.status, each.status),
                each.ends.isoformat() if each.ends else "not known",
                each.what,
                each.proof,
            )
            for each in found.certificates
        ],
    )


def _unknown(found: Document) -> Iterator[str]:
    if found.unknown:
        yield f"<p>{_UNKNOWN}: these parts could not be read.</p>"
        yield _list(found.unknown)
    else:
        yield _text("gpufleet could read all parts.")
