"""A preflight as a page: one file, the same bytes for the same lines, and no markup of nodes."""

from __future__ import annotations

import json
import re

import jsonschema

from gpufleet.preflight.line import CHECKS, Line, Preflight, Status, Verdict, order_lines
from gpufleet.preflight.preflight_page import preflight_page
from tests.support.checkout import ROOT
from tests.unit.preflight.sound_fleet import INVENTORY, NOW

SCHEMA = json.loads((ROOT / "docs/reference/preflight.schema.json").read_text())


def found(*lines: Line) -> Preflight:
    return Preflight(INVENTORY, NOW, "0.2.0", order_lines(lines))


SOUND = tuple(Line(each, "fleet", Verdict(Status.OK, "is so", "as proven")) for each in CHECKS)
BAD = Line("tls", "front", Verdict(Status.FAIL, "its certificate has expired", "ended", "renew it"))


def test_the_same_preflight_gives_the_same_bytes_and_another_one_others():
    assert preflight_page(found(*SOUND)) == preflight_page(found(*SOUND))
    assert preflight_page(found(*SOUND)) != preflight_page(found(*SOUND, BAD))


def test_every_line_is_there_and_what_is_to_be_done_comes_first():
    page = preflight_page(found(*SOUND, BAD))
    assert page.index("What you have to do") < page.index("renew it") < page.index("All lines")
    assert page.count(">OK</td>") == len(CHECKS)
    assert page.count(">FAIL</td>") == 2
    assert "What you have to do" not in preflight_page(found(*SOUND))


def test_nothing_is_loaded_and_what_a_node_wrote_is_text():
    evil = Verdict(Status.WARN, "<script>alert(1)</script>", "\x1b[2J\x00<img src=x>", "a & b")
    page = preflight_page(found(Line("plan", "<b>", evil)))
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|img|b|link|iframe)\b", page)
    assert "\x1b" not in page
    assert "\x00" not in page
    assert "a &amp; b" in page


def test_a_page_can_be_printed():
    assert "@media print" in preflight_page(found(*SOUND))


def test_programs_get_every_line_with_its_proof():
    document = json.loads(json.dumps(found(*SOUND, BAD).as_json()))
    jsonschema.validate(document, SCHEMA)
    assert document["schema"] == 1
    assert document["counts"] == {"OK": len(CHECKS), "WARN": 0, "UNKNOWN": 0, "FAIL": 1}
    (line,) = [each for each in document["lines"] if each["status"] == "FAIL"]
    assert line == {
        "check": "tls",
        "status": "FAIL",
        "subject": "front",
        "what": "its certificate has expired",
        "proof": "ended",
        "remedy": "renew it",
    }


def test_the_schema_has_every_check_and_every_status():
    line = SCHEMA["$defs"]["line"]["properties"]
    assert line["check"]["enum"] == [*CHECKS]
    assert line["status"]["enum"] == [*map(str, Status)]
