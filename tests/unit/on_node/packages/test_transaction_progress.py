"""A look beside a package transaction says what it does now, and nothing of one that is over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.on_node.packages import steps
from gpufleet.on_node.packages.transaction_progress import look

NOTHING = {"schema": 1, "step": None, "bytes": None, "total": None, "line": None}


@pytest.fixture
def root(tmp_path: Path) -> str:
    steps.begin_log(str(tmp_path))
    return str(tmp_path)


def test_a_download_is_said_in_bytes_of_packages(root: str) -> None:
    partial = Path(root, "var/cache/apt/partial")
    partial.mkdir(parents=True)
    (partial / "a.deb").write_bytes(b"x" * 4096)
    (partial.parent / "b.deb").write_bytes(b"x" * 8192)
    (partial.parent / "pkgcache.bin").write_bytes(b"x" * 8192)
    steps.record_step(root, "downloads packages", "/var/cache/apt", 20000)

    found = look(root)

    assert found["step"] == "downloads packages"
    assert (found["bytes"], found["total"]) == (12288, 20000)


def test_another_step_is_said_with_the_last_line_of_its_command(root: str) -> None:
    steps.record_step(root, "changes 3 packages")
    assert (look(root)["step"], look(root)["line"]) == ("changes 3 packages", None)

    words = {"argv": ["printf", r"Unpacking\n\033[1mSetting up\033[0m foo (1.2) ...\r\n\n"]}
    steps.run(root, {**words, "seconds": 5, "stdin": ""})

    assert look(root)["line"] == "Setting up foo (1.2) ..."


def test_a_command_that_has_said_nothing_has_no_line(root: str) -> None:
    steps.record_step(root, "changes 3 packages")
    for argv in (["echo", "before"], ["true"]):
        steps.run(root, {"argv": argv, "seconds": 5, "stdin": ""})

    assert look(root)["line"] is None


def test_what_has_ended_or_was_killed_is_not_said(root: str) -> None:
    assert look(root) == NOTHING
    steps.record_step(root, "changes 3 packages")
    steps.stop_watcher(root)
    assert look(root) == NOTHING

    other = "from gpufleet.on_node.packages import steps; steps.record_step(%r, 'changes')" % root  # noqa: UP031
    subprocess.run([sys.executable, "-c", other], check=True)
    assert look(root) == NOTHING


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x"}', '{"pid": 1}'])
def test_what_cannot_be_read_is_not_said(root: str, text: str) -> None:
    Path(root + steps.STEP).write_text(text)

    assert look(root)["step"] is None


def test_what_cannot_be_written_down_stops_nothing(tmp_path: Path) -> None:
    steps.record_step(str(tmp_path / "none"), "changes 3 packages")
    steps.stop_watcher(str(tmp_path / "none"))

    assert not list(tmp_path.iterdir())
