"""Examples in docstrings say what the code does: all of them are run."""

from __future__ import annotations

import subprocess
import sys

from tests.support.checkout import ROOT

SOURCE = ROOT / "src/gpufleet"
# In a process of its own: modules at the border patch gevent and pyinfra when they are imported.
PROGRAM = """\
import doctest, importlib, sys

run = failed = 0
for name in sys.argv[1:]:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    run, failed = run + found.attempted, failed + found.failed
print(f"{failed} of {run} failed")
sys.exit(failed > 0 or run < len(sys.argv) - 1)
"""


def test_every_example_in_a_docstring_holds() -> None:
    modules = [
        ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
        for file in sorted(SOURCE.rglob("*.py"))
        if "\n    >>> " in file.read_text()
    ]
    assert len(modules) > 80
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
