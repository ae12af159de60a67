"""What was measured, as a table, held against the goals: pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

BEGIN = "<!-- measured: begin, written by benchmarks/converge/run.py -->"
END = "<!-- measured: end -->"

NAMES = {
    "ours": "`deploys/vllm.py`",
    "stock": "pyinfra's own operations",
    "ansible": "Ansible",
    "changed": "`deploys/vllm.py`, one file changed on every node",
    "plan": "`gpufleet plan INVENTORY`",
    "floor": "floor: paramiko, `true`",
    "openssh": "floor: OpenSSH, `true`",
}


@dataclass(frozen=True)
class Run:
    """One run: seconds on the clock and of processors, and the largest process."""

    clock: float
    controller: float
    nodes: float
    peak_mib: float


@dataclass(frozen=True)
class Goal:
    """The medians of two ways on the clock: `above` / `below` is to be `bound` at most."""

    above: str
    below: str
    bound: float
    from_nodes: int = 8
    """With fewer, what is compared is how fast Python starts."""


GOALS = (
    Goal("ours", "ansible", 0.1),
    Goal("ours", "stock", 0.5),
    Goal("ours", "floor", 3.0),
    Goal("changed", "ours", 2.0),
    Goal("plan", "floor", 2.0),
)

Measured = Mapping[int, Mapping[str, Sequence[Run]]]
"""Runs by number of nodes and way."""


def middle(runs: Sequence[Run]) -> float:
    """Return the median of some runs on the clock, in seconds."""
    return statistics.median(run.clock for run in runs)


def ratios(measured: Measured) -> Iterator[tuple[int, Goal, float, bool]]:
    """Return each goal's ratio for each number of nodes that has both, and whether it is kept."""
    for nodes, ways in measured.items():
        for goal in GOALS:
            if ways.get(goal.above) and ways.get(goal.below):
                ratio = middle(ways[goal.above]) / middle(ways[goal.below])
                yield nodes, goal, ratio, nodes < goal.from_nodes or ratio <= goal.bound


def markdown(measured: Measured) -> str:
    """Return the tables: what was measured, and the ratios."""
    lines = [
        "| nodes | way | runs | clock, s | controller's CPU, s | nodes' CPU, s | peak, MiB |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for nodes, ways in measured.items():
        for way, runs in ways.items():
            if runs:
                columns = (
                    spread(run.clock for run in runs),
                    spread(run.controller for run in runs),
                    spread(run.nodes for run in runs),
                    f"{max(run.peak_mib for run in runs):.0f}",
                )
                lines.append(f"| {nodes} | {NAMES[way]} | {len(runs)} | {' | '.join(columns)} |")
    lines += ["", "| nodes | ratio | measured | goal | |", "| ---: | --- | ---: | ---: | --- |"]
    for nodes, goal, ratio, kept in ratios(measured):
        counts = nodes >= goal.from_nodes
        lines.append(
            f"| {nodes} | {NAMES[goal.above]} / {NAMES[goal.below]} | {ratio:.2f} "
            f"| {f'{goal.bound:g}' if counts else ''} "
            f"| {('kept' if kept else 'missed') if counts else ''} |"
        )
    return "\n".join(lines)


def spread(figures: Iterable[float]) -> str:
    """Return the median of some figures, and the best and worst."""
    found = sorted(figures)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def replaced(page: str, table: str) -> str:
    """
    Return a page with what stands between the two markers replaced, and nothing else.

    Raises `ValueError` for a page that has not each of them once, in this order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"the page needs one line {BEGIN!r} and below it one {END!r}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
