"""Draw charts of levels of load, as inline SVG without scripts, fonts or images. Pure.

Each series has its own colour and dashes, and a label at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from gpufleet.sanitize import xml_text

# Sizes in pixels. One chart fills the width of a telephone, and three charts fit beside each other
# on a desktop.
_LEFT, _WIDTH, _RIGHT, _TOP, _HEIGHT, _BOTTOM = 56, 250, 66, 14, 190, 40
_MARK = 4.0
_LABEL_ROW = 14
_TICKS = 6

STYLE = """
.charts { display: flex; flex-wrap: wrap; gap: 0 1.2rem; }
.charts figure { flex: 0 1 372px; min-width: 0; margin: 0; }
.charts figcaption { font-weight: bold; margin: 1rem 0 .2rem; }
.chart { display: block; width: 100%; max-width: 372px; height: auto; }
.chart text { fill: var(--ink); font-size: 12px; } .chart .pale { fill: var(--pale); }
.chart .grid { stroke: var(--line); }
.chart .mark { stroke: var(--pale); stroke-dasharray: 1 3; }
.chart .band { fill: var(--line); opacity: .6; }
.chart .limit { stroke: var(--bad); stroke-dasharray: 7 3; stroke-width: 1.5; }
.chart .a { --tone: var(--load); } .chart .b { --tone: var(--judge); }
.chart .c { --tone: var(--back); } .chart .kept { --tone: var(--soak); }
.chart .missed { --tone: var(--bad); } .chart .unknown { --tone: var(--own); }
.chart path { stroke: var(--tone); fill: none; stroke-width: 1.8; }
.chart .b path { stroke-dasharray: 6 3; } .chart .c path { stroke-dasharray: 2 3; }
.chart .dot { fill: var(--tone); } .chart .whisker { stroke: var(--tone); stroke-width: 1.5; }
"""


@dataclass(frozen=True)
class Point:
    """One level in a chart."""

    x: float
    y: float
    said: str
    """The point's tooltip."""
    low: float | None = None
    """The lower end of the point's interval, or None."""
    high: float | None = None
    style: str = ""
    """The CSS class of this point, or "" to use the class of the series."""


@dataclass(frozen=True)
class Series:
    """The connected points of a chart."""

    name: str
    style: str
    points: Sequence[Point]
    step: float | None = None
    """The time between two points of a series over time; None for a series over load.

    A series over time is drawn without dots. Its line is interrupted between points that are
    further apart than 1.5 steps.
    """


@dataclass(frozen=True)
class Chart:
    """The data of a chart."""

    title: str
    x_label: str
    unit: str
    """The unit of y, such as `s`, `%` or `tokens/s`."""
    series: Sequence[Series]
    limit: float | None = None
    """The contract's limit."""
    band: tuple[float, float] | None = None
    """
    The range of x from the highest load that met the contract to the lowest that did not meet it.
    """
    logarithmic: bool = False
    """
    Whether y is logarithmic. Latencies of a full server are many times those of an idle server.
    """
    top: float | None = None
    """The highest value of the y axis. None: the axis ends at the highest point."""
    marks: Sequence[tuple[float, str]] = ()
    """The position on x and the tooltip of each vertical line."""


def draw(chart: Chart) -> str:
    """Return the chart as SVG, or "" if it has no points."""
    points = [point for series in chart.series for point in series.points]
    if not points:
        return ""
    page = ET.Element(
        "svg",
        {
            "viewBox": f"0 0 {_LEFT + _WIDTH + _RIGHT} {_TOP + _HEIGHT + _BOTTOM}",
            "class": "chart",
            "role": "img",
        },
    )
    ET.SubElement(page, "title").text = xml_text(chart.title)
    scale = _Scale(chart, points)
    _axes(page, chart, scale)
    ends = []
    for series in chart.series:
        if series.points:
            _series(page, series, scale)
            last = max(series.points, key=lambda each: each.x)
            ends.append((scale.y(last.y), scale.x(last.x), series))
    _labels(page, ends)
    return ET.tostring(page, encoding="unicode")


class _Scale:
    """The scale from values to coordinates."""

    def __init__(self, chart: Chart, points: Sequence[Point]) -> None:
        self.x_ticks = [*_ticks(max(each.x for each in points))]
        self._x_end = max(self.x_ticks[-1], *(each.x for each in points)) or 1.0
        values = [v for each in points for v in (each.y, each.low, each.high) if v is not None]
        values += [chart.limit] if chart.limit is not None else []
        positive = [each for each in values if each > 0]
        self._logarithmic = chart.logarithmic and bool(positive)
        if self._logarithmic:
            self.y_ticks = [*_log_ticks(min(positive), max(positive))]
            self._start, self._end = self.y_ticks[0], self.y_ticks[-1]
        else:
            self._start, self._end = 0.0, chart.top or max(values) or 1.0
            self.y_ticks = [*_ticks(self._end)]
            self._end = max(self._end, self.y_ticks[-1])

    def x(self, value: float) -> float:
        return _LEFT + min(value, self._x_end) / self._x_end * _WIDTH

    def y(self, value: float) -> float:
        if self._logarithmic:
            span = math.log(self._end / self._start)
            part = math.log(max(value, self._start) / self._start) / span
        else:
            part = value / self._end
        return _TOP + _HEIGHT * (1 - min(1.0, max(0.0, part)))


def _axes(page: ET.Element, chart: Chart, scale: _Scale) -> None:
    bottom, end = _TOP + _HEIGHT, _LEFT + _WIDTH
    if chart.band is not None:
        start, stop = map(scale.x, chart.band)
        _shape(page, "rect", "band", x=start, y=_TOP, width=max(stop - start, 1), height=_HEIGHT)
    for at in scale.x_ticks:
        x = scale.x(at)
        _shape(page, "line", "grid", x1=x, y1=_TOP, x2=x, y2=bottom)
        _words(page, (x, bottom + 16), _number(at), "pale", "middle")
    for at in scale.y_ticks:
        y = scale.y(at)
        _shape(page, "line", "grid", x1=_LEFT, y1=y, x2=end, y2=y)
        said = value_text(at, chart.unit if chart.unit in ("s", "%") else "")
        _words(page, (_LEFT - 6, y + 4), said, "pale", "end")
    _words(page, (_LEFT + _WIDTH / 2, bottom + 34), chart.x_label, "pale", "middle")
    for at, said in chart.marks:
        x = scale.x(at)
        line = _shape(page, "line", "mark", x1=x, y1=_TOP, x2=x, y2=bottom)
        ET.SubElement(line, "title").text = xml_text(said)
    if chart.limit is not None:
        y = scale.y(chart.limit)
        _shape(page, "line", "limit", x1=_LEFT, y1=y, x2=end, y2=y)
        _words(page, (_LEFT + 4, y - 4), f"contract: {value_text(chart.limit, chart.unit)}")


def _series(page: ET.Element, series: Series, scale: _Scale) -> None:
    group = ET.SubElement(page, "g", {"class": series.style})
    ordered = sorted(series.points, key=lambda each: each.x)
    if len(ordered) > 1:
        ET.SubElement(group, "path", {"d": " ".join(_path(series, ordered, scale))})
    if series.step is not None:
        return
    for each in ordered:
        x, y = scale.x(each.x), scale.y(each.y)
        own = ET.SubElement(group, "g", {"class": each.style} if each.style else {})
        if each.low is not None and each.high is not None:
            low, high = scale.y(each.low), scale.y(each.high)
            _shape(own, "line", "whisker", x1=x, y1=low, x2=x, y2=high)
            for end in (low, high):
                _shape(own, "line", "whisker", x1=x - _MARK, y1=end, x2=x + _MARK, y2=end)
        dot = _shape(own, "circle", "dot", cx=x, cy=y, r=_MARK)
        ET.SubElement(dot, "title").text = xml_text(each.said)


def _path(series: Series, ordered: Sequence[Point], scale: _Scale) -> Iterator[str]:
    """Yield the parts of an SVG path. In a series over time, an isolated point is a short dash."""
    apart = math.inf if series.step is None else 1.5 * series.step
    before = -math.inf
    for each in ordered:
        x, y = scale.x(each.x), scale.y(each.y)
        if each.x - before > apart or before == -math.inf:
            yield f"M {x:.5g} {y:.5g}" + (" h 1" if series.step is not None else "")
        else:
            yield f"L {x:.5g} {y:.5g}"
        before = each.x


def _labels(page: ET.Element, ends: Sequence[tuple[float, float, Series]]) -> None:
    """Write the name of each series beside its last point, so that names do not overlap."""
    below = -math.inf
    for wanted, x, series in sorted(ends, key=lambda each: each[0]):
        y = max(wanted + 4, below + _LABEL_ROW)
        below = y
        _words(page, (x + 10, y), series.name)


def value_text(value: float, unit: str) -> str:
    """
    Return a value with its unit.

    >>> value_text(0.05, "s"), value_text(2.5, "s"), value_text(0.95, "%"), value_text(4, "")
    ('50 ms', '2.5 s', '95 %', '4')
    """
    if unit == "%":
        return f"{_number(value * 100)} %"
    if unit == "s" and value < 1:
        return f"{_number(value * 1000)} ms"
    return f"{_number(value)} {unit}".rstrip()


def _ticks(end: float) -> Iterator[float]:
    """Yield round numbers from 0 up to the first one that is at least `end`."""
    if end <= 0:
        yield from (0.0, 1.0)
        return
    power = 10.0 ** math.floor(math.log10(end / _TICKS))
    step = next(power * each for each in (1, 2, 5, 10) if end / (power * each) <= _TICKS)
    for number in range(math.ceil(end / step - 1e-9) + 1):
        yield number * step


def _log_ticks(start: float, end: float) -> Iterator[float]:
    """
    Yield 1, 2 and 5 times the powers of ten around an interval.

    If the interval has more than three decades, yield only the powers.
    """
    first, last = math.floor(math.log10(start)), math.ceil(math.log10(end))
    last = max(last, first + 1)
    parts = (1, 2, 5) if last - first <= 3 else (1,)
    every = [part * 10.0**power for power in range(first, last) for part in parts]
    every.append(10.0**last)
    low = max((each for each in every if each <= start), default=every[0])
    high = min((each for each in every if each >= end and each > low), default=every[-1])
    yield from (each for each in every if low <= each <= high)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _shape(page: ET.Element, kind: str, name: str, **numbers: float) -> ET.Element:
    values = {key: f"{value:.5g}" for key, value in numbers.items()}
    return ET.SubElement(page, kind, {"class": name, **values})


def _words(
    page: ET.Element, place: tuple[float, float], words: str, name: str = "", anchor: str = "start"
) -> None:
    shape = _shape(page, "text", name, x=place[0], y=place[1])
    shape.set("text-anchor", anchor)
    shape.text = xml_text(words)
