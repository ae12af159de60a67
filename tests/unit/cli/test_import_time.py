"""What a command does not need, it does not load: that is most of the time until it answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.support.warm_command import GPUFLEET

SLOW = {"cryptography", "gevent", "jinja2", "paramiko", "pydantic", "pyinfra", "rich", "yaml"}


def loaded(program: str) -> set[str]:
    """Return the packages that a program has loaded when it is done, of those that are slow."""
    ends = "; import sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program + ends],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return SLOW & {name.partition(".")[0] for name in done.stderr.split()}


@each_row(
    ("line", "needed"),
    [
        (["--help"], set()),
        (["plan", "--help"], set()),
        (["check", "--help"], set()),
        (["flags", "check", "--vllm", "0.32.0", "--", "m/m", "-tp", "4"], set()),
        (["presets"], {"pydantic", "rich", "yaml"}),
    ],
    ids=lambda given: " ".join(sorted(given)) if isinstance(given, set) else given[0],
)
def test_a_command_loads_what_it_needs(line: list[str], needed: set[str]) -> None:
    program = f"import sys; from gpufleet.cli.main import main; sys.argv[1:] = {line}; main()"
    assert loaded(program) == needed


@each_row(
    "line",
    [
        "batch examples/explained/inventories/prod.py m README.md -o {folder}/out",
        "import tests/unit/cli/test_import_time.py",
        "recipes Qwen/Qwen3-32B",
        "settings vllm.version",
        "size {folder}/config.json --gpu H100",
        "validate examples/explained/inventories/prod.py --without-secrets",
    ],
)
def test_a_command_that_no_test_on_nodes_starts_finds_what_it_imports(
    line: str, tmp_path: Path
) -> None:
    """Other tests run it where all is imported already: tests/support/warm_command.py."""
    about = json.loads((ROOT / "tests/data/models/Qwen--Qwen3-32B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about["config"]))
    words = line.format(folder=tmp_path).split()
    done = subprocess.run([GPUFLEET, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1, 2}
    assert "Traceback" not in done.stderr
    assert done.stdout + done.stderr


def test_a_deploy_that_prints_no_table_does_not_load_what_prints_them() -> None:
    assert "rich" not in loaded("import gpufleet.fleet.run")
