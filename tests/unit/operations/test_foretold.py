"""What operations would change is foretold by a dry run: pyinfra's own, of this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gpufleet.gpu_software.rdma import required_modules
from gpufleet.operations.load_modules import LOADED
from gpufleet.settings.gpu_settings import Rdma

DEPLOY = """\
from gpufleet.converge.desired import DesiredState, File, Line, Listing
from gpufleet.operations.converge import Converge
from gpufleet.operations.load_modules import LOADED, load_rdma_modules
from gpufleet.settings.gpu_settings import Rdma

node = Converge(DesiredState(File("{folder}/file", b"a\\n"), Line("{folder}/lines", "one line")))
node.files(name="files")
node.lines(name="lines")
load_rdma_modules(Converge(DesiredState(Listing(LOADED))), Rdma(), name="modules")
"""


def test_files_lines_and_modules_that_are_not_there_are_foretold(tmp_path: Path) -> None:
    (tmp_path / "deploy.py").write_text(DEPLOY.format(folder=tmp_path))
    (tmp_path / "inventory.py").write_text('nodes = ["@local"]\n')
    (tmp_path / "lines").write_text("another\n")

    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", "--dry", "inventory.py", "deploy.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    foretold = re.findall(r"would (.*)", done.stderr)
    assert [each for each in foretold if f"{tmp_path}/file" in each]
    assert [each for each in foretold if f"{tmp_path}/lines" in each]
    missing = [each for each in required_modules(Rdma()) if not Path(LOADED, each).exists()]
    loads = [each for each in foretold if each.startswith("load ")]
    assert loads == [f"load {module}" for module in missing]
    assert not (tmp_path / "file").exists()
