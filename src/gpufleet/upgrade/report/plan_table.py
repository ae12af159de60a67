"""The plan of waves as a table, shown before confirmation.

The functions return `rich` renderables; programs get JSON from `WavePlan.as_json`.
"""

from __future__ import annotations

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gpufleet.formatting import count_of, node_ranges
from gpufleet.sanitize import printable
from gpufleet.upgrade.plan.wave import Wave
from gpufleet.upgrade.plan.wave_plan import WavePlan

# The table shows the changes of a wave, not of each group: equal ones are shown once.
_REASONS = 3


def waves(plan: WavePlan) -> RenderableType:
    """Return one line per wave and per model, then sentences and the total time."""
    if not plan.waves:
        return Lines(*_sentences(plan), Text("nothing differs, so there is no wave"))
    table = _table("wave", "groups", "nodes", "why", "replicas left serving", "time")
    for wave, expected in zip(plan.waves, plan.estimates, strict=True):
        kept = [each for each in plan.left if each.wave == wave.number]
        table.add_row(
            Text(f"{wave.number} canary" if wave.canary else str(wave.number)),
            Text(printable("\n".join(group.id for group in wave.groups))),
            Text(printable(node_ranges(wave.nodes))),
            Text(printable("\n".join(_why(wave)))),
            Text(
                "\n".join(
                    f"{each.model}: {each.left} of {each.serving}, {each.needed} needed"
                    for each in kept
                )
                or "all",
                style="" if all(each.enough for each in kept) else "bold red",
            ),
            Text(str(expected)),
        )
    needs: list[RenderableType] = [_needs(plan), Text()] if plan.needs else []
    number = count_of(len(plan.waves), "wave")
    groups = count_of(sum(len(wave.groups) for wave in plan.waves), "group")
    return Lines(
        table,
        Text(),
        *needs,
        *_sentences(plan),
        Text(f"{groups} in {number}, time: {plan.total}"),
    )


def _needs(plan: WavePlan) -> Table:
    """
    Return one line per model: its replicas, how many its load needs, how many may stop at once.
    """
    table = _table("model", "serving", "load in replicas", "needed", "may stop at once")
    for need in plan.needs.values():
        load = f"{need.load:.2f}" + (" (partly unknown)" if need.unknown else "")
        cells = (need.model, str(need.serving), load, str(need.needed), str(need.spare))
        table.add_row(*map(Text, cells))
    return table


def _why(wave: Wave) -> list[str]:
    """Return the reasons of all groups of a wave, each once and at most `_REASONS`."""
    reasons = list(dict.fromkeys(reason for group in wave.groups for reason in group.why))
    more = len(reasons) - _REASONS
    return [*reasons[:_REASONS], *([f"and {more} more"] if more > 0 else [])]


def _sentences(plan: WavePlan) -> list[Text]:
    return [Text(printable(f"note: {each}")) for each in plan.remarks]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
