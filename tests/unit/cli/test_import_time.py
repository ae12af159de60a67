"""What a command does not need, it does not load: that is most of the time until it answers."""

from __future__ import annotations

import subprocess
import sys

from tests.support.rows import each_row

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


def test_a_deploy_that_prints_no_table_does_not_load_what_prints_them() -> None:
    assert "rich" not in loaded("import gpufleet.fleet.run")
