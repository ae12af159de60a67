"""Our own view of dashboards: numbers with units, and panels that say what they lack."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from lab.dashboard_view.drawing import Frame, drawn
from lab.dashboard_view.numbers import ticks, written
from lab.dashboard_view.questions import Answer, Series, Span, filled

SPAN = Span(start=1_800_000_000, end=1_800_000_600, step=15)
FRAME = Frame(400, 240, SPAN)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.125, "percentunit", "12.5 %"),
        (0.0004, "s", "400 µs"),
        (0.0213, "s", "21.3 ms"),
        (7.25, "s", "7.25 s"),
        (600, "s", "10 min"),
        (72 * 1024**3, "bytes", "72 GiB"),
        (1_000_000, "Bps", "1 MB/s"),
        (1_980_000_000, "hertz", "1.98 GHz"),
        (0, "short", "0"),
        (1234, "suffix: tok/s", "1.23 k tok/s"),
        (71, "celsius", "71 °C"),
    ],
)
def test_a_number_is_written_with_its_unit(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text


def test_how_long_ago_is_counted_from_the_end_of_the_page() -> None:
    assert written(1000 * (SPAN.end - 7200), "dateTimeFromNow", SPAN.end) == "2 hours ago"


@pytest.mark.parametrize("high", [0.003, 1, 7, 99, 12345, 5 * 1024**3])
def test_ticks_are_round_and_few(high: float) -> None:
    found = ticks(0, high, 5, "bytes" if high > 1e6 else "short")

    assert 2 <= len(found) <= 7
    assert found[0] == 0
    assert found[-1] <= high * 1.0001


def test_variables_are_filled_in_both_spellings() -> None:
    values = {"instance": "gpu-01", "__rate_interval": "60s"}

    text = filled('rate(a{instance="$instance",b="${instance}"}[$__rate_interval])', values)

    assert text == 'rate(a{instance="gpu-01",b="gpu-01"}[60s])'


def panel(kind: str, **settings: Any) -> dict[str, Any]:
    """Return a panel of Grafana's JSON with what the view reads of it."""
    custom = {"stacking": {"mode": settings.pop("stacking", "none")}}
    defaults = {"unit": "short", "custom": custom, "thresholds": {"steps": []}, **settings}
    return {"type": kind, "fieldConfig": {"defaults": defaults, "overrides": []}}


def series(name: str, *values: float, every: int = 15) -> Series:
    """Return a series that has these values, one a step, from the span's start."""
    points = ((float(SPAN.start + every * index), value) for index, value in enumerate(values))
    return Series({"name": name}, name, tuple(points))


def test_a_query_without_an_answer_is_red() -> None:
    assert drawn(panel("timeseries"), [Answer("A", ())], FRAME) == '<p class="failed">no data</p>'


def test_what_an_empty_panel_means_is_said_instead() -> None:
    assert "nothing fires" in drawn(
        panel("table", noValue="nothing fires"), [Answer("A", ())], FRAME
    )


def test_one_query_of_several_that_is_empty_is_named() -> None:
    text = drawn(panel("timeseries"), [Answer("A", (series("x", 1, 2),)), Answer("B", ())], FRAME)

    assert "no data: B" in text


def test_what_prometheus_refuses_stands_in_its_own_words_and_harms_no_page() -> None:
    answer = Answer("A", (), "parse error: <unexpected>")

    text = drawn(panel("stat"), [answer], FRAME)

    assert 'class="failed"' in text
    assert "A: parse error: &lt;unexpected&gt;" in text


def test_names_of_series_cannot_break_the_page() -> None:
    text = drawn(panel("timeseries"), [Answer("A", (series("<b>&", 1, 2),))], FRAME)

    assert "<b>&<" not in text
    ET.fromstring(re.search(r"<svg.*?</svg>", text, re.DOTALL)[0])  # type: ignore[index]


def test_a_gap_is_not_drawn_over() -> None:
    """A curve stops where values are missing: the exporter was gone, and nothing is known."""
    points = tuple((SPAN.start + second, 1.0) for second in (0, 15, 30, 300, 315))
    text = drawn(panel("timeseries"), [Answer("A", (Series({}, "x", points),))], FRAME)

    curve = re.search(r'<path class="curve[^"]*" d="([^"]*)"', text)

    assert curve is not None
    assert curve[1].count("M") == 2


def test_stacked_series_reach_their_sum() -> None:
    answers = [Answer("A", (series("a", 1, 1), series("b", 3, 3)))]

    text = drawn(panel("timeseries", stacking="normal", min=0), answers, FRAME)

    heights = [
        float(re.split(r"[ L]", path)[1])
        for path in re.findall(r'<path class="curve[^"]*" d="M([^"]*)"', text)
    ]
    zero = float(re.findall(r'<line class="grid"[^>]*y1="([\d.]+)"', text)[0])
    top, below = sorted(heights)
    assert (zero - top) / (zero - below) == pytest.approx(4, rel=0.02)


def test_a_table_joins_its_answers_by_the_first_column() -> None:
    """A query that answered nothing leaves its cells blank, and no row goes missing."""
    names = ["instance", "Value #A", "Value #B", "Value #C"]
    headings = dict(zip(names, ("Node", "Up", "Load", "Drift"), strict=True))
    table = {
        **panel("table"),
        "transformations": [
            {"id": "joinByField", "options": {"byField": "instance", "mode": "outer"}},
            {"id": "filterFieldsByName", "options": {"include": {"names": names}}},
            {"id": "organize", "options": {"renameByName": headings}},
        ],
    }
    one, two = {"instance": "gpu-01"}, {"instance": "gpu-02"}
    point = ((float(SPAN.end), 1.0),)
    answers = [
        Answer("A", (Series(one, "", point), Series(two, "", point))),
        Answer("B", (Series(two, "", ((float(SPAN.end), 7.0),)),)),
        Answer("C", ()),
    ]

    text = drawn(table, answers, FRAME)

    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    assert rows[1:] == [["gpu-01", "1", "", ""], ["gpu-02", "1", "7", ""]]


def test_states_are_as_long_as_they_lasted() -> None:
    words = {"0": {"text": "no", "color": "green"}, "1": {"text": "YES", "color": "red"}}
    mappings = [{"type": "value", "options": words}]
    band = series("gpu-01", *([0] * 20 + [1] * 10 + [0] * 10))

    text = drawn(panel("state-timeline", mappings=mappings), [Answer("A", (band,))], FRAME)

    widths = re.findall(r'<rect class="fill-(\w+)"[^>]*? width="([\d.]+)"', text)
    assert [colour for colour, _ in widths] == ["green", "red", "green"]
    assert float(widths[0][1]) == pytest.approx(2 * float(widths[1][1]), rel=0.01)


def test_a_heatmap_takes_cumulative_buckets_apart() -> None:
    buckets = tuple(
        Series({"le": le}, le, ((float(SPAN.end), count),))
        for le, count in (("1.0", 2.0), ("2.0", 2.0), ("4.0", 10.0), ("+Inf", 10.0))
    )

    text = drawn(panel("heatmap"), [Answer("A", buckets)], FRAME)

    assert re.findall(r"<title>(.*?)</title>", text) == ["2 up to 1", "8 up to 4"]
