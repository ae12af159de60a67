"""What runs on nodes needs Python 3.8 alone: its syntax, its library, and what runs at import."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

SOURCE = ROOT / "src"
OLDEST = min(
    (
        path
        for path in Path.home().glob(".pyenv/versions/3.*/bin/python")
        if tuple(map(int, path.parts[-3].split(".")[:2])) >= (3, 8)
    ),
    key=lambda path: tuple(map(int, path.parts[-3].split("."))),
    default=None,
)
IMPORT = """
import importlib, sys, traceback
sys.path.insert(0, {source!r})
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException:
        print("==", name)
        traceback.print_exc(file=sys.stdout)
"""


@pytest.mark.skipif(OLDEST is None, reason="no Python from 3.8 on below ~/.pyenv")
def test_every_program_is_imported_by_the_oldest_python_at_hand() -> None:
    """Nothing runs but what has to: a program that starts by being imported fails here too."""
    names = [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in sorted((SOURCE / "gpufleet/on_node").glob("*/[!_]*.py"))
        if path.stem != "litellm_serve"  # runs in LiteLLM's own environment, not before it
    ]
    assert len(names) > 90
    done = subprocess.run(
        [str(OLDEST), "-I", "-B", "-c", IMPORT.format(source=str(SOURCE)), *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == ""
