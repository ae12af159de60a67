"""The page of a measurement needs nothing but itself, and says what is not known."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from gpufleet.load_test.level_charts import Chart, Point, Series, draw, value_text
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.result import Client, RateBracket
from gpufleet.load_test.result_page import result_page
from tests.support.rows import each_row
from tests.unit.load_test.sample_results import (
    CLOSED,
    LEVELS,
    SERIES,
    SUBJECT,
    WORKLOAD,
    measurement,
)

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e\x00&\"'"
VOID = {"meta"}
IN_CLOSED_LOOP = {
    "loop": "closed",
    "levels": tuple(
        replace(each, rate=None, concurrency=4 * n) for n, each in enumerate(LEVELS, 1)
    ),
}


class Page(HTMLParser):
    """What a browser makes of a page: open tags are closed in order; attributes and words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append((self.open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [words for inside, words in self.words if inside == tag]


def items(page: str, heading: str) -> list[str]:
    """Return the list below a heading."""
    below = page[page.index(f"<h2>{heading}</h2>") :]
    return Page(below[below.index("<ul>") : below.index("</ul>") + 5]).of("li")


def charts(page: str) -> list[ET.Element]:
    return [ET.fromstring(each) for each in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def found(**changes: Any) -> str:
    return result_page(measurement(**changes))


@each_row(
    "changes",
    [
        {},
        {"closed": CLOSED, "series": SERIES},
        IN_CLOSED_LOOP,
        {"levels": (), "found": RateBracket(None, None, "cut off")},
        {"levels": LEVELS[:1], "found": RateBracket(2.0, None, "most")},
        {"levels": (replace(LEVELS[0], requests=0, kept=0, ttft={}, itl={}, e2e={}),)},
        {"subject": replace(SUBJECT, gpus={}, driver=None, release="", nodes=(), arguments=())},
        {"notes": ("another client was there",), "target": "gateway gw-1", "replicas": 3},
    ],
    ids=str,
)
def test_a_page_is_whole_and_loads_and_runs_nothing(changes: dict[str, Any]) -> None:
    text = found(**changes)
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "a"}
    for _, attributes in page.tags:
        assert not {"src", "href", "style", "xlink:href", "onload"} & set(attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    for heading in ("Contract", "Levels", "What was measured", "What is not known"):
        assert f"<h2>{heading}</h2>" in text


def test_a_page_says_which_part_of_the_replicas_served() -> None:
    text = found(target="gateway gw-1", replicas=2, replicas_of=3)

    assert "2 of 3 replicas, measured 2026-11-20" in text
    assert "<td>replicas</td><td>2 of 3 replicas</td>" in text


def test_what_others_wrote_is_text() -> None:
    text = found(
        model=HOSTILE,
        target=HOSTILE,
        version=HOSTILE,
        workload={HOSTILE: HOSTILE, "inner": {HOSTILE: [HOSTILE]}},
        levels=(replace(LEVELS[0], why=HOSTILE, errors={HOSTILE: 3}, verdict="not known"),),
        found=RateBracket(1.0, 2.0, HOSTILE, HOSTILE),
        client=Client(1, 9.0, 0.1, 0.1, HOSTILE),
        subject=replace(
            SUBJECT, weights=HOSTILE, revision=HOSTILE, release=HOSTILE, driver=HOSTILE,
            arguments=(HOSTILE,), gpus={HOSTILE: 1}, nodes=(HOSTILE,),
        ),
        notes=(HOSTILE,),
    )  # fmt: skip
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any(each in text for each in ("\x1b", "\u202e", "\x00", "<script>"))
    assert sum("alert(1)" in words for _, words in page.words) > 12
    for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(each)


# -- sentences


@each_row(
    "of, words",
    [
        (RateBracket(4.0, 8.0, "found", concurrency=6.4),
         "The contract is met at 4 requests/s (6.4 requests in the system on average), and not met "
         "at 8."),
        (RateBracket(4.0, None, "most"), "No measured load was too high to meet it"),
        (
            RateBracket(None, 0.5, "none"),
            "The contract is met at no measured load, not even at 0.5 requests/s",
        ),
        (RateBracket(None, None, "budget"), "The capacity of this target is unknown (budget)."),
    ],
    ids=str,
)  # fmt: skip
def test_the_answer_is_one_sentence_above_all_else(of: RateBracket, words: str) -> None:
    (answer,) = Page(found(found=of)).of("strong")
    assert words in answer


def test_the_contract_is_written_out() -> None:
    contract = Contract(0.5, 0.05, None, 0.9, 0.99)
    assert items(found(contract=contract), "Contract") == [
        "time to first token (TTFT): at most 500 ms",
        "mean time between the tokens of an answer (ITL): at most 50 ms",
        "all of these limits must hold for a share of 0.9 of requests or more, with a confidence "
        "of 0.99. A failed request counts as one that does not meet them",
    ]


def test_each_level_has_a_row_with_its_verdict_interval_failures_and_reason() -> None:
    text = found()
    rows = text[text.index("<h2>Levels</h2>") :].split("<tr>")[2:6]
    cells = [Page(f"<table><tr>{row.partition('</tr>')[0]}</tr></table>").of("td") for row in rows]
    assert [row[0] for row in cells] == ["2", "4", "8", "6"]
    assert [row[1] for row in cells] == ["kept", "kept", "missed", "not known (budget)"]
    assert cells[2][2:6] == ["50.00%", "46.00% to 54.00%", "1000", "3 x 429, 2 x unfinished"]
    assert cells[2][6:9] == ["640 ms", "64 ms", "9.6 s"]
    assert cells[2][-1] == LEVELS[2].why


def test_the_subject_has_its_fingerprint_and_no_key() -> None:
    text = found(subject=replace(SUBJECT, arguments=("--api-key sesame-open",)))
    assert SUBJECT.fingerprint.digest in found()
    assert "sesame" not in text


def test_the_client_shows_its_ceiling_cost_and_lag() -> None:
    assert items(found(), "Was the client the bottleneck?") == [
        "2 processes on controller",
        "the client can send at most 900 requests/s, and the highest level used 1% of that",
        "each request needs 1.1 ms of the client's processor time",
        "99 % of requests were sent within 1.2 ms of their intended arrival. The latencies "
        "include this delay",
    ]


def test_what_is_not_known_is_listed() -> None:
    known = items(found(), "What is not known")
    assert f"6 requests/s: {LEVELS[3].why}" in known
    assert not any("client" in each or "driver" in each for each in known)
    unknown = items(
        found(
            client=Client(1, None, None, None, "gpu-02"),
            subject=replace(SUBJECT, driver=None),
            levels=tuple(replace(each, itl={}) for each in LEVELS),
        ),
        "What is not known",
    )
    for words in ("its maximum rate is not known", "how late", "driver's version", "ITL: no level"):
        assert any(words in each for each in unknown), words
    slow = items(found(client=Client(1, 7.0, None, 0.1, "x")), "What is not known")
    assert any("its maximum rate is lower" in each for each in slow)
    closed = items(found(**IN_CLOSED_LOOP), "What is not known")
    assert any("closed loop" in each for each in closed)


def test_a_level_that_a_second_try_resolved_is_known() -> None:
    again = (*LEVELS, replace(LEVELS[3], verdict="missed"))
    assert not any("6 requests/s" in e for e in items(found(levels=again), "What is not known"))


def test_the_knee_and_the_load_at_which_itl_runs_away_are_named() -> None:
    # Tokens rise with the rate up to 8 a second, and ITL by the rate's factor up to 4.
    tokens = {1.0: 100, 2.0: 200, 4.0: 400, 8.0: 800, 16.0: 820, 32.0: 830}
    itl = {1.0: 0.01, 2.0: 0.015, 4.0: 0.02, 8.0: 0.2, 16.0: 0.3, 32.0: 0.4}
    levels = tuple(
        replace(LEVELS[0], rate=rate, output_tokens_per_second=float(tokens[rate]),
                itl={"p99": itl[rate]})
        for rate in tokens
    )  # fmt: skip
    said = Page(found(levels=levels)).of("p")
    knee = "The knee is at 8 requests/s: above this load, tokens per second grow more slowly than "
    assert f"{knee}the load." in said
    assert "Up to 8 requests/s, p99 ITL has grown by a larger factor than the load." in said
    assert not any("knee" in each or "larger factor" in each for each in Page(found()).of("p"))


# -- charts


def test_latencies_shares_and_tokens_are_drawn_against_the_load() -> None:
    text = found()
    titles = [each.findtext("title") for each in charts(text)]
    assert titles == [
        "share of requests that met the contract, by load",
        "TTFT by load",
        "ITL by load",
        "End to end by load",
        "output tokens per second by load",
        "prompt tokens per second by load",
    ]
    share, ttft, _, e2e, _, _ = charts(text)
    # Its contract has no end to end.
    assert [len(each.findall(".//line[@class='limit']")) for each in (share, ttft, e2e)] == [
        1,
        1,
        0,
    ]
    assert {each.text for each in ttft.findall("text")} >= {"p50", "p95", "p99", "contract: 500 ms"}
    assert len(ttft.findall(".//circle")) == 3 * len(LEVELS)
    assert len(share.findall(".//circle")) == len(LEVELS)


def test_the_run_is_drawn_over_its_time_with_gaps_where_nothing_is_known() -> None:
    before = len(charts(found()))
    text = found(series=SERIES)
    due, servers, cache, ttft, itl = charts(text)[before:]
    assert [each.findtext("title") for each in (due, servers, cache, ttft, itl)] == [
        "Requests due per second, over time",
        "Requests in the servers, over time",
        "KV cache in use, over time",
        "TTFT of each step's requests, over time",
        "ITL of each step's requests, over time",
    ]
    lines = [[path.get("d", "").count("M") for path in each.findall(".//path")]
             for each in (due, servers, cache, ttft, itl)]  # fmt: skip
    assert lines == [[1, 1], [2, 2], [2], [2, 2], [2, 2]], "a second piece after each gap"
    assert not due.findall(".//circle")
    marks = [each.findtext("title") for each in ttft.findall("line[@class='mark']")]
    assert marks == ["2 requests/s", "4 requests/s"], "where levels begin"
    assert [len(each.findall("line[@class='limit']")) for each in (servers, ttft, itl)] == [0, 1, 1]
    assert {each.text for each in due.findall("text")} >= {"due", "failed", "s"}


def test_a_long_run_has_minutes_on_its_axis() -> None:
    minutes = charts(found(series=replace(SERIES, step_seconds=300.0)))[-1]
    assert {each.text for each in minutes.findall("text")} >= {"min", "10", "30"}


def test_a_chart_fits_a_telephone_of_400_pixels() -> None:
    """Nothing is scaled down there, and no chart has a width that makes the page wider."""
    for each in charts(found(series=SERIES)):
        _, _, width, _ = map(float, each.get("viewBox", "").split())
        assert width <= 400 - 2 * 14, "the page's own margin"
        assert each.get("width") is None
        for text in each.findall("text"):
            long = 6.5 * len(text.text or "")
            at, anchor = float(text.get("x", "")), text.get("text-anchor")
            start = at - {"start": 0, "middle": long / 2, "end": long}[anchor or "start"]
            assert start >= -2, text.text
            assert start + long <= width + 2, text.text


def test_equal_results_are_equal_pages() -> None:
    one, other = (found(series=SERIES, closed=CLOSED) for _ in range(2))
    assert one == other


def test_the_open_loop_stands_beside_the_closed_one() -> None:
    text = found(closed=CLOSED)
    part = text[text.index("<h2>Open loop beside closed loop</h2>") :]
    rows = [
        Page(f"<table><tr>{row.partition('</tr>')[0]}</tr></table>").of("td")
        for row in part.split("<tr>")[2:4]
    ]
    assert rows[0][:4] == ["open", "4 requests/s", "8 requests/s", "4"]
    assert rows[1][:4] == ["closed", "8 concurrent requests", "12 concurrent requests", "8"]
    assert "use the result of the open loop" in part
    assert "<h2>Levels of the closed loop</h2>" in text
    assert "closed loop" not in found()


def test_each_share_has_its_interval_and_its_verdict() -> None:
    share = charts(found())[0]
    said = [each.findtext("title") or "" for each in share.findall(".//circle")]
    assert said[0] == "2 requests/s: 100.0% of requests met the contract (98.5% to 100.0%), kept"
    assert said[-1] == "8 requests/s: 50.0% of requests met the contract (46.0% to 54.0%), missed"
    styles = [each.get("class") for each in share.findall(".//g/g")]
    assert styles == ["kept", "kept", "unknown", "missed"]
    # From the intervals: a whisker and its two ends for each.
    assert len(share.findall(".//line[@class='whisker']")) == 3 * len(LEVELS)
    zero, whole = number(share, "0 %"), number(share, "100 %")
    last = share.findall(".//g/g")[-1].find("line")
    assert last is not None
    ends = sorted((zero - float(last.get(at, ""))) / (zero - whole) for at in ("y1", "y2"))
    assert ends == pytest.approx([0.46, 0.54], abs=1e-3)


def number(chart: ET.Element, label: str) -> float:
    """Return where on y the line of a label of the axis is: a label stands 4 pixels lower."""
    return next(float(e.get("y", "")) for e in chart.findall("text") if e.text == label) - 4


def series(values: Sequence[tuple[float, float]]) -> list[Series]:
    return [Series("one", "a", [Point(x, y, "") for x, y in values])]


def test_equal_factors_of_latency_are_equal_distances() -> None:
    chart = Chart("t", "x", "s", series([(1, 0.01), (2, 0.1), (4, 1.0)]), logarithmic=True)
    circles = ET.fromstring(draw(chart)).findall(".//circle")
    x, y = ([float(each.get(at, "")) for each in circles] for at in ("cx", "cy"))
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.01)
    assert (x[2] - x[1]) == pytest.approx(2 * (x[1] - x[0]), abs=0.01)


def test_the_contract_is_always_on_the_chart() -> None:
    for limit in (0.0001, 0.5, 1000.0):
        chart = Chart("t", "x", "s", series([(1, 0.1), (2, 0.2)]), limit, logarithmic=True)
        page = ET.fromstring(draw(chart))
        grid = [float(each.get("y1", "")) for each in page.findall("line[@class='grid']")]
        line = page.find("line[@class='limit']")
        assert line is not None
        assert min(grid) <= float(line.get("y1", "")) <= max(grid)


def test_any_values_give_a_drawing_of_finite_numbers() -> None:
    for values in ([(0.0, 0.0)], [(1e-9, 1e-9)], [(5.0, 0.0), (5.0, 3.0)], [(1e6, 1e9), (1, 1)]):
        for logarithmic in (False, True):
            text = draw(Chart("t", "x", "s", series(values), 0.5, (0.0, 1.0), logarithmic))
            numbers = re.findall(r' (?:x|y|cx|cy|x1|y1|x2|y2|width)="([^"]+)"', text)
            assert len(numbers) > 8
            assert all(math.isfinite(float(each)) for each in numbers)
    assert draw(Chart("t", "x", "s", [Series("none", "a", [])])) == ""


def test_the_band_lies_between_what_kept_and_what_missed() -> None:
    page = charts(found())[1]
    band = page.find("rect[@class='band']")
    assert band is not None
    places = {e.text: float(e.get("x", "")) for e in page.findall("text") if e.text in ("4", "8")}
    left = float(band.get("x", ""))
    assert left == pytest.approx(places["4"], abs=0.1)
    assert left + float(band.get("width", "")) == pytest.approx(places["8"], abs=0.1)
    alone = charts(found(found=RateBracket(4.0, None, "most")))[1]
    assert alone.find("rect") is None


def test_labels_of_series_do_not_cover_each_other() -> None:
    near = [Series(name, "a", [Point(1, y, "")]) for name, y in (("p50", 1.0), ("p95", 1.001))]
    texts = ET.fromstring(draw(Chart("t", "x", "s", near))).findall("text")
    one, other = (float(e.get("y", "")) for e in texts if e.text in ("p50", "p95"))
    assert abs(one - other) >= 12


def test_values_are_written_with_their_unit() -> None:
    assert [value_text(v, "s") for v in (0.0005, 0.0421, 1.0, 12.34)] == [
        "0.5 ms", "42.1 ms", "1 s", "12.3 s",
    ]  # fmt: skip
    assert value_text(12_345.6, "tokens/s") == "12,346 tokens/s"


def test_the_workload_is_a_table_also_of_nested_values() -> None:
    text = found(workload={**WORKLOAD, "lengths": {"input": [1, 2]}})
    assert "<td>lengths.input</td><td>[1, 2]</td>" in text
    assert "<td>seed</td><td>7</td>" in text


def test_a_closed_loop_is_drawn_by_concurrency() -> None:
    page = charts(found(**IN_CLOSED_LOOP))[1]
    assert "concurrent requests" in {each.text for each in page.findall("text")}
    said = [each.findtext("title") or "" for each in page.findall(".//circle")]
    assert said[0].startswith("4 concurrent requests: ")


def test_a_model_that_makes_no_text_has_a_page_without_tokens() -> None:
    """It has one latency, to the end of the answer."""
    found = measurement(
        contract=Contract(e2e_seconds=0.5),
        levels=tuple(
            replace(each, ttft={}, itl={}, output_tokens_per_second=0.0) for each in LEVELS
        ),
        workload={"preset": "documents", "kind": "embed", "input": "lognormal:220:480", "seed": 1},
    )
    words = " ".join(text for _, text in Page(result_page(found)).words)
    assert "lognormal:220:480" in words
    assert "whole answer" in words
