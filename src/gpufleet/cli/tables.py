"""Tables for people: the fleet as it is declared, as it was found, as it is judged and planned.

Takes values, returns what `rich` prints; JSON for programs is made where the values are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpufleet.catalog.checks import CHECKS
from gpufleet.catalog.presets import Choice, Preset
from gpufleet.checks.finding import Finding, GpuId, Report, Severity, worst_first
from gpufleet.formatting import node_ranges, ranges
from gpufleet.node.topology import Node, known
from gpufleet.planning.explanation import Action, Change
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.planning.planner import FleetPlan, Stage
from gpufleet.redact import hide, within
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.inventory.loader import Fleet

# Wide enough for every line when nobody looks: a program that reads a table wants no folds.
UNFOLDED = 1000

_STYLES = {
    Severity.BLOCK: "bold red",
    Severity.UNKNOWN: "bold magenta",
    Severity.WARN: "yellow",
    Severity.INFO: "cyan",
    Severity.OK: "green",
}
_VERDICTS = {Severity.BLOCK: "blocked", Severity.UNKNOWN: "unknown"}


def display(what: RenderableType) -> None:
    """Print to standard output, folded to the terminal's width if it is one."""
    Console(width=None if sys.stdout.isatty() else UNFOLDED, highlight=False).print(what)


def nodes_table(fleet: Fleet, names: Iterable[str]) -> Table:
    """Return one line a node: where it is, its groups, what it is to serve."""
    table = with_columns("node", "address", "groups", "models")
    for node in (fleet.nodes[name] for name in names):
        add_row(
            table, node.name, node.address, " ".join(node.groups), " ".join(node.settings.serving)
        )
    return table


def values_table(fleet: Fleet, names: Iterable[str]) -> Table:
    """Return every value with the place that set it, and for which nodes it holds."""
    found: dict[tuple[str, str, str], list[str]] = {}
    total = 0
    for name in names:
        total += 1
        for key, value, origin in fleet.nodes[name].leaves():
            where = str(origin or "default")
            found.setdefault((key, _shown(value), where), []).append(name)
    table = with_columns("setting", "value", "set in", *(["nodes"] if total > 1 else []))
    for (key, value, where), nodes in sorted(found.items(), key=lambda item: item[0][0]):
        which = ["all" if len(nodes) == total else _some(nodes)] if total > 1 else []
        add_row(table, key, value, where, *which, style="dim" if where == "default" else "")
    return table


def probe_table(nodes: Iterable[Node]) -> Table:
    """Return one line a node: what the probe found in it."""
    table = with_columns("node", "driver", "CUDA", "GPUs", "NVLink islands")
    for node in nodes:
        kinds: dict[str, int] = {}
        for gpu in node.gpus:
            kinds[gpu.name] = kinds.get(gpu.name, 0) + 1
        add_row(
            table,
            node.name,
            node.driver or "none",
            ".".join(map(str, node.cuda)) if node.cuda else "none",
            ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none",
            " | ".join(ranges(island) for island in node.islands if len(island) > 1) or "none",
        )
    return table


def report(found: Report, *, everything: bool = False) -> RenderableType:
    """
    Return what the checks say, worst first, then which nodes are fit.

    Equal findings of several GPUs or nodes share a line. Without `everything`, checks that passed
    are not shown, and remarks (`info`) in one line each, without their ladder.
    """
    shown = [
        finding
        for finding in worst_first(found.findings)
        if everything or finding.severity > Severity.OK
    ]
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in shown:
        alike.setdefault(_likeness(finding), []).append(finding)
    table = with_columns("", "where", "check", "found")
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    for group in alike.values():
        _finding_row(table, group, everything=everything)
    parts: list[RenderableType] = [table, Text()] if shown else []
    return Group(*parts, _nodes_by_verdict(found))


def checks_table() -> Table:
    """Return one line a check: its name, the question it answers, and what of it needs root."""
    table = with_columns("check", "question", "needs root for")
    for each in CHECKS.values():
        add_row(table, each.id, each.question, each.root or "")
    return table


def _likeness(finding: Finding) -> tuple[Any, ...]:
    """What findings must have in common to share a line; those not asked share one a node."""
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
    """Return a line for each kind of node and verdict: a healthy fleet is as many as its kinds."""
    kinds: dict[tuple[Severity, str], list[str]] = {}
    for node in found.nodes:
        verdict = found.verdict(node)
        worst = verdict if verdict.stops else Severity.OK
        kinds.setdefault((worst, _kind(found.facts.get(node))), []).append(node)
    table = with_columns("", "nodes", "", "")
    table.show_header = False
    for (verdict, kind), nodes in sorted(kinds.items(), key=lambda item: (-item[0][0], item[1])):
        add_row(
            table,
            Text(_VERDICTS.get(verdict, "fit"), style=_STYLES[verdict]),
            counted(len(nodes), "node"),
            node_ranges(nodes),
            kind,
        )
    return table


def _kind(document: Mapping[str, Any] | None) -> str:
    if document is None:
        return "no probe"
    names: dict[str, int] = {}
    for gpu in document["gpus"]:
        name = known(gpu.get("name"), None) if "missing" not in gpu else None
        name = name or "GPU that does not answer"
        names[name] = names.get(name, 0) + 1
    driver = known(document["driver"]["version"])
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
    return f"{gpus}, driver {driver}" if driver else f"{gpus}, no driver"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 GPU`, `2 GPUs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def plan_table(plan: FleetPlan, nodes: Mapping[str, Node]) -> Table:
    """Return one line a stage: where it runs and on what."""
    table = with_columns("model", "replica", "node", "GPUs", "NVLink island", "TP", "port")
    for stage in plan.stages:
        add_row(
            table,
            stage.model,
            str(stage.replica),
            stage.node,
            ranges(stage.gpus),
            _island(stage, nodes[stage.node]),
            str(stage.tensor_parallel),
            ranges(stage.ports) or "-",
        )
    return table


def layers_table(layers: Mapping[tuple[str, str], Iterable[LayeredFlag]]) -> Table:
    """Return one line a flag of each model that somebody set, and who did."""
    table = with_columns("model", "flag", "value", "set by", "because")
    for (model, _), flags in layers.items():
        for each in flags:
            because = each.because if len(each.because) < 60 else each.because[:57] + "..."
            value = hide(_shown(each.value), within(each.value))
            add_row(table, model, f"--{each.name}", value, each.layer, because)
    return table


def changes_table(changes: Iterable[Change]) -> Table:
    """Return one line a replica: what a deploy would do with it."""
    table = with_columns("replica", "", "runs now", "is to run", "why")
    for each in changes:
        after = "" if each.action is Action.STAY else each.after
        add_row(table, each.replica, str(each.action), each.before, after, each.why)
    return table


def presets_table(found: Mapping[str, Preset]) -> Table:
    """Return one line a preset."""
    table = with_columns("preset", "objective", "for")
    for name, preset in found.items():
        add_row(table, name, preset.objective, preset.situation)
    return table


def preset_table(preset: Preset) -> Table:
    """Return one line a value that a preset may set."""
    table = with_columns("flag", "value", "where", "because")
    for flag, choices in preset.flags.items():
        for each in choices:
            value = f"by the model's family ({each.value})" if each.table else _shown(each.value)
            add_row(table, f"--{flag}", value, _where_it_holds(each), each.because)
    for need in preset.needs:
        add_row(table, f"--{need.flag}", "yours", "", need.what)
    return table


def _where_it_holds(choice: Choice) -> str:
    return "; ".join(
        [
            *([f"vLLM {choice.since} on"] if choice.since else []),
            *([f"compute capability {choice.capability} on"] if choice.capability else []),
            *([f"no {' or '.join(choice.without)} cache"] if choice.without else []),
            *([", ".join(choice.architectures)] if choice.architectures else []),
        ]
    )


def _island(stage: Stage, node: Node) -> str:
    for island in node.islands:
        if set(stage.gpus) <= set(island):
            return ranges(island) if len(island) > 1 else "-"
    return "several: PCIe between them"


def _some(names: list[str]) -> str:
    shown = " ".join(names[:3])
    return f"{shown} +{len(names) - 3}" if len(names) > 3 else shown


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def with_columns(*columns: str) -> Table:
    """Return an empty table as all of ours look."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text, style: str = "") -> None:
    """Add cells that nobody interprets: not rich, and not the terminal."""
    # Text: what operators write may look like rich's own markup. Printable: what nodes say may be
    # an order to the terminal.
    table.add_row(
        *(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), style=style
    )
