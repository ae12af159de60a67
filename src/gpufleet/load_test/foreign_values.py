"""One level of load as another tool measured it, and readers of untrusted values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PERCENTILES = ("p50", "p90", "p95", "p99")

_WORDS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "e2e"}


@dataclass(frozen=True)
class ForeignResult:
    """One level of load, as another tool measured it."""

    tool: str
    version: str | None
    model: str | None
    rate: float | None
    """Arrivals per second that were asked for; None: as fast as `concurrency` lets, or unknown."""
    concurrency: int | None
    """The bound on concurrent requests; None: there was none, or it is not known."""
    seconds: float | None
    requests: int | None
    """That were sent; None: not known."""
    completed: int | None
    failed: int | None
    ttft: Mapping[str, float]
    """Seconds by percentile, of requests that were answered; empty: not known."""
    tpot: Mapping[str, float]
    """Mean seconds between the tokens of one answer."""
    itl: Mapping[str, float]
    """Seconds between chunks, over all answers."""
    e2e: Mapping[str, float]
    output_tokens_per_second: float | None
    reservations: tuple[str, ...]
    """What is missing, or counted in another way than here: sentences."""


def read_times(values: Mapping[str, Any], per_second: float) -> dict[str, float]:
    """Return the available percentiles, in seconds."""
    found = {p: read_number(values.get(p)) for p in PERCENTILES}
    return {p: value / per_second for p, value in found.items() if value is not None}


def read_object(of: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return an object at a path of keys; an empty one where there is none."""
    found: Any = of
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def read_number(value: Any) -> float | None:
    """
    Return a finite number >= 0; None: any other value.

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
    """Return a finite number >= 0, rounded down; None: any other value."""
    found = read_number(value)
    return None if found is None else int(found)


def read_text(value: Any) -> str | None:
    """Return a non-empty text; None: any other value."""
    return value if isinstance(value, str) and value else None


def missing_latencies(latencies: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a sentence with the unknown latencies."""
    if none := [_WORDS[name] for name, values in latencies.items() if not values]:
        yield f"it has no {', no '.join(none)}"
