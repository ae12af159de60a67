"""`pyinfra --diff` says how files will differ, and never what not everybody may read."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpufleet.converge.content_diff import MOST_BYTES, MOST_LINES, lines
from gpufleet.converge.desired import File
from gpufleet.remote import payload
from tests.support import warm_command
from tests.support.rows import each_row

PATH = "/etc/vllm/x.conf"


def said(content: bytes) -> dict[str, Any]:
    return {"content": base64.b64encode(content).decode()}


def shown(new: bytes, found: Any, **more: Any) -> list[str]:
    return list(lines(File(PATH, new, **more), found))


def test_a_changed_line_is_shown_with_what_is_around_it() -> None:
    before = "".join(f"line {number}\n" for number in range(9)).encode()
    assert shown(before.replace(b"line 4", b"line four"), said(before)) == [
        f"--- {PATH}",
        f"+++ {PATH}",
        "@@ -3,5 +3,5 @@",
        " line 2",
        " line 3",
        "-line 4",
        "+line four",
        " line 5",
        " line 6",
    ]


def test_a_new_file_is_shown_as_a_whole() -> None:
    assert shown(b"a\nb\n", None) == ["--- /dev/null", f"+++ {PATH}", "@@ -0,0 +1,2 @@", "+a", "+b"]


@pytest.mark.parametrize(
    ("found", "more", "why"),
    [
        (
            {"hidden": True},
            {},
            "the current content is not shown: the mode of the file does not allow all users",
        ),
        (
            None,
            {"mode": 0o600},
            "the difference is not shown, because with mode 0600 not all users",
        ),
        (
            said(b"hunter2\n"),
            {"mode": 0o640},
            "the difference is not shown, because with mode 0640",
        ),
        (
            said(b"hunter2\n"),
            {"mode": 0o600, "secret": True},
            "the difference is not shown, because the content is a secret",
        ),
        (
            {"hidden": True},
            {"mode": 0o600, "secret": True},
            "the difference is not shown, because the content is a secret",
        ),
    ],
)
def test_what_not_everybody_may_read_is_not_shown(
    found: Any, more: dict[str, Any], why: str
) -> None:
    """Neither what is there nor what will be: a password may have got into any file."""
    (line,) = shown(b"hunter2-new\n", found, **more)
    assert "hunter2" not in line
    assert line.startswith(f"{PATH}: {why}")


@each_row(
    ("new", "found", "text"),
    [
        (b"a\n", {"error": "Input/output error"}, "Input/output error"),
        (b"a\n", {"bytes": 9_000_000}, "the file has 9000000 bytes"),
        (b"a\n", "the node gave no reason", "the node gave no reason"),
        (b"a\n", {"content": "no base64"}, "the node's answer is not valid"),
        (b"a\n", ["nonsense"], "the node's answer is not valid"),
        (b"a\0b", said(b"text\n"), "5 bytes become 3. The content is binary"),
        (b"text\n", said(b"\xff\xfe"), "2 bytes become 5. The content is binary"),
        (b"a" * (MOST_BYTES + 1), None, "or too large to be shown"),
    ],
)
def test_what_cannot_be_shown_says_why_in_one_line(new: bytes, found: Any, text: str) -> None:
    (line,) = shown(new, found)
    assert text in line


def test_a_difference_without_end_is_cut() -> None:
    assert len(shown(b"x\n" * 5000, said(b"y\n" * 5000))) == MOST_LINES + 1


def test_what_a_node_says_gives_no_orders_to_a_terminal() -> None:
    assert "\x1b" not in "".join(shown(b"a\n", said(b"\x1b[2J\n")))


# -- on the node -----------------------------------------------------------------------------------


def read(*paths: Path, most: int = 1000) -> dict[str, Any]:
    program = payload.program("converge/read_files", paths=[str(path) for path in paths], most=most)
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=program.encode(), capture_output=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)["files"]
    return found


def test_the_node_tells_what_small_files_say_that_everybody_may_read(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("open", "closed", "large", "link", "pipe", "gone")}
    for name in ("open", "closed", "large"):
        paths[name].write_bytes(b"x" * (1001 if name == "large" else 1000))
        paths[name].chmod(0o640 if name == "closed" else 0o644)
    paths["link"].symlink_to(paths["open"])
    os.mkfifo(paths["pipe"], 0o644)

    found = {Path(path).name: each for path, each in read(*paths.values()).items()}

    assert found["open"] == said(b"x" * 1000)
    assert found["closed"] == {"hidden": True}
    assert found["large"] == {"bytes": 1001}
    assert set(found["link"]) == {"error"}
    assert found["pipe"] is found["gone"] is None


# -- as operators type it --------------------------------------------------------------------------

DEPLOY = """
from gpufleet.operations.converge import Converge
from gpufleet.converge.desired import File, DesiredState

Converge(DesiredState(
    File({there!r}, b"port = 2\\n"),
    File({secret!r}, b"hunter2\\n", mode=0o600, secret=True),
)).files(name="configuration")
"""


def test_a_dry_run_with_diff_shows_it_and_one_without_does_not(tmp_path: Path) -> None:
    there, secret = tmp_path / "there.conf", tmp_path / "secret"
    there.write_text("port = 1\n")
    deploy = tmp_path / "deploy.py"
    deploy.write_text(DEPLOY.format(there=str(there), secret=str(secret)))

    def run(*options: str) -> str:
        done = warm_command.run_pyinfra(["--dry", *options, "@local", deploy], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    plain, differing = run(), run("--diff")

    for output in (plain, differing):
        assert f"would write {there}: its content differs" in output
        assert "hunter2" not in output
    assert "-port = 1" in differing
    assert "+port = 2" in differing
    assert f"{secret}: the difference is not shown" in differing
    assert "port = " not in plain
    assert there.read_text() == "port = 1\n"


def test_a_missing_final_newline_is_a_difference() -> None:
    assert shown(b"a\nb\n", said(b"a\nb")) == [
        f"--- {PATH}",
        f"+++ {PATH}",
        "@@ -1,2 +1,2 @@",
        " a",
        "-b",
        "\\ No newline at end of file",
        "+b",
    ]


def test_carriage_returns_are_a_difference() -> None:
    assert shown(b"a\n", said(b"a\r\n"))[3:] == ["-a\\r", "+a"]


def test_a_line_ends_at_a_newline_alone() -> None:
    assert shown(b"a\x0cb\n", said(b"c\n"))[3:] == ["-c", "+a\\x0cb"]
