"""Programs sent to nodes: nothing shown, nothing changed on the way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpufleet import payload
from gpufleet.payload import Payload


@pytest.mark.parametrize(
    "shown", [repr, str, "{}".format, "{!r:>40}".format, "%s".__mod__, lambda p: f"{[p]}"]
)
def test_no_way_of_printing_shows_what_travels(shown):
    """pyinfra prints the arguments of facts with -v and --debug; parameters may be secrets."""
    text = shown(Payload("hunter2\n"))

    assert "hunter2" not in text
    assert "program of 8 characters" in text


def test_what_is_sent_is_the_whole_text():
    """The ways in which pyinfra and subprocess write a str keep the content."""
    program = Payload("print('sent')\n")

    assert program.encode() == b"print('sent')\n"
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, check=True
    )
    assert done.stdout == "sent\n"


def test_a_program_ends_with_a_newline():
    """Otherwise pyinfra appends one by formatting, which would send the disguise instead."""
    assert payload.program("probe", nvml=True).endswith("\n")


def test_secrets_are_not_in_the_text_as_they_are():
    """So that no part of it that is cut out and printed (an error's context) shows them."""
    program = payload.program("probe", key="hunter2-hunter2-hunter2")

    assert "hunter2" not in program.encode().decode()


def test_an_unknown_program_is_a_mistake_of_ours():
    with pytest.raises(FileNotFoundError):
        payload.program("no-such-program")
