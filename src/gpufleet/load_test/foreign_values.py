"""Describe a level of load measured by another tool, and parse untrusted values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PERCENTILES = ("p50", "p90", "p95", "p99")

_WORDS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "e2e"}


@dataclass(frozen=True)
class ForeignResult:
    """One level of load, measured by another tool."""

    tool: str
    version: str | None
    model: str | None
    rate: float | None
    """
    Requested arrivals per second.

    None if the rate is unknown, or if only `concurrency` limits the load.
    """
    concurrency: int | None
    """The maximum number of concurrent requests, or None if it is unknown or unlimited."""
    seconds: float | None
    requests: int | None
    """The number of sent requests, or None if it is unknown."""
    completed: int | None
    failed: int | None
    ttft: Mapping[str, float]
    """Seconds by percentile, over answered requests. Empty if the values are unknown."""
    tpot: Mapping[str, float]
    """Mean seconds between the tokens of one answer."""
    itl: Mapping[str, float]
    """Seconds between chunks, over all answers."""
    e2e: Mapping[str, float]
    output_tokens_per_second: float | None
    reservations: tuple[str, ...]
    """
    Sentences about values that are missing, or that the tool counts differently from gpufleet.
    """


def read_times(values: Mapping[str, Any], per_second: float) -> dict[str, float]:
    """
    Return the available percentiles in seconds.

    `per_second` is how many units of `values` are one second.
    """
    found = {p: read_number(values.get(p)) for p in PERCENTILES}
    return {p: value / per_second for p, value in found.items() if value is not None}


def read_object(of: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the JSON object at a path of keys, or {} if there is none."""
    found: Any = of
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def read_number(value: Any) -> float | None:
    """
    Return a finite number >= 0; None for any other value.

    >>> read_number(2), read_number("inf"), read_number(True), read_number(-1)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and found >= 0 else None


def read_count(value: Any) -> int | None:
    """Return a finite number >= 0, rounded down, or None for any other value."""
    found = read_number(value)
    return None if found is None else int(found)


def read_text(value: Any) -> str | None:
    """Return a non-empty text, or None for any other value."""
    return value if isinstance(value, str) and value else None


def missing_latencies(latencies: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a sentence that names the missing latencies, if any are missing."""
    if none := [_WORDS[name] for name, values in latencies.items() if not values]:
        yield f"the file has no {', no '.join(none)}"
