"""Format numbers, durations and names briefly, for sentences. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def ranges(numbers: Iterable[int], between: str = ",") -> str:
    """
    Return numbers as ranges.

    >>> ranges([6, 0, 1, 2])
    '0-2,6'
    """
    return between.join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(numbers)
    )


def node_ranges(names: Iterable[str]) -> str:
    """
    Return nodes' names as ranges, in the notation of cluster tools.

    >>> node_ranges(["gpu-01", "gpu-02", "gpu-03", "login"])
    'gpu-[01-03] login'
    >>> node_ranges(["gpu-01.example.net", "gpu-02.example.net"])
    'gpu-[01-02].example.net'
    """
    numbered: dict[tuple[str, int, str], list[int]] = {}
    others = []
    for name in sorted(set(names)):
        if match := re.fullmatch(r"(.*?)(\d+)(\D*)", name):
            key = (match[1], len(match[2]), match[3])
            numbered.setdefault(key, []).append(int(match[2]))
        else:
            others.append(name)
    folded = []
    for (prefix, width, suffix), numbers in numbered.items():
        parts = [
            f"{run[0]:0{width}}" + (f"-{run[-1]:0{width}}" if len(run) > 1 else "")
            for run in _runs(numbers)
        ]
        shown = f"[{','.join(parts)}]" if len(numbers) > 1 else parts[0]
        folded.append(f"{prefix}{shown}{suffix}")
    return " ".join([*folded, *others])


def join_names(names: Iterable[str], limit: int = 4) -> str:
    """
    Join names with commas. More than `limit` names are shortened with "and N more".

    >>> join_names(["d", "a", "c", "e", "b"])
    'a, b, c and 2 more'
    """
    ordered = sorted(names)
    if len(ordered) <= limit:
        return ", ".join(ordered)
    return f"{', '.join(ordered[: limit - 1])} and {len(ordered) - limit + 1} more"


def count_of(count: int, noun: str) -> str:
    """
    Return a count with its noun.

    >>> count_of(1, "node"), count_of(2, "node")
    ('1 node', '2 nodes')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_duration(seconds: float) -> str:
    """
    Format a duration in seconds as text.

    >>> format_duration(41.4), format_duration(120), format_duration(3700)
    ('41 s', '2 min', '1 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    minutes = round(whole / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return `; did you mean X?` if a known name is close to `name`, else ""."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return the numbers as runs of consecutive numbers, in ascending order."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
