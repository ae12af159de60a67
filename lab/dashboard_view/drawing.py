"""One panel as HTML and SVG. Pure.

Every panel says what it lacks: an empty query is named in red unless the panel says what empty
means, and what Prometheus refused stands there in its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import Any

from lab.dashboard_view.look import limits, look, of_column
from lab.dashboard_view.numbers import clock_ticks, ticks, written
from lab.dashboard_view.questions import Answer, Series, Span

Json = dict[str, Any]
Marks = Sequence[tuple[float, str]]

LETTER = 6.3  # pixels, of 11 pixel type; a little more than most letters take
LINE = 17
TITLE = 28
PALETTE = 10  # series colours in `page.CSS`


@dataclass(frozen=True)
class Frame:
    """A panel's room and the time that it shows."""

    width: int
    height: int
    span: Span
    marks: Marks = ()


def drawn(panel: Json, answers: Sequence[Answer], frame: Frame) -> str:
    """Return a panel's inside."""
    if errors := [answer for answer in answers if answer.error]:
        text = "; ".join(f"{answer.ref}: {answer.error}" for answer in errors)
        return f'<p class="failed">{escape(text)}</p>'
    if not any(answer.series for answer in answers):
        meaning = panel["fieldConfig"]["defaults"].get("noValue", "")
        if meaning:
            return f'<p class="nothing">{escape(meaning)}</p>'
        return '<p class="failed">no data</p>'
    return _DRAWN[panel["type"]](panel, answers, frame)


def _stat(panel: Json, answers: Sequence[Answer], frame: Frame) -> str:
    settings = panel["fieldConfig"]["defaults"]
    shown = look(answers[0].series[0].last, settings, frame.span.end)
    size = max(16, min(34, int((frame.width - 24) / (len(shown.text) * 0.64))))
    return (
        f'<div class="stat ground-{shown.colour or "none"}" style="font-size:{size}px">'
        f"{escape(shown.text)}</div>"
    )


def _table(panel: Json, answers: Sequence[Answer], frame: Frame) -> str:
    headings, rows = _rows(panel, answers)
    settings = [of_column(panel, heading) for heading in headings]
    wide = "".join(
        f'<col style="width:{width}px">' if (width := item.get("custom.width")) else "<col>"
        for item in settings
    )
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    room = (frame.height - 26) // 27
    body = "".join(
        "<tr>" + "".join(map(_cell, row, settings, [frame.span.end] * len(row))) + "</tr>"
        for row in rows[: room if len(rows) <= room else room - 1]
    )
    more = len(rows) - room + 1
    rest = f'<p class="lacks">and {more} more</p>' if len(rows) > room else ""
    return (
        f"<table><colgroup>{wide}</colgroup><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>{rest}"
    )


def _rows(panel: Json, answers: Sequence[Answer]) -> tuple[list[str], list[list[Any]]]:
    """Join the answers into rows as the panel's transformations say."""
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    names = steps["filterFieldsByName"]["include"]["names"]
    renamed = steps["organize"]["renameByName"]
    key = steps.get("joinByField", {}).get("byField")
    joined: dict[object, dict[str, Any]] = {}
    for answer in answers:
        value = f"Value #{answer.ref}" if key else "Value"
        for number, series in enumerate(answer.series):
            if key and key not in series.labels:
                continue
            row = joined.setdefault(series.labels[key] if key else number, {})
            row |= {**series.labels, value: series.last}
    rows = sorted(
        ([row.get(name, "") for name in names] for row in joined.values()),
        key=lambda row: str(row[0]),
    )
    return [renamed[name] for name in names], rows


def _cell(value: float | str, settings: Json, now: float) -> str:
    shown = look(value, settings, now)
    ground = "custom.cellOptions" in settings and shown.colour
    kind = f' class="ground-{shown.colour}"' if ground else ""
    return f"<td{kind}>{escape(shown.text)}</td>"


def _lines(panel: Json, answers: Sequence[Answer], frame: Frame) -> str:
    settings = panel["fieldConfig"]["defaults"]
    unit = settings["unit"]
    plain = [series for answer in answers if not answer.limit for series in answer.series]
    plain.sort(key=lambda series: _natural(series.name))
    promised = [series for answer in answers if answer.limit for series in answer.series]
    stacked = settings["custom"]["stacking"]["mode"] == "normal"
    curves = _stacked(plain) if stacked else [series.points for series in plain]

    legend = [
        (f'<i class="series-{index % PALETTE}"></i>', series.name, written(series.last, unit))
        for index, series in enumerate(plain)
    ]
    legend += [
        ('<i class="promised"></i>', series.name, written(series.last, unit)) for series in promised
    ]
    lacking = [answer.ref for answer in answers if not answer.series]
    key, rows = _legend(legend, lacking, frame)
    plot = _Plot(
        frame,
        frame.height - rows * LINE - 6,
        *_range(settings, [*curves, *(series.points for series in promised)]),
        unit,
    )
    parts = [plot.axes()]
    parts += [
        f'<line class="limit-{colour}" x1="{plot.left}" x2="{plot.right}" '
        f'y1="{plot.y(value):.1f}" y2="{plot.y(value):.1f}"/>'
        for value, colour in limits(settings)
        if plot.low <= value <= plot.high
    ]
    floors = [None, *curves] if stacked else [None] * len(curves)
    for index, (series, points) in reversed(list(enumerate(zip(plain, curves, strict=True)))):
        if stacked:
            parts.append(plot.area(points, floors[index], index % PALETTE))
        parts.append(plot.curve(points, f"series-{index % PALETTE}", series.name))
    parts += [plot.curve(series.points, "promised", series.name) for series in promised]
    return plot.svg("".join(parts)) + key


def _stacked(plain: Sequence[Series]) -> list[tuple[tuple[float, float], ...]]:
    """Return each series on top of those before it, at the times that any of them has."""
    times = {time for series in plain for time, _ in series.points}
    sums: dict[float, float] = dict.fromkeys(sorted(times), 0.0)
    curves = []
    for series in plain:
        values = dict(series.points)
        for time in sums:
            sums[time] += values.get(time, 0.0)
        curves.append(tuple(sums.items()))
    return curves


def _range(settings: Json, curves: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Return what the axis has to show: at least the values, and at most what the panel says."""
    values = [value for points in curves for _, value in points]
    low, high = min(values), max(values)
    if (least := settings.get("min")) is not None:
        low = min(least, low)
    for value, _ in limits(settings):
        high = max(high, value) if settings.get("max") is not None else high
    if (most := settings.get("max")) is not None:
        high = max(most, high)
    if high - low < 1e-9:
        spread = abs(high) * 0.1 or 1.0
        low, high = (low, high + spread) if low >= 0 else (low - spread, high + spread)
    else:
        high += (high - low) * 0.05 * (settings.get("max") is None)
    return low, high


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that puts "GPU 2" before "GPU 10"."""
    return tuple((int(word), "") if word.isdigit() else (0, word) for word in name.split())


def _legend(
    entries: Sequence[tuple[str, str, str]], lacking: Sequence[str], frame: Frame
) -> tuple[str, int]:
    """Return the legend, with as many series as fit below a plot, and how many lines it has."""
    room = frame.width - 24
    most = max(1, int(frame.height * 0.36 / LINE))
    shown: list[str] = []
    line, used = 1, 0.0
    for mark, name, value in entries:
        width = (len(name) + len(value)) * LETTER + 34
        if used and used + width > room:
            line, used = line + 1, 0.0
        if line > most:
            line = most
            shown.append(f"<span>and {len(entries) - len(shown)} more</span>")
            break
        used += width
        shown.append(f"<span>{mark}{escape(name)} <b>{escape(value)}</b></span>")
    if lacking:
        shown.append(f'<span class="lacks">no data: {", ".join(lacking)}</span>')
    return f'<div class="legend">{"".join(shown)}</div>', line


def _clock(time: float, span: Span) -> str:
    days = span.end - span.start > 36 * 3600
    return datetime.fromtimestamp(time, UTC).strftime("%d %b" if days else "%H:%M")


class _Plot:
    """Axes, and where a value is between them, in pixels."""

    def __init__(self, frame: Frame, height: float, low: float, high: float, unit: str) -> None:
        self.frame, self.low, self.high, self.unit = frame, low, high, unit
        self.height = height
        self.values = ticks(low, high, max(2, int(height / 34)), unit)
        widest = max((len(written(value, unit)) for value in self.values), default=1)
        self.left = widest * LETTER + 8
        self.right = frame.width - 18
        self.top, self.bottom = 6, height - 20

    def x(self, time: float) -> float:
        span = self.frame.span
        share = (time - span.start) / (span.end - span.start)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)

    def axes(self) -> str:
        parts = [
            f'<line class="grid" x1="{self.left:.1f}" x2="{self.right}" y1="{self.y(value):.1f}" '
            f'y2="{self.y(value):.1f}"/><text class="end" x="{self.left - 6:.1f}" '
            f'y="{self.y(value) + 4:.1f}">{escape(written(value, self.unit))}</text>'
            for value in self.values
        ]
        return "".join(parts) + time_axis(self.frame, self.x, self.top, self.bottom)

    def curve(self, points: Sequence[tuple[float, float]], kind: str, name: str) -> str:
        paths = "".join(
            "M" + "L".join(f"{self.x(time):.1f} {self.y(value):.1f}" for time, value in piece)
            for piece in _pieces(points, self.frame.span.step)
        )
        dots = "".join(
            f'<circle class="{kind}" cx="{self.x(piece[0][0]):.1f}" cy="{self.y(piece[0][1]):.1f}" '
            'r="2"/>'
            for piece in _pieces(points, self.frame.span.step)
            if len(piece) == 1
        )
        return f'<path class="curve {kind}" d="{paths}"><title>{escape(name)}</title></path>{dots}'

    def area(
        self,
        points: Sequence[tuple[float, float]],
        floor: Sequence[tuple[float, float]] | None,
        colour: int,
    ) -> str:
        below = dict(floor or ())
        parts = []
        for piece in _pieces(points, self.frame.span.step):
            up = [f"{self.x(time):.1f} {self.y(value):.1f}" for time, value in piece]
            down = [
                f"{self.x(time):.1f} {self.y(below.get(time, max(self.low, 0.0))):.1f}"
                for time, _ in reversed(piece)
            ]
            parts.append("M" + "L".join((*up, *down)) + "Z")
        return f'<path class="area series-{colour}" d="{"".join(parts)}"/>'

    def svg(self, inside: str) -> str:
        return _svg(self.frame.width - 16, self.height, inside)


def time_axis(frame: Frame, x: Callable[[float], float], top: float, bottom: float) -> str:
    """Return the clock below a plot, and the marks of what happened."""
    width = x(frame.span.end) - x(frame.span.start)
    parts = [
        f'<text class="middle" x="{x(time):.1f}" y="{bottom + 15:.1f}">'
        f"{_clock(time, frame.span)}</text>"
        for time in clock_ticks(frame.span.start, frame.span.end, max(2, int(width / 70)))
        if x(frame.span.start) + 14 < x(time) < x(frame.span.end) - 8
    ]
    parts += [
        f'<line class="mark" x1="{x(time):.1f}" x2="{x(time):.1f}" y1="{top:.1f}" '
        f'y2="{bottom:.1f}"/><path class="flag" d="M{x(time) - 4:.1f} {bottom + 5:.1f}'
        f'L{x(time) + 4:.1f} {bottom + 5:.1f}L{x(time):.1f} {bottom:.1f}Z">'
        f"<title>{escape(text)}</title></path>"
        for time, text in frame.marks
        if frame.span.start <= time <= frame.span.end
    ]
    return "".join(parts)


def _timeline(panel: Json, answers: Sequence[Answer], frame: Frame) -> str:
    settings = panel["fieldConfig"]["defaults"]
    bands = sorted(
        (series for answer in answers for series in answer.series),
        key=lambda series: _natural(series.name),
    )
    room = frame.height - 26
    most = max(1, int(room / 15))
    hidden = len(bands) - most
    if hidden > 0:
        bands = bands[: most - 1]
    longest = max(len(series.name) for series in bands)
    left = min(longest * LETTER + 12, frame.width * 0.5)
    letters = round((left - 12) / LETTER)
    right = frame.width - 18
    each = min(26.0, room / (len(bands) + (hidden > 0)))

    def x(time: float) -> float:
        span = frame.span
        return left + (time - span.start) / (span.end - span.start) * (right - left)

    parts = []
    for row, series in enumerate(bands):
        middle = row * each + each / 2 + 4
        name = series.name if len(series.name) <= letters else series.name[: letters - 1] + "…"
        parts.append(f'<text class="end" x="{left - 8:.1f}" y="{middle:.1f}">{escape(name)}</text>')
        for start, end, value in _states(series, frame.span):
            shown = look(value, settings, frame.span.end)
            width = max(x(min(end, frame.span.end)) - x(start), 1.5)
            parts.append(
                f'<rect class="fill-{shown.colour or "blue"}" x="{x(start):.1f}" '
                f'y="{row * each + 1:.1f}" width="{width:.1f}" height="{each - 3:.1f}">'
                f"<title>{escape(series.name)}: {escape(shown.text)}</title></rect>"
            )
            if shown.text.strip() and width > len(shown.text) * LETTER + 10:
                parts.append(
                    f'<text class="on" x="{x(start) + 5:.1f}" y="{middle:.1f}">'
                    f"{escape(shown.text)}</text>"
                )
    if hidden > 0:
        parts.append(
            f'<text class="end" x="{left - 8:.1f}" y="{len(bands) * each + 13:.1f}">'
            f"and {hidden + 1} more</text>"
        )
    parts.append(time_axis(frame, x, 0, max(each * len(bands), 20) + 18 * (hidden > 0)))
    return _svg(frame.width - 16, frame.height, "".join(parts))


def _states(series: Series, span: Span) -> list[tuple[float, float, float]]:
    """Return (from, to, value) of stretches in which a series had one value."""
    found = []
    for piece in _pieces(series.points, span.step):
        start, value = piece[0]
        for time, now in piece[1:]:
            if now != value:
                found.append((start, time, value))
                start, value = time, now
        found.append((start, piece[-1][0] + span.step, value))
    return found


def _heatmap(panel: Json, answers: Sequence[Answer], frame: Frame) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    buckets = sorted(
        ((float(series.labels["le"]), dict(series.points)) for series in answers[0].series),
        key=lambda bucket: bucket[0],
    )
    counts = [
        {time: max(count - below.get(time, 0.0), 0.0) for time, count in here.items()}
        for (_, below), (_, here) in pairwise([(0.0, {}), *buckets])
    ]
    used = [
        index for index, row in enumerate(counts) if any(value > 0.01 for value in row.values())
    ]
    if not used:
        return f'<p class="nothing">{escape("nothing was observed in this time")}</p>'
    first, last = max(used[0] - 1, 0), min(used[-1] + 1, len(counts) - 1)
    names = [written(le, unit) if le != float("inf") else "more" for le, _ in buckets]
    most = max(value for row in counts for value in row.values())
    left = max(map(len, names[first : last + 1])) * LETTER + 8
    right, bottom = frame.width - 18, frame.height - 26
    each = bottom / (last - first + 1)

    def x(time: float) -> float:
        span = frame.span
        return left + (time - span.start) / (span.end - span.start) * (right - left)

    wide = x(frame.span.start + frame.span.step) - x(frame.span.start)
    parts = [time_axis(frame, x, 0, bottom)]
    every = max(1, round(15 / each))
    for row in range(first, last + 1):
        top = bottom - (row - first + 1) * each
        if (row - first) % every == 0:
            parts.append(
                f'<text class="end" x="{left - 6:.1f}" y="{top + each / 2 + 4:.1f}">'
                f"{escape(names[row])}</text>"
            )
        parts += [
            f'<rect class="heat" x="{max(x(time) - wide, left):.1f}" y="{top + 0.5:.1f}" '
            f'width="{max(wide - 0.6, 0.8):.1f}" height="{each - 1:.1f}" '
            f'opacity="{0.12 + 0.88 * (value / most) ** 0.5:.2f}">'
            f"<title>{value:.0f} up to {escape(names[row])}</title></rect>"
            for time, value in counts[row].items()
            if value > 0.01
        ]
    return _svg(frame.width - 16, frame.height, "".join(parts))


def _pieces(points: Sequence[tuple[float, float]], step: int) -> list[list[tuple[float, float]]]:
    """Return the stretches without a gap: a value that is missing is not drawn over."""
    pieces: list[list[tuple[float, float]]] = []
    for point in points:
        if pieces and point[0] - pieces[-1][-1][0] <= 1.5 * step:
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def _svg(width: float, height: float, inside: str) -> str:
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">'
        f"{inside}</svg>"
    )


_DRAWN: dict[str, Callable[[Json, Sequence[Answer], Frame], str]] = {
    "stat": _stat,
    "table": _table,
    "timeseries": _lines,
    "state-timeline": _timeline,
    "heatmap": _heatmap,
}
