"""Render the report of an upgrade as a `rich` renderable, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gpufleet.formatting import count_of, format_duration, node_ranges
from gpufleet.sanitize import printable
from gpufleet.upgrade.report.report import (
    GroupReport,
    ReplicaReport,
    Report,
    Served,
    WaveReport,
    iso,
)

OUTCOMES = {
    "finished": "everything is as declared",
    "stopped": "stopped before its end",
    "paused": "waits for an operator",
    "running": "has not finished",
}
STYLES = {
    "finished": "green",
    "stopped": "bold red",
    "paused": "yellow",
    "running": "yellow",
    "done": "green",
    "returned": "yellow",
    "stuck": "bold red",
}
OF_GROUPS = {
    "done": "changed",
    "returned": "rolled back",
    "stuck": "stuck",
    "waiting": "untouched",
}
"""Outcomes of a group, in words for operators; other outcomes are phases."""


def report_text(found: Report) -> RenderableType:
    """Return the report: the change, a line per group, gates and failures, and the cost."""
    head = Text(printable(f"{found.kind} {found.id}: {found.what}, by {found.by}"), style="bold")
    outcome = Text(
        printable(f"{OUTCOMES[found.outcome]}: {'; '.join(found.why)}")
        if found.why
        else OUTCOMES[found.outcome],
        style=STYLES[found.outcome],
    )
    lines = [Text(printable(each)) for each in _lines(found)]
    parts: list[RenderableType] = [head, outcome, Text()]
    if found.groups:
        parts += [_groups(found), Text(), _replicas(found), Text()]
    return Lines(*parts, *lines, *([Text()] if lines else []), *map(Text, totals(found)))


def totals(found: Report) -> list[str]:
    """Return the closing sentences of a report: times, and unfinished requests."""
    said = [
        f"{iso(found.started)} to {iso(found.ended)}: "
        f"{format_duration(found.ended - found.started)} in total, of which the waves took "
        f"{format_duration(found.waves_seconds)}. All model loads together took "
        f"{format_duration(found.load_seconds)}"
    ]
    count = sum(each.outcome == "done" for each in found.groups)
    said.append(f"{count} of {count_of(len(found.groups), 'group')} changed")
    cut = [unit for group in found.groups for node in group.nodes for unit in node.cut]
    lost = f"{count_of(found.left, 'request')} had not finished when their drain ended"
    said.append(
        f"{lost}. {count_of(len(cut), 'unit')} killed with running requests" if cut else lost
    )
    return said


def _groups(found: Report) -> Table:
    table = _table("wave", "group", "nodes", "", "away", "drain", "load", "judged", "own", "left")
    for wave in found.waves:
        for number, group in enumerate(wave.groups):
            away = bool(group.spans)
            table.add_row(
                Text(_wave(wave) if number == 0 else ""),
                Text(printable(group.group.id)),
                Text(printable(node_ranges(group.group.nodes))),
                Text(outcome_of(group), style=STYLES.get(group.outcome, "yellow")),
                *(
                    Text(seconds(each) if away else "")
                    for each in (
                        group.away_seconds,
                        group.drain_seconds,
                        group.load_seconds,
                        group.judge_seconds,
                        group.own_seconds,
                    )
                ),
                Text(str(group.left) if away else ""),
            )
    return table


def _replicas(found: Report) -> Table:
    table = _table("replica", "requests", "errors", "TTFT p99", "ITL p99", "load")
    for group in found.groups:
        for each in group.replicas:
            table.add_row(*(Text(printable(cell)) for cell in cells(each)))
    return table


def cells(each: ReplicaReport) -> list[str]:
    """Return the cells of a replica's row: its values before and after the change."""
    return [
        each.replica,
        _both(each, lambda served: f"{served.requests:g}"),
        _both(each, lambda served: f"{served.errors:g}"),
        _both(each, lambda served: latency(served.ttft_p99)),
        _both(each, lambda served: latency(served.itl_p99)),
        "" if each.load_seconds is None else seconds(each.load_seconds),
    ]


def _both(each: ReplicaReport, of: Callable[[Served], str]) -> str:
    before, after = (of(served) if served else "-" for served in (each.before, each.after))
    return f"{before} -> {after}"


def outcome_of(group: GroupReport) -> str:
    """Return a group's outcome in words."""
    return OF_GROUPS.get(group.outcome) or f"in progress ({group.outcome})"


def _wave(wave: WaveReport) -> str:
    return f"{wave.wave.number} canary" if wave.wave.canary else str(wave.wave.number)


def _lines(found: Report) -> Iterator[str]:
    """Yield the failed gates, the failures and the notes."""
    for group in found.groups:
        for judged in group.judged:
            verdict = {True: "passed", False: "did not pass", None: "has an unknown result"}
            for reason in judged.reasons:
                yield f"{group.group.id}: {judged.gate} {verdict[judged.passed]}: {reason}"
        said = {reason for judged in group.judged for reason in judged.reasons}
        yield from (
            f"{group.group.id}: failed: {each}"
            for each in group.failures
            if not any(each.endswith(reason) for reason in said)
        )
        yield from (f"{group.group.id}: {each}" for each in group.notes)
    yield from (f"note: {each}" for each in found.notes)
    yield from (f"declared: {each}" for each in found.declared)
    yield from (f"resumed at {iso(each)}" for each in found.resumed)


def seconds(value: float) -> str:
    """
    Format a duration, with tenths below a minute.

    >>> seconds(0.84), seconds(41.26), seconds(754)
    ('0.8 s', '41.3 s', '12 min 34 s')
    """
    return f"{value:.1f} s" if value < 60 else format_duration(value)


def latency(value: float | None) -> str:
    """
    Format a latency; "-": unknown.

    >>> latency(0.0312), latency(2.5), latency(None)
    ('31.2 ms', '2.5 s', '-')
    """
    if value is None:
        return "-"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
