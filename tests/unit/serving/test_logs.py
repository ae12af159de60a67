"""One journal of several nodes': merged by time, bounded, without secrets."""

from __future__ import annotations

import json

import pytest

from gpufleet.errors import FleetError
from gpufleet.on_node.common import linux_facts, unit_journal
from gpufleet.planning.stage import Stage
from gpufleet.serving.logs import Journals, format_lines, parse_since
from gpufleet.serving.unit import render_unit
from gpufleet.settings.serving_settings import Served, Vllm
from tests.support.rows import each_row

KEY = "f3a9c1d2e4b5a697"
STAGE = Stage("llama", 0, "gpu-01", (0,), ("GPU-5f1c",), 8000, 1)

# As `journalctl --output=json` of systemd 252 has them.
ENTRY = {
    "__CURSOR": "s=1;i=a",
    "__REALTIME_TIMESTAMP": "1795290210947490",
    "_PID": "5093",
    "PRIORITY": "6",
    "MESSAGE": "Application startup complete.",
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A node's tree with the unit of one stage, and its key."""
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    for folder in ("etc/systemd/system", "etc/vllm/credentials", "usr/bin"):
        (tmp_path / folder).mkdir(parents=True)
    vllm = Vllm(version="0.32.0", lock="x", listen="127.0.0.1", api_key_file="key")
    unit = render_unit(
        STAGE,
        Served(model="/srv/llama"),
        vllm,
        release="0.32.0-1a2b",
        credentials={"api-key": "0" * 64},
    )
    (tmp_path / "etc/systemd/system/vllm-llama-0.service").write_text(unit.content)
    (tmp_path / "etc/vllm/credentials/api-key").write_text(KEY + "\n")
    return tmp_path


@pytest.fixture
def asked(root, monkeypatch, capsys):
    """`asked(entries, **parameters)`: what the program prints; its journalctl says the entries."""

    def ask(entries, *, error="", status=0, **parameters):
        (root / "entries").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        program = root / "usr/bin/journalctl"
        program.write_text(
            f'#!/bin/sh\necho "$*" >{root}/asked\ntac {root}/entries\n'
            f"echo '{error}' >&2\nexit {status}\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(
            unit_journal, "PARAMETERS", {"stage": "llama-0", "lines": 5, **parameters}
        )
        unit_journal.main()
        return json.loads(capsys.readouterr().out)

    return ask


def answer(*said, rank=0, **more):
    """What on_node/common/unit_journal.py prints; a line is (seconds, text)."""
    return {
        "schema": 1,
        "here": ["llama-0"],
        "rank": rank,
        "clock": 100_000_000,
        "lines": [[int(at * 1e6), 7, 6, text] for at, text in said],
        "more": False,
        "cursor": None,
        "clocks": {},
        **more,
    }


def read(*answers, lines=100):
    """Take rounds of answers in turn; return the texts of the last, and the journals."""
    journals = Journals("llama-0", lines, {})
    for each in answers:
        found = journals.take(each)
    return [line.text for line in found], journals


# -- on the node


def test_a_node_says_its_lines_with_time_and_rank(asked):
    found = asked([ENTRY])

    assert found["lines"] == [[1795290210947490, 5093, 6, "Application startup complete."]]
    assert (found["rank"], found["here"], found["cursor"]) == (0, ["llama-0"], "s=1;i=a")
    assert not found["more"]


def test_no_secret_of_the_unit_leaves_the_node(asked):
    said = f"GET /v1/models Authorization: Bearer {KEY}; key={KEY}, hf_abcdefghijklmnopqrstuv"
    printed = json.dumps(asked([{**ENTRY, "MESSAGE": said}, {**ENTRY, "MESSAGE": KEY * 400}]))

    assert KEY not in printed
    assert "hf_abcdef" not in printed
    assert "key=<api-key>" in printed


def test_secrets_that_stand_in_the_unit_are_hidden_too(asked, root):
    unit = root / "etc/systemd/system/vllm-llama-0.service"
    text = unit.read_text().replace(
        "Environment=", "Environment=MY_TOKEN=abcdefgh1\nEnvironment=", 1
    )
    unit.write_text(text.replace("--port", "--api-key abcdefgh2 --port", 1))
    (line,) = asked([{**ENTRY, "MESSAGE": "args: {'api_key': ['abcdefgh2']} abcdefgh1"}])["lines"]

    assert line[3] == "args: {'api_key': ['<api-key>']} <MY_TOKEN>"


def test_a_key_that_may_not_be_read_is_hidden_where_its_header_names_it(asked, root):
    (root / "etc/vllm/credentials/api-key").unlink()
    (line,) = asked([{**ENTRY, "MESSAGE": f"authorization: bearer {KEY}"}])["lines"]

    assert line[3] == "authorization: bearer <hidden>"


def test_more_lines_than_were_asked_for_are_left_out_and_said(asked):
    entries = [{**ENTRY, "MESSAGE": str(count), "__CURSOR": f"i={count}"} for count in range(6)]
    found = asked(entries, lines=5)

    assert [line[3] for line in found["lines"]] == ["1", "2", "3", "4", "5"]
    assert found["more"]
    assert found["cursor"] == "i=5"


@pytest.mark.parametrize(
    ("cursor", "after"), [("i=3", ["4", "5"]), ("i=5", []), ("i=gone", ["1", "2", "3", "4", "5"])]
)
def test_lines_after_a_cursor_are_those_that_are_new(asked, cursor, after):
    entries = [{**ENTRY, "MESSAGE": str(count), "__CURSOR": f"i={count}"} for count in range(1, 6)]
    found = asked(entries, lines=9, at=12, cursor=cursor)

    assert [line[3] for line in found["lines"]] == after
    assert found["cursor"] == "i=5"


def test_long_lines_do_not_make_a_long_answer(asked):
    found = asked([{**ENTRY, "MESSAGE": "x" * 40_000}] * 1000, lines=1000)

    assert len(json.dumps(found)) < 2 << 20
    assert found["more"]


def test_a_line_without_end_is_skipped_and_those_around_it_are_not():
    printed = unit_journal.Printed()
    for piece in (b"one\n", *[b"x" * (1 << 19)] * 4, b"end\nt", b"wo\n"):
        printed.take(piece)

    assert printed.lines == [b"one", b"two"]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([104, 105, 255], "hi\ufffd"),
        (["one", "two"], "one\ntwo"),
        (None, "(a line too long for the journal's reader)"),
    ],
)
def test_messages_that_are_no_text_are_shown_all_the_same(asked, said, text):
    (line,) = asked([{**ENTRY, "MESSAGE": said}])["lines"]

    assert line[3] == text


@pytest.mark.parametrize(
    ("parameters", "argument"),
    [
        ({"at": 12}, "--since=@12"),
        ({}, "--reverse"),
        ({}, "--lines=6"),
    ],
)
def test_the_journal_is_asked_for_no_more_than_is_wanted(asked, root, parameters, argument):
    asked([ENTRY], **parameters)

    assert argument in (root / "asked").read_text()


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        ("No journal files were opened due to insufficient permissions.", "no_permission"),
        ("No journal files were found.", "absent"),
    ],
)
def test_a_journal_that_cannot_be_read_is_not_an_empty_one(asked, error, missing):
    assert asked([], error=error, status=1)["lines"]["missing"] == missing
    assert asked([], status=1)["lines"] == []


# -- merged


def test_lines_of_all_nodes_stand_in_the_order_of_time():
    texts, _ = read(
        {"b": answer((1, "one"), (3, "three"), rank=1), "a": answer((2, "two"), (3, "first"))}
    )

    assert texts == ["one", "two", "first", "three"]


def test_lines_of_one_moment_keep_the_order_that_their_node_wrote_them_in():
    texts, _ = read({"a": answer((1, "z"), (1, "y"), (1, "x"))})

    assert texts == ["z", "y", "x"]


def test_the_last_lines_of_all_together_are_shown():
    texts, _ = read({"a": answer((1, "1"), (4, "4")), "b": answer((2, "2"), (3, "3"))}, lines=2)

    assert texts == ["3", "4"]


def test_a_node_that_does_not_answer_costs_its_own_lines_only():
    texts, journals = read({"a": answer((1, "one")), "b": "no answer within 30 s"})

    assert texts == ["one"]
    assert not journals.whole
    assert "b: no answer within 30 s" in journals.notes[0]


@each_row(
    "broken",
    [
        {},
        answer(lines=[[1]]),
        answer((10**22, "in the year 316889355")),
        answer(schema=2),
        answer(clock="x"),
        answer(lines=3),
        answer(here=3),
    ],
)
def test_a_node_that_answers_nonsense_does_too(broken):
    texts, journals = read({"a": answer((1, "one")), "b": broken})

    assert texts == ["one"]
    assert "b: the node's answer is invalid" in journals.notes[0]


def test_a_journal_that_cannot_be_read_matters_where_a_rank_is():
    unread = {"missing": "no_permission", "detail": "needs root"}
    _, journals = read({"a": answer(), "b": answer(lines=unread, here=["other-0"])})
    assert journals.whole

    _, journals = read({"a": answer(), "b": answer(lines=unread)})
    assert not journals.whole
    assert "b: the unit's journal cannot be read: needs root" in journals.notes[0]


def test_following_asks_only_for_what_is_new_and_only_nodes_that_have_ranks():
    journals = Journals("llama-0", 10, {})
    journals.take(
        {
            "a": answer((1, "one"), cursor="s=1;i=a"),
            "b": answer(here=["other-1"], rank={"missing": "absent"}),
            "c": "cannot be reached",
        }
    )

    assert journals.program("b") is None
    assert journals.program("c") is not None
    journals.notes.clear()
    journals.take({"a": answer((2, "two")), "c": "cannot be reached"})
    assert journals.notes == []  # said once


def test_lines_that_are_followed_do_not_get_lost_in_a_small_beginning():
    texts, journals = read(
        {"a": answer((1, "1"), (2, "2"))}, {"a": answer((3, "3"), (4, "4"), (5, "5"))}, lines=1
    )
    assert texts == ["3", "4", "5"]
    assert journals.whole

    journals.take({"a": answer((6, "6"), more=True)})
    assert not journals.whole
    assert "lines arrived at once" in journals.notes[0]


def test_a_replica_that_no_node_has_is_refused_with_those_that_there_are():
    with pytest.raises(FleetError, match=r"no node has llama-0.*llama-1"):
        read({"a": answer(here=["llama-1"], rank={"missing": "absent"})})


def test_clocks_that_differ_are_said_because_the_order_depends_on_them():
    _, journals = read({"a": answer((1, "x"), clocks={"b": 1500.0, "c": 3.0}), "b": answer()})

    assert journals.notes == [
        "the clocks of a and b differ by 1.5 s, so the order of their lines may be wrong by this "
        "time"
    ]


@pytest.mark.parametrize("lines", [0, -1, 10**9])
def test_a_look_is_bounded(lines):
    with pytest.raises(FleetError, match="--lines"):
        Journals("llama-0", lines, {})


@each_row("text", ["llama", "", "-n1", "a b-0", "--x", "../x-0"])
def test_what_names_no_replica_never_reaches_a_node(text):
    with pytest.raises(FleetError):
        Journals(text, 10, {})


def test_a_unit_names_its_replica():
    assert Journals("vllm-llama-0.service", 10, {}).replica == "llama-0"


@each_row(
    ("text", "wanted"),
    [
        (None, {}),
        ("-10m", {"ago": 600}),
        ("2 h", {"ago": 7200}),
        ("2026-11-21T19:40", {"at": 1795290000.0}),
        ("2026-11-21T20:40+01:00", {"at": 1795290000.0}),
    ],
)
def test_since_takes_spans_and_times(text, wanted):
    assert parse_since(text) == wanted


def test_since_refuses_what_is_neither():
    with pytest.raises(FleetError, match="is not a time"):
        parse_since("yesterday")


def test_a_message_can_neither_order_the_terminal_nor_pass_for_another_nodes():
    said = "\x1b[1;36m(EngineCore)\x1b[0;0m \x1b]0;owned\x07\n2026-11-21T00:00:00.000Z b 1 fake"
    journals = Journals("llama-0", 10, {})
    (text,) = format_lines(journals.take({"a": answer((1.5, said))}), ["a"])

    first, second = text.split("\n")
    assert first == r"1970-01-01T00:00:01.500Z a 0 (EngineCore) \x1b]0;owned\x07"
    assert second.startswith(" " * 29)
