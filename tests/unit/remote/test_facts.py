"""Facts: what arrives, and what an operator reads."""

from __future__ import annotations

import io
import json
import re
import unicodedata

import pytest
from pyinfra.api.exceptions import FactProcessError
from rich.console import Console

from gpufleet.checks.admission import finding_sentence
from gpufleet.checks.finding import Finding, GpuId, Report, Severity
from gpufleet.checks.table import report_table
from gpufleet.remote.facts import NodeSnapshot
from gpufleet.sanitize import printable
from tests.unit.remote.answers import ROWS


def test_words_of_the_node_before_the_document_do_no_harm():
    document = next(row.answer for row in ROWS if row.program == "converge/snapshot")

    said = NodeSnapshot().process(["Authorized users only.", json.dumps(document)])

    assert said == document


@pytest.mark.parametrize("output", [["Killed"], ["one", "two", "42"], ["[]"], []])
def test_what_is_no_document_is_quoted(output):
    """As the one exception that pyinfra turns into a failed host instead of an aborted run."""
    with pytest.raises(FactProcessError, match="the snapshot of the node printed") as error:
        NodeSnapshot().process(output)

    assert (output[-1] if output else "nothing") in str(error.value)


@pytest.mark.parametrize("output", ["[" * 200_000, '{"a":' * 200_000], ids=["lists", "objects"])
def test_a_document_nested_without_end_is_none(output):
    with pytest.raises(FactProcessError, match="printed no JSON document"):
        NodeSnapshot().process([output])


def test_of_a_line_without_end_the_beginning_is_quoted():
    with pytest.raises(FactProcessError) as error:
        NodeSnapshot().process(["x" * 5_000_000])

    assert len(str(error.value)) < 1200


# What a terminal obeys: ESC, BEL, CR and BS, the C1 form of ESC [, directional overrides and
# isolates, zero-width characters, a line separator, half of a surrogate pair.
ORDERS = "\x1b]0;owned\x07 \r\b \x9b2J \u202e\u2066 \u200b\u2028 \ud800"


def harmless(text):
    """Whether a terminal shows `text` and obeys nothing in it."""
    return not any(unicodedata.category(each)[0] == "C" for each in text if each != "\n") and (
        set(text) & {"\u2028", "\u2029"} == set()
    )


def test_what_a_terminal_would_obey_is_written_out():
    assert printable("a\x1b[2J\x07\r\x9b\u202e") == r"a\x1b[2J\x07\r\x9b\u202e"
    assert not harmless(ORDERS)
    assert harmless(printable(ORDERS))


def test_words_stay_as_they_are():
    words = "NVRM: Xid 79, GPU hat die Größe verloren\n零"
    assert printable(words) == words


@pytest.mark.parametrize("output", [[ORDERS], [f'["{ORDERS}"]'], ["", ORDERS, "]"]])
def test_what_a_node_says_instead_of_a_document_is_no_order_to_the_terminal(output):
    with pytest.raises(FactProcessError) as error:
        NodeSnapshot().process(output)

    assert harmless(str(error.value))


FINDING = Finding(
    check="foreign-processes",
    node="gpu-01",
    severity=Severity.BLOCK,
    found=ORDERS,
    gpu=GpuId(3, "0000:0f:00.0", ORDERS),
    expected=ORDERS,
    source="NVML",
)


def test_a_finding_that_quotes_a_node_is_no_order_to_the_terminal():
    assert harmless(finding_sentence(FINDING))


def test_a_table_that_quotes_a_node_is_no_order_to_the_terminal():
    """Also where it is styled for a terminal, whose own orders are taken out here."""
    console = Console(file=io.StringIO(), width=500, force_terminal=True, color_system="truecolor")
    console.print(
        report_table(Report(findings=(FINDING,), facts={}, nodes=("gpu-01",)), everything=True)
    )

    printed = console.file.getvalue()
    assert "owned" in printed
    assert harmless(re.sub(r"\x1b\[[0-9;]*m", "", printed))
