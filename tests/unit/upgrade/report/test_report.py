"""The report of an upgrade says of each group for how long clients were without it, and why."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from gpufleet.upgrade.gates.baseline import ITL, TTFT, Traffic
from gpufleet.upgrade.plan.declare_version import Edit
from gpufleet.upgrade.plan.wave import Group, Wave
from gpufleet.upgrade.report.html import report_html
from gpufleet.upgrade.report.live_progress import Progress, style
from gpufleet.upgrade.report.report import Report, report
from gpufleet.upgrade.report.text import report_text
from gpufleet.upgrade.run.journal_entry import WORDS, Entry
from gpufleet.upgrade.run.state_machine import Driver
from gpufleet.upgrade.run.upgrade_journal import Journal
from tests.support.rows import each_row
from tests.unit.upgrade.simulated import ME, Fleet, Node, SimulatedActions, Unit

BEGAN = 1_795_350_000.0
"""2026-11-22T12:20:00Z, as `date -u -d @1795350000` says."""
ONE = Group("tiny-0", "stages", ("gpu-01",), ("tiny-0",), ("vLLM 0.31.0 -> 0.32.0",))
TWO = Group("wide-0", "stages", ("gpu-02", "gpu-03"), ("wide-0",))
WAVES = (Wave(1, (ONE,), canary=True), Wave(2, (TWO,)))


def entry(
    at: float, what: str, group: Group | None = None, node: str | None = None, /, **said: Any
) -> Entry:
    wave = None
    if group is not None:
        wave = next(each.number for each in WAVES if group in each.groups)
    return Entry(BEGAN + at, what, wave, group and group.id, node, said)


def served(p99: float, requests: int = 100, errors: int = 0) -> dict[str, Any]:
    """Return the counters of a window in which 99 % took as long as `p99` at most."""
    times = {p99 / 2: 0.0, p99: requests * 0.99, 10.0: float(requests), math.inf: float(requests)}
    return Traffic(
        30, {TTFT: times, ITL: times}, {"stop": requests}, {"2xx": requests, "5xx": errors}
    ).as_json()


HEAD = (
    entry(0, "started", id="20261122T122000Z-ab12", kind="upgrade", what="vLLM 0.32.0",
          inventory="inventories/prod.py"),
    entry(0, "owner", by="ann@desk", pid=7),
    entry(1, "locked", nodes=["gpu-01", "gpu-02", "gpu-03"]),
    entry(
        2,
        "planned",
        waves=[
            {"number": w.number, "canary": w.canary, "groups": [g.as_json() for g in w.groups]}
            for w in WAVES
        ],
        seconds={"1": 90},
        remarks=["gpu-09 is cordoned: left as it is"],
    ),
    entry(3, "confirmed", by="ann@desk"),
    entry(3, "preparing", log="prepare.log"),
    entry(60, "prepared"),
    entry(90, "baseline", traffic={"tiny-0": served(0.04), "wide-0": served(0.04)}),
    Entry(BEGAN + 95, "wave", 1, None, None, {}),
)  # fmt: skip
CHANGED = (
    entry(100, "draining", ONE),
    entry(104, "drained", ONE, left=2, seconds=4.0),
    entry(104, "switching", ONE),
    # The node's clock is 1000 s ahead: it stopped at 104.5, was down at 105, started at 105.5.
    entry(106, "switched", ONE, "gpu-01", stopped_at=BEGAN + 1104.5, down_at=BEGAN + 1105,
          started_at=BEGAN + 1105.5, clock=BEGAN + 1106, cut=[]),
    entry(106, "switched", ONE, seconds={"gpu-01": 1.0}),
    entry(136, "ready", ONE, seconds=30.0, load_seconds={"tiny-0": 29.5}),
    entry(138, "judged", ONE, gate="golden", passed=True, reasons=[]),
    entry(138, "undraining", ONE),
    entry(139, "undrained", ONE),
    entry(199, "soaked", ONE, seconds=60, traffic={"tiny-0": served(0.02, errors=1)}),
    entry(200, "judged", ONE, gate="traffic", passed=True, reasons=["alerts: not judged"]),
    entry(200, "done", ONE),
)  # fmt: skip
BACK = (
    Entry(BEGAN + 205, "wave", 2, None, None, {}),
    entry(210, "draining", TWO),
    entry(211, "drained", TWO, left=0, seconds=1.0),
    entry(211, "switching", TWO),
    entry(212, "switched", TWO, seconds={}),
    entry(242, "ready", TWO, seconds=30.0, load_seconds={"wide-0": 29.0}),
    entry(244, "judged", TWO, gate="golden", passed=False, reasons=["it <answers> differently"]),
    entry(244, "failed", TWO, why=["it <answers> differently"], by="engine"),
    entry(245, "restoring", TWO),
    entry(246, "restored", TWO, "gpu-02", cut=["vllm-wide-0.service"]),
    entry(246, "restored", TWO, seconds={}),
    entry(266, "ready", TWO, seconds=20.0, load_seconds={"wide-0": 19.0}),
    entry(266, "undraining", TWO),
    entry(267, "undrained", TWO),
    entry(267, "returned", TWO),
    entry(270, "stopped", why=["one group failed, and 0 are allowed (`upgrade.failures`)"]),
    entry(271, "unlocked", nodes=[]),
)
WHOLE = (*HEAD, *CHANGED, *BACK)


def test_a_replica_is_away_from_its_drain_until_it_gets_requests_again() -> None:
    """100 to 139: 4 s of drain, 29.5 s of load, 2 s of golden prompts, and the rest is our own."""
    one, two = report(WHOLE).groups

    assert one.away_seconds == 39
    assert one.drain_seconds == 4
    assert one.load_seconds == 29.5
    assert one.judge_seconds == 2
    assert one.own_seconds == 39 - 4 - 29.5 - 2
    # A group that goes back stays away until it is back: 210 to 267, and it loads twice.
    assert two.away_seconds == 57
    assert two.load_seconds == 29 + 19


def test_what_became_of_each_group_and_of_all_is_said() -> None:
    found = report(WHOLE)

    assert [each.outcome for each in found.groups] == ["done", "returned"]
    assert (found.outcome, found.id, found.by) == ("stopped", "20261122T122000Z-ab12", "ann@desk")
    assert "upgrade.failures" in found.why[0]
    assert found.left == 2
    assert found.groups[1].failures == ("it <answers> differently",)
    assert found.groups[1].nodes[0].cut == ("vllm-wide-0.service",)
    assert [wave.expected_seconds for wave in found.waves] == [90, None]


def test_all_of_it_is_held_against_the_sum_of_the_loads() -> None:
    found = report(WHOLE)

    assert found.load_seconds == 29.5 + 29 + 19
    assert found.waves_seconds == 267 - 95


def test_a_nodes_own_times_are_brought_to_our_clock() -> None:
    (node,) = report(WHOLE).groups[0].nodes

    assert node.gap_seconds == 1.0
    assert [(s.phase, s.start - BEGAN, s.end - BEGAN) for s in node.spans] == [
        ("stopping", 104.5, 105.0),
        ("down", 105.0, 105.5),
    ]


def test_latencies_of_before_and_after_stand_beside_each_other() -> None:
    """A p99 at the upper bound of the bucket that 99 of 100 are in is that bound."""
    (replica,) = report(WHOLE).groups[0].replicas
    assert replica.before
    assert replica.after

    assert (replica.before.ttft_p99, replica.after.ttft_p99) == (0.04, 0.02)
    assert (replica.before.errors, replica.after.errors) == (0, 1)
    assert report(WHOLE).groups[1].replicas[0].after is None


@each_row("until", range(len(WHOLE) + 1))
def test_of_a_journal_that_is_cut_off_anywhere_there_is_a_report(until: int) -> None:
    """Of one that is being written, or whose writer was killed."""
    found = report(WHOLE[:until])

    json.dumps(found.as_json(), allow_nan=False)
    assert printed(found)
    Page(report_html(found))
    for group in found.groups:
        assert all(span.seconds >= 0 for span in group.spans)
        assert group.away_seconds <= sum(span.seconds for span in group.spans)


def test_a_group_that_is_away_now_is_away_until_now() -> None:
    found = report((*HEAD, *CHANGED[:5]))

    assert found.outcome == "running"
    assert found.groups[0].outcome == "switched"
    assert found.groups[0].away_seconds == 6


def test_a_drain_that_was_begun_twice_counts_from_the_first_time() -> None:
    """The controller was killed in between: gateways had been told already."""
    again = (entry(130, "draining", ONE), entry(150, "drained", ONE, left=0))
    found = report((*HEAD, CHANGED[0], Entry(BEGAN + 120, "resumed", None, None, None, {}), *again))

    assert found.groups[0].away_seconds == 50
    assert found.groups[0].drain_seconds == 50


def test_the_text_has_a_line_a_group_and_the_reasons() -> None:
    text = printed(report(WHOLE))

    assert re.search(r"1 canary +tiny-0 +gpu-01 +changed +39\.0 s +4\.0 s +29\.5 s", text)
    assert re.search(r"2 +wide-0 +gpu-\[02-03\] +rolled back +57\.0 s", text)
    assert "40 ms -> 20 ms" in text
    assert "wide-0: golden did not pass: it <answers> differently" in text
    assert "2 requests had not finished" in text
    assert "1 of 2 groups changed" in text
    assert "note: gpu-09 is cordoned: left as it is" in text


def test_programs_get_times_in_utc_and_durations_in_seconds() -> None:
    found = json.loads(json.dumps(report(WHOLE).as_json()))
    group = found["waves"][0]["groups"][0]

    assert (found["started"], found["seconds"]) == ("2026-11-22T12:20:00Z", 271)
    assert (group["away_seconds"], group["requests_left"]) == (39, 2)
    assert group["phases"][0] == {
        "phase": "draining",
        "start": "2026-11-22T12:21:40Z",
        "seconds": 4,
    }
    assert group["gates"][0]["passed"] is True


@pytest.mark.parametrize(
    ("ill", "outcomes", "ends"),
    [
        ({}, ["done", "done"], "finish"),
        ({"tiny-1": "wrong"}, ["done", "returned"], "stop"),
        ({"tiny-0": "dead"}, ["returned", "waiting"], "stop"),
    ],
)
def test_what_the_engine_writes_is_what_the_report_reads(
    tmp_path: Path, ill: dict[str, str], outcomes: list[str], ends: str
) -> None:
    """Over a simulated fleet, by the engine itself: no step of it is without a line or a phase."""
    replicas = {"tiny-0": ("gpu-01",), "tiny-1": ("gpu-02",)}
    nodes = {at: Node({name: Unit()}) for name, (at,) in replicas.items()}
    fleet = Fleet(nodes, replicas, {"tiny": 1}, ill)
    groups = [Group(name, "stages", at, (name,)) for name, at in replicas.items()]
    heard = []
    with Journal.create(tmp_path, ME) as journal:
        journal.append("started", id=ME)
        journal.append(
            "planned",
            settings={"failures": 0},
            waves=[{"number": n, "groups": [g.as_json()]} for n, g in enumerate(groups, 1)],
        )
        journal.append("prepared")
        progress = Progress(journal.entries)
        journal.on_entry = lambda entry: heard.append(progress.on_entry(entry))
        end = Driver(journal, SimulatedActions(fleet), each_in_turn, lambda _: "me").run()
        found = report(journal.entries)

    assert end.next == ends
    assert [each.outcome for each in found.groups] == outcomes
    assert all(heard)
    for group in found.groups:
        assert (group.away_seconds > 0) == (group.outcome != "waiting")
        assert bool(group.failures) == (group.outcome == "returned")


def each_in_turn(walks: Sequence[Iterator[object]]) -> None:
    for walk in walks:
        for _ in walk:
            pass


# -- the page --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Reads a page as a browser does: which elements it has, what they load, what is written."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.loads: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.loads += [
            str(value)
            for name, value in attributes
            if name in {"src", "href", "data", "xlink:href"} or name.startswith("on")
        ]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_loads_and_runs_nothing() -> None:
    text = report_html(report(WHOLE))
    page = Page(text)

    assert page.loads == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.elements)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_what_people_and_nodes_wrote_is_text_in_the_page() -> None:
    hostile = '<script>alert(1)</script>"\x1b[2J\x00\ud800'
    group = Group("tiny-0", "stages", (hostile,), (hostile,), (hostile,))
    entries = (
        entry(0, "started", id="x", what=hostile, inventory=hostile),
        entry(2, "planned", waves=[{"number": 1, "groups": [group.as_json()]}]),
        entry(3, "noted", text=hostile),
        Entry(BEGAN + 5, "draining", 1, "tiny-0", None, {}),
        Entry(BEGAN + 9, "stuck", 1, "tiny-0", None, {"why": [hostile]}),
        entry(9, "stopped", why=[hostile]),
    )
    text = report_html(report(entries))
    page = Page(text)

    assert "script" not in page.elements
    assert "<script>alert(1)</script>" in page.words
    assert text.encode()  # a lone surrogate has no UTF-8
    assert "\x1b" not in text


def test_the_timeline_has_a_bar_for_each_phase_as_long_as_it_was() -> None:
    text = report_html(report(WHOLE))
    drawing = ET.fromstring(text[text.index("<svg viewBox") : text.rindex("</svg>") + 6])
    bars = {
        str(bar.findtext("title")): (str(bar.get("class")), float(str(bar.get("width"))))
        for bar in drawing.iter("rect")
    }
    loads = next(bars[said] for said in bars if said.startswith("tiny-0 loads"))
    drains = next(bars[said] for said in bars if said.startswith("tiny-0 drains"))

    assert (loads[0], drains[0]) == ("load", "drain")
    assert loads[1] / drains[1] == pytest.approx(30 / 4, rel=0.01)


# -- while it goes on ------------------------------------------------------------------------------


def lines(entries: Iterable[Entry], before: Iterable[Entry] = ()) -> list[str]:
    progress = Progress(before)
    return [line for each in entries if (line := progress.on_entry(each))]


def test_each_step_is_a_line_with_how_long_it_goes_on_and_what_is_left() -> None:
    found = lines(WHOLE)

    assert any(
        line.split("  ")[-1] == "tiny-0: drained in 4.0 s, 2 requests not finished"
        and "1 min 44 s" in line
        for line in found
    )
    assert any("wave 1 of 2" in line and "loaded: tiny-0 in 30 s" in line for line in found)
    assert any(line.endswith("tiny-0: done  (1 of 2 groups remaining)") for line in found)
    assert any(line.endswith("(no group remaining)") for line in found)
    assert any("gate golden did not pass: it <answers> differently" in line for line in found)
    assert any("vllm-wide-0.service" in line and "killed" in line for line in found)
    assert not any("\n" in line for line in found)


def test_who_takes_it_up_again_is_told_nothing_twice_and_counts_on() -> None:
    found = lines(BACK, (*HEAD, *CHANGED))

    assert len(found) + len(lines((*HEAD, *CHANGED))) == len(lines(WHOLE))
    assert found == lines(WHOLE)[-len(found) :]


def test_a_log_has_dates() -> None:
    progress = Progress()
    found = [progress.logged(each) for each in WHOLE]

    assert found[0] == "2026-11-22T12:20:00Z 0 s  upgrade 20261122T122000Z-ab12: vLLM 0.32.0"


def test_no_word_of_a_journal_is_too_much_for_it() -> None:
    """A word that says nothing to a person gives no line; none raises, with or without values."""
    progress = Progress(HEAD)
    for what in WORDS:
        entries = (entry(300, what), entry(300, what, ONE))
        for each in entries:
            progress.on_entry(each)
            assert isinstance(style(each), str)


def test_a_verdict_that_passed_is_plain_and_any_other_stands_out() -> None:
    passed, failed, unknown = (entry(1, "judged", passed=each) for each in (True, False, None))
    assert style(passed) == ""
    assert style(failed) == style(unknown) == "bold red"


def printed(found: Report) -> str:
    console = Console(width=300, file=io.StringIO(), highlight=False)
    console.print(report_text(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_lines_that_were_put_back_are_not_declared() -> None:
    """An upgrade that was broken off leaves the variables as they were."""
    edits = [
        Edit("group_vars/gpu.yml", line, key, "0.31.0", "0.32.0")
        for line, key in ((3, "version"), (4, "lock"))
    ]
    begun = (*HEAD, entry(4, "declared", files=[each.as_json() for each in edits]))
    assert len(report(begun).declared) == 2
    back = entry(5, "noted", text=f"put back: {edits[0].inverse}")
    (left,) = report((*begun, back)).declared
    assert "group_vars/gpu.yml:4: vllm.lock" in left
