"""A look beside the build of a release says what uv does now, out of what uv has said so far."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.artifacts.release import VLLM, build_script, release
from gpufleet.on_node.transfer.build_progress import parse_progress
from gpufleet.remote import payload
from gpufleet.settings.serving_settings import Vllm
from tests.support.rows import each_row

# uv 0.13.9 into a file, with a cache that had none of them; the last line is compile_bytecode's.
SAID = """\
Using Python 3.11.7 environment at: v
Resolved 4 packages in 20.37s
Downloading scipy (35.9MiB)
Downloading numpy (16.0MiB)
 Downloaded numpy
 Downloaded scipy
Prepared 4 packages in 1m 16s
Installed 4 packages in 7.39s
 + idna==3.20
Bytecode compiled of 1512 of 1513 files
"""


def until(line: str) -> str:
    """Return what uv has said up to a line, and with it."""
    return SAID[: SAID.index(line) + len(line) + 1]


def test_large_downloads_are_told_with_those_that_are_not_there() -> None:
    found = parse_progress(until(" Downloaded numpy"))

    assert found["step"] == "packages are downloaded"
    assert (found["bytes"], found["left"]) == (16 << 20, ["scipy"])
    assert found["total"] == int(35.9 * (1 << 20)) + (16 << 20)


@each_row(
    ("last", "step"),
    [
        ("Using Python 3.11.7 environment at: v", None),
        ("Resolved 4 packages in 20.37s", "packages are downloaded"),
        ("Prepared 4 packages in 1m 16s", "packages are installed"),
        ("Installed 4 packages in 7.39s", "bytecode is compiled"),
        (" + idna==3.20", "bytecode is compiled"),
        ("Bytecode compiled of 1512 of 1513 files", "the installation is tested"),
    ],
)
def test_what_is_no_download_is_said_by_its_step(last: str, step: str | None) -> None:
    found = parse_progress(until(last))
    assert (found["step"], found["total"], found["left"]) == (step, 0, [])


@pytest.mark.parametrize("there", [True, False])
def test_a_node_answers_in_any_case(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "said").write_text(SAID)
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=payload.program("transfer/build_progress", said=str(tmp_path / "said")).encode(),
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["step"] == ("the installation is tested" if there else None)


def test_a_build_that_fails_says_why_and_is_not_whole(tmp_path: Path) -> None:
    """What uv says goes into a file that a look reads; its reasons must not stay there."""
    vllm = Vllm.model_validate(
        {"version": "0.32.0", "lock": "l", "python": sys.executable, "listen": "127.0.0.1"}
    )
    wanted = release(vllm, b"vllm==0.32.0 --hash=sha256:00\n", b"uv==0 --hash=sha256:00\n")
    script = build_script(wanted)
    for there, here in ((VLLM.home, tmp_path / "home"), (VLLM.cache, tmp_path / "cache")):
        script = script.replace(there, str(here))
    home = tmp_path / "home"
    tool = Path(next(line.split()[-1] for line in script.splitlines() if "-m venv" in line))
    (tool / "bin").mkdir(parents=True)
    (tool / ".complete").touch()
    (tool / "bin/uv").write_text(
        '#!/bin/sh\ntest "$1" = venv || { echo "no such wheel" >&2; exit 2; }\n'
    )
    (tool / "bin/uv").chmod(0o755)

    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (1, "no such wheel\n")
    assert not list(home.glob("releases/*/.complete"))
    assert (home / ".said").stat().st_mode & 0o777 == 0o600
