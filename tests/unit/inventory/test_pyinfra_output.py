"""What a node says reaches the terminal without its escape sequences, also where pyinfra prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.inventory.pyinfra_output import echo, escape_unprintable
from tests.support.checkout import ROOT

CLIPBOARD, TITLE, CLEAR = r"\033]52;c;aGk=\007", r"\033]0;owned\007", r"\033[2J"
HOSTILE = rf"said{CLIPBOARD}{TITLE}{CLEAR}\033[8mhidden\033[32mgreen\302\233\r\377"
COLOURS = re.compile(rb"\x1b\[(?:[0-2]|3[1-7]|9[1-7])m")

DEPLOY = """
from pyinfra import host
from pyinfra.api import FactBase, FactProcessError
from pyinfra.operations import server

class Fails(FactBase):
    def command(self):
        return "printf '{said}' >&2; exit 1"

class Raises(FactBase):
    def command(self):
        return "printf '{said}'"

    def process(self, output):
        raise FactProcessError("\\n".join(output))

{what}
"""
RUNS = {
    "a failed operation": "server.shell(commands=[\"printf '{said}' | tee /dev/stderr; exit 1\"])",
    "an operation that ends well": "server.shell(commands=[\"printf '{said}'; exit 0\"])",
    "a failed fact": "host.get_fact(Fails)",
    "a fact that cannot be read": "host.get_fact(Raises)",
    "an exception": "raise ValueError('{said}'.encode().decode('unicode_escape'))",
}


INVENTORY = """
from gpufleet import inventory
globals().update(inventory.load(__file__, groups={"gpu": ["@local"]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-vvv",)], ids=["plain", "-vvv"])
def test_no_escape_sequence_of_a_node_reaches_the_terminal(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "config.py").write_text((ROOT / "config.py").read_text())
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories/here.py").write_text(INVENTORY)
    said = HOSTILE.replace("\\", "\\\\")
    for what, call in RUNS.items():
        text = DEPLOY.replace("{what}", call).replace("{said}", said)
        (tmp_path / "deploy.py").write_text(text)
        command = [
            sys.executable,
            "-m",
            "pyinfra",
            "-y",
            *flags,
            "inventories/here.py",
            "deploy.py",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
        left = COLOURS.sub(b"", done.stdout + done.stderr)
        assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]", left), (what, left)
        if flags or what != "an operation that ends well":
            assert b"\\x1b]52;c;aGk=\\x07" in left, (what, left)


def test_pyinfras_own_colours_stay_and_no_others() -> None:
    assert escape_unprintable("\x1b[31m\x1b[1mred\x1b[0m\tx") == "\x1b[31m\x1b[1mred\x1b[0m\tx"
    assert (
        escape_unprintable("\x1b[8mhidden\x1b[38;5;0m\r\x9b")
        == "\\x1b[8mhidden\\x1b[38;5;0m\\r\\x9b"
    )


def test_what_is_printed_keeps_its_words_and_a_line_may_be_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for message in ("red\x1b]0;owned\x07", b"bytes\x07", None):
        echo(message)
    assert capsys.readouterr().out == "red\\x1b]0;owned\\x07\nbytes\\x07\n\n"
