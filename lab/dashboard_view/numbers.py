"""Numbers with their unit, as Grafana writes them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

_SI = ("", "k", "M", "G", "T", "P")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SUFFIX = {
    "celsius": " °C",
    "cps": " /s",
    "reqps": " req/s",
    "suffix: tok/s": " tok/s",
    "watt": " W",
    "hertz": " Hz",
    "Bps": " B/s",
}
_TIMES = (
    (86400 * 2, 86400, " days"),
    (3600 * 2, 3600, " h"),
    (120, 60, " min"),
    (1, 1, " s"),
    (1e-3, 1e-3, " ms"),
    (0, 1e-6, " µs"),
)


def written(value: float, unit: str, now: float = 0, decimals: int | None = None) -> str:
    """
    Return a number with its unit: `written(0.125, "percentunit")` is "12.5 %".

    `now` is what "ago" is counted from, in seconds since 1970; `decimals` as the panel wants them.
    """
    if unit == "percentunit":
        return f"{_short(value * 100, decimals)} %"
    if unit == "s":
        return _seconds(value)
    if unit == "bytes":
        scale = _power(value, 1024, len(_BINARY))
        return f"{_short(value / 1024**scale)} {_BINARY[scale]}"
    if unit == "dateTimeFromNow":
        return _ago(now - value / 1000)
    if unit in ("celsius", "none"):
        return f"{_short(value, decimals)}{_SUFFIX.get(unit, '')}"
    scale = _power(value, 1000, len(_SI))
    suffix = _SUFFIX.get(unit, "")
    number = _short(value / 1000**scale, decimals)
    if unit in ("watt", "hertz", "Bps"):
        return f"{number} {_SI[scale]}{suffix.strip()}"
    return f"{number}{' ' if scale else ''}{_SI[scale]}{suffix}"


def ticks(low: float, high: float, count: int, unit: str) -> list[float]:
    """Return round numbers from `low` to `high`, at most `count` and two more."""
    base = 1024.0 ** _power(high, 1024, len(_BINARY)) if unit == "bytes" else 1.0
    step = _round_step((high - low) / base / max(count, 1)) * base
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def clock_ticks(start: float, end: float, count: int) -> Iterator[float]:
    """Yield round times between two, in seconds since 1970."""
    steps = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    step = next((step for step in steps if (end - start) / step <= count), steps[-1])
    time = math.ceil(start / step) * step
    while time <= end:
        yield float(time)
        time += step


def _round_step(rough: float) -> float:
    if rough <= 0:
        return 1.0
    scale: float = 10.0 ** math.floor(math.log10(rough))
    return next(scale * step for step in (1, 2, 2.5, 5, 10) if rough <= scale * step * 1.0001)


def _power(value: float, base: int, most: int) -> int:
    if not value or abs(value) < base:
        return 0
    return min(int(math.log(abs(value), base) + 1e-9), most - 1)


def _short(value: float, decimals: int | None = None) -> str:
    """Return three digits that say something, or the decimals that are wanted."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    text = f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def _seconds(value: float) -> str:
    if not value:
        return "0 s"
    _, per, name = next(row for row in _TIMES if abs(value) >= row[0])
    return f"{_short(value / per)}{name}"


def _ago(seconds: float) -> str:
    if seconds < 45:
        return "a few seconds ago"
    for per, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if (number := round(seconds / per)) >= 1:
            return f"{number} {name}{'s' if number > 1 else ''} ago"
    return "a minute ago"
