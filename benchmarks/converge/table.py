"""Format the measurements as a table, compared with the goals. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

BEGIN = "<!-- measured: begin, written by benchmarks/converge/run.py -->"
END = "<!-- measured: end -->"

NAMES = {
    "ours": "`deploys/vllm.py`",
    "stock": "pyinfra's own operations",
    "ansible": "Ansible",
    "file": "`deploys/vllm.py`, one file changed on every node",
    "unit": "`deploys/vllm.py`, one unit changed and restarted on every node",
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
    """The medians of two ways: `above` / `below` is to be `bound` at most."""

    above: str
    below: str
    bound: float
    nodes: range = range(64, 1000)
    """For so many nodes; with others the ratio is only shown."""
    of: Literal["clock", "controller"] = "clock"
    """What is compared: seconds on the clock, or of the controller's processor."""


MOST_MIB = 400
"""What the controller's largest process may take, with up to 128 nodes."""

GOALS = (
    Goal("ours", "ansible", 1 / 50),
    # On the clock the logins bound it: 64 nodes share this machine's cores with the controller.
    Goal("ours", "stock", 1 / 3, of="controller"),
    Goal("ours", "floor", 4.0),
    Goal("ours", "floor", 2.5, range(1, 2)),
    Goal("file", "ours", 1.5),
    Goal("unit", "ours", 2.0),
    Goal("plan", "floor", 2.0),
)

Measured = Mapping[int, Mapping[str, Sequence[Run]]]
"""Runs by number of nodes and way."""


def middle(runs: Sequence[Run], of: Literal["clock", "controller"] = "clock") -> float:
    """Return the median of some runs, in seconds."""
    return statistics.median([float(getattr(run, of)) for run in runs])


@dataclass(frozen=True)
class Held:
    """One figure beside its goal; `bound` is None where it has none."""

    nodes: int
    what: str
    figure: float
    bound: float | None

    @property
    def kept(self) -> bool:
        """Whether the goal is kept, if there is one."""
        return self.bound is None or self.figure <= self.bound


def held(measured: Measured) -> Iterator[Held]:
    """Return every ratio that can be told, and the controller's memory, with their goals."""
    for nodes, ways in measured.items():
        for above, below, of in dict.fromkeys((goal.above, goal.below, goal.of) for goal in GOALS):
            if ways.get(above) and ways.get(below):
                bounds = [
                    goal.bound
                    for goal in GOALS
                    if (goal.above, goal.below, goal.of) == (above, below, of)
                    and nodes in goal.nodes
                ]
                ratio = middle(ways[above], of) / middle(ways[below], of)
                what = f"{NAMES[above]} / {NAMES[below]}"
                if of == "controller":
                    what += ", controller's CPU"
                yield Held(nodes, what, ratio, bounds[0] if bounds else None)
        if runs := ways.get("ours"):
            yield Held(nodes, "the controller's peak, MiB", max(r.peak_mib for r in runs), MOST_MIB)


def markdown(measured: Measured) -> str:
    """Return the tables: what was measured, and what there are goals for."""
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
    lines += ["", "| nodes | what | measured | goal | |", "| ---: | --- | ---: | ---: | --- |"]
    for each in held(measured):
        goal = "" if each.bound is None else f"{each.bound:g}"
        verdict = "" if each.bound is None else "kept" if each.kept else "missed"
        lines.append(f"| {each.nodes} | {each.what} | {each.figure:.3g} | {goal} | {verdict} |")
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
