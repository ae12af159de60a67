"""Tables for people: the fleet as it is declared, as it was found, and as it is planned.

Takes values, returns what `rich` prints; JSON for programs is made where the values are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from gpufleet.planner import FleetPlan, Stage
from gpufleet.topology import Node

if TYPE_CHECKING:
    from gpufleet.inventory import Fleet


def nodes_table(fleet: Fleet, names: Iterable[str]) -> Table:
    """Return one line a node: where it is, its groups, what it is to serve."""
    table = _table("node", "address", "groups", "models")
    for node in (fleet.nodes[name] for name in names):
        _row(table, node.name, node.address, " ".join(node.groups), " ".join(node.settings.models))
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
    table = _table("setting", "value", "set in", *(["nodes"] if total > 1 else []))
    for (key, value, where), nodes in sorted(found.items(), key=lambda item: item[0][0]):
        which = ["all" if len(nodes) == total else _some(nodes)] if total > 1 else []
        _row(table, key, value, where, *which, style="dim" if where == "default" else "")
    return table


def probe_table(nodes: Iterable[Node]) -> Table:
    """Return one line a node: what the probe found in it."""
    table = _table("node", "driver", "CUDA", "GPUs", "NVLink islands", "problems")
    for node in nodes:
        kinds: dict[str, int] = {}
        for gpu in node.gpus:
            kinds[gpu.name] = kinds.get(gpu.name, 0) + 1
        _row(
            table,
            node.name,
            node.driver or "none",
            ".".join(map(str, node.cuda)) if node.cuda else "none",
            ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none",
            " | ".join(_ranges(island) for island in node.islands if len(island) > 1) or "none",
            "\n".join(node.problems),
        )
    return table


def plan_table(plan: FleetPlan, nodes: Mapping[str, Node]) -> Table:
    """Return one line a stage: where it runs and on what."""
    table = _table("model", "replica", "node", "GPUs", "NVLink island", "TP", "port")
    for stage in plan.stages:
        _row(
            table,
            stage.model,
            str(stage.replica),
            stage.node,
            _ranges(stage.gpus),
            _island(stage, nodes[stage.node]),
            str(stage.tensor_parallel),
            str(stage.port),
        )
    return table


def _island(stage: Stage, node: Node) -> str:
    for island in node.islands:
        if set(stage.gpus) <= set(island):
            return _ranges(island) if len(island) > 1 else "-"
    return "several: PCIe between them"


def _ranges(numbers: Iterable[int]) -> str:
    """Write numbers short: `0-3,6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _some(names: list[str]) -> str:
    shown = " ".join(names[:3])
    return f"{shown} +{len(names) - 3}" if len(names) > 3 else shown


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str, style: str = "") -> None:
    # Text: what operators write may look like rich's own markup.
    table.add_row(*(Text(cell) for cell in cells), style=style)
