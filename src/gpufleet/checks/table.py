"""
Format the report of the checks as a table: first the findings, the worst first, then the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpufleet.checks.finding import Finding, GpuId, Report, Severity, worst_first
from gpufleet.console import add_row, new_table
from gpufleet.formatting import count_of, node_ranges, ranges
from gpufleet.node.topology import value_or

_STYLES = {
    Severity.BLOCK: "bold red",
    Severity.UNKNOWN: "bold magenta",
    Severity.WARN: "yellow",
    Severity.INFO: "cyan",
    Severity.OK: "green",
}
_VERDICTS = {Severity.BLOCK: "blocked", Severity.UNKNOWN: "unknown"}


def report_table(found: Report, *, everything: bool = False) -> RenderableType:
    """
    Return a table of the findings, the worst first, and then of the nodes by their verdict.

    GPUs or nodes with the same finding share a line. Without `everything`, passed checks are not
    shown, and each remark (`info`) has one line without its remedies.
    """
    shown = [
        finding
        for finding in worst_first(found.findings)
        if everything or finding.severity > Severity.OK
    ]
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in shown:
        alike.setdefault(_likeness(finding), []).append(finding)
    table = new_table("", "where", "check", "found")
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    for group in alike.values():
        _finding_row(table, group, everything=everything)
    parts: list[RenderableType] = [table, Text()] if shown else []
    return Group(*parts, _nodes_by_verdict(found))


def _likeness(finding: Finding) -> tuple[Any, ...]:
    """
    Return a key that is equal for findings which share a line. Checks of a node that were skipped
    for the same reason share one line.
    """
    if finding.cause:
        gpu = finding.gpu and finding.gpu.name
        return finding.severity, finding.accepted, finding.node, gpu, finding.found
    return (
        finding.severity,
        finding.accepted,
        finding.check,
        finding.found,
        finding.expected,
        finding.remedy,
    )


def _finding_row(table: Table, alike: list[Finding], *, everything: bool) -> None:
    first = alike[0]
    checks = list(dict.fromkeys(finding.check for finding in alike))
    accepted = first.accepted is not None
    lines = [first.found]
    if first.severity > Severity.INFO or everything:
        if first.gpu is not None and len(alike) == 1:
            named = (("PCI", first.gpu.bus_id), ("serial", first.gpu.serial))
            lines.append(", ".join(f"{kind} {value}" for kind, value in named if value))
        if first.expected:
            lines.append(f"expected: {first.expected} ({first.source})")
        if accepted:
            lines.append(f"accepted: {first.accepted}")
        elif len(first.remedy) == 1:
            lines.append(f"do: {first.remedy[0].text}")
        else:
            lines += (f"{n}. {step.text}" for n, step in enumerate(first.remedy, 1))
    add_row(
        table,
        Text("accepted" if accepted else first.severity.word.upper(),
             style="dim" if accepted else _STYLES[first.severity]),
        _where(alike),
        checks[0] if len(checks) == 1 else f"{len(checks)} checks",
        "\n".join(filter(None, lines)),
    )  # fmt: skip


def _where(alike: list[Finding]) -> str:
    gpus: dict[str, list[GpuId]] = {}
    for finding in alike:
        gpus.setdefault(finding.node, []).extend([finding.gpu] if finding.gpu else [])
    places: dict[str, list[str]] = {}
    for node, found in gpus.items():
        places.setdefault(_gpu_names(found), []).append(node)
    return "; ".join(
        node_ranges(nodes) + (f" GPU {indices}" if indices else "")
        for indices, nodes in places.items()
    )


def _gpu_names(gpus: Iterable[GpuId]) -> str:
    indices = ranges({gpu.index for gpu in gpus if gpu.index is not None})
    gone = sorted({gpu.name for gpu in gpus if gpu.index is None})
    return " ".join([*([indices] if indices else []), *gone])


def _nodes_by_verdict(found: Report) -> Table:
    """Return a table with one line for each verdict and kind of node."""
    kinds: dict[tuple[Severity, str], list[str]] = {}
    for node in found.nodes:
        verdict = found.verdict(node)
        worst = verdict if verdict.stops else Severity.OK
        kinds.setdefault((worst, _kind(found.facts.get(node))), []).append(node)
    table = new_table("", "nodes", "", "")
    table.show_header = False
    for (verdict, kind), nodes in sorted(kinds.items(), key=lambda item: (-item[0][0], item[1])):
        add_row(
            table,
            Text(_VERDICTS.get(verdict, "fit"), style=_STYLES[verdict]),
            count_of(len(nodes), "node"),
            node_ranges(nodes),
            kind,
        )
    return table


def _kind(document: Mapping[str, Any] | None) -> str:
    if document is None:
        return "no probe"
    names: dict[str, int] = {}
    for gpu in document["gpus"]:
        name = value_or(gpu.get("name"), None) if "missing" not in gpu else None
        name = name or "GPU that does not answer"
        names[name] = names.get(name, 0) + 1
    driver = value_or(document["driver"]["version"])
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
    return f"{gpus}, driver {driver}" if driver else f"{gpus}, no driver"
