"""A long command's progress is in the log, and the command is as without it.

This machine is the node, and pyinfra's own command runs the deploy.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DEPLOY = """\
from contextlib import nullcontext
from pyinfra.api import QuoteString, StringCommand, operation
from gpufleet.operations import progress_watch

@operation()
def brought():
    with {around}:
        yield StringCommand("sh", "-c", QuoteString({script!r}), _timeout={timeout})

brought(name="bring it")
"""
GROWING = 'progress_watch.show_growth("stage lab/tiny", "models", seconds=60, total=64 << 20)'
# A MiB a second, until it has been seen; a minute at most.
BRING = (
    "mkdir models; for each in $(seq 60); do test -e seen && break; "
    "head -c 1048576 /dev/urandom >> models/model; sleep 1; done; "
)
LINE = re.compile(r"\[@local\] (stage lab/tiny: .*)")


def begin(
    project: Path, end: str, *flags: str, around: str = GROWING, timeout: int = 60
) -> subprocess.Popen[str]:
    """Run pyinfra in a folder made for it; what it says goes into the files out and err there."""
    project.mkdir()
    (project / "deploy.py").write_text(
        DEPLOY.format(around=around, script=BRING + end, timeout=timeout)
    )
    (project / "inventory.py").write_text('nodes = ["@local"]\n')
    with (project / "out").open("w") as out, (project / "err").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "pyinfra", *flags, "inventory.py", "deploy.py"],
            cwd=project,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
        )


def said(project: Path) -> str:
    return (project / "err").read_text()


def until_said(project: Path, lines: int, then: int = 0) -> None:
    """Wait for so many lines of progress, and seconds; then let the command go on to its end."""
    deadline = time.monotonic() + 50
    while len(LINE.findall(said(project))) < lines and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(then)
    (project / "seen").touch()


def test_a_command_that_fails_is_as_without_its_progress(tmp_path: Path) -> None:
    """The same status, the same on stdout, and the same on stderr but for the lines of progress."""
    fails = "echo 'the canary is dead' >&2; exit 3"
    runs = [
        begin(tmp_path / "with", fails, "--json", "--yes"),
        begin(tmp_path / "without", fails, "--json", "--yes", around="nullcontext()"),
    ]
    until_said(tmp_path / "with", 2)
    (tmp_path / "without/seen").touch()
    assert [each.wait(timeout=90) for each in runs] == [1, 1]

    assert (tmp_path / "with/out").read_text() == (tmp_path / "without/out").read_text()
    lines = said(tmp_path / "with").splitlines()
    assert [each for each in lines if not LINE.search(each)] == said(
        tmp_path / "without"
    ).splitlines()
    assert "the canary is dead" in said(tmp_path / "with")
    first, second, *_ = LINE.findall(said(tmp_path / "with"))
    assert re.fullmatch(r"stage lab/tiny: \d+\.0 of 64\.0 MiB \(\d+ s\)", first)
    rate = r"stage lab/tiny: \d+\.0 of 64\.0 MiB, [\d.]+ [KM]iB/s, .* left \(\d+ s\)"
    assert re.fullmatch(rate, second)
    assert "\r" not in said(tmp_path / "with")


def test_a_command_that_is_done_reports_as_ever(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", "", "--json", "--yes")
    until_said(tmp_path / "run", 1)
    assert run.wait(timeout=90) == 0

    document = json.loads((tmp_path / "run/out").read_text())
    assert [each["success"] for each in document["results"]["operations"]] == [["@local"]]
    assert LINE.findall(said(tmp_path / "run"))


def test_a_dry_run_looks_at_nothing(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", "", "--dry", "--json")
    assert run.wait(timeout=60) == 0

    assert json.loads((tmp_path / "run/out").read_text())["plan"]
    assert LINE.findall(said(tmp_path / "run")) == []
    assert not (tmp_path / "run/models").exists()


def test_progress_ends_with_a_command_that_is_past_its_deadline(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", "", "--yes", timeout=8)
    # pyinfra waits for the shell of this machine even so.
    until_said(tmp_path / "run", 1, then=8)

    assert run.wait(timeout=90) == 1
    before, _, after = said(tmp_path / "run").partition("timed out")
    assert LINE.search(before)
    assert after
    assert not LINE.search(after)
