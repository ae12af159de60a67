"""A node cannot fill the controller's memory by what a command prints."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from queue import Queue

import pytest
from pyinfra.connectors import util

from gpufleet.inventory.output_bound import MOST_BYTES, MOST_LINES, bounded_reader
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DEPLOY = """
from pyinfra.operations import server

server.shell(name="printed", commands=[{command!r}])
"""
INVENTORY = """
from gpufleet import inventory
globals().update(inventory.load(__file__, groups={"gpu": ["@local"]}))
"""
# Printed at its end by the controller: what it had in memory at most, in KiB. getrusage() would
# count the memory of the process that started it, too.
MEASURED = """
import runpy, sys
try:
    sys.argv = ["pyinfra", *sys.argv[1:]]
    runpy.run_module("pyinfra", run_name="__main__")
finally:
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "well"),
    [
        pytest.param("yes", False, id="lines"),
        pytest.param("yes >&2", False, id="lines of errors"),
        pytest.param("yes | tr -d '\\n'", False, id="one line"),
        pytest.param(f"yes | head -n {MOST_LINES}", True, id="as many lines as it may"),
        pytest.param(f"yes | tr -d '\\n' | head -c {MOST_BYTES}", True, id="as much as it may"),
    ],
)
def test_a_command_that_prints_without_end_is_ended(
    tmp_path: Path, command: str, well: bool
) -> None:
    (tmp_path / "config.py").write_text((ROOT / "config.py").read_text())
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories/here.py").write_text(INVENTORY)
    (tmp_path / "deploy.py").write_text(DEPLOY.format(command=command))

    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "-y", "inventories/here.py", "deploy.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode == 0) is well, done.stderr[-2000:]
    ended = "gpufleet ended this command, because it printed more than 16 MiB"
    assert (ended in done.stderr) is not well
    assert len(done.stderr) < 20_000
    assert int(done.stdout.split()[-1]) < 400 << 10


@each_row(
    ("printed", "well"),
    [
        pytest.param(b"x" * (16 << 20), True, id="16 MiB in a line"),
        pytest.param(b"x" * (16 << 20) + b"\n", False, id="a byte more"),
        pytest.param(b"\n" * 200_000, True, id="200,000 lines"),
        pytest.param(b"\n" * 200_001, False, id="a line more"),
    ],
)
def test_a_command_may_print_16_mib_and_200000_lines(printed: bytes, well: bool) -> None:
    """Beyond that nothing of it is kept, and nothing further is read."""
    found, stream = Queue(), io.BytesIO(printed)

    bounded_reader(util.read_buffer)("stdout", stream, found)

    lines = list(found.queue)
    assert stream.closed is not well
    if well:
        assert sum(len(each.line) + 1 for each in lines) >= len(printed)
    else:
        (said,) = lines
        assert said.buffer_name == "stderr"
        assert "more than 16 MiB or 200,000 lines" in said.line
