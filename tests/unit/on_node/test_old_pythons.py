"""What runs on nodes needs Python 3.8 alone: its syntax, its library, and what runs at import.

Every machine reads the programs by vermin's tables of what came with which Python. One that has a
Python 3.8 below ~/.pyenv runs them under it as well.
"""

from __future__ import annotations

import re
import subprocess
import sys
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


def newer_than_3_8(*paths: Path) -> list[str]:
    """Return each thing in these files that came with a Python after 3.8: "FILE:LINE: 3.9: ..."."""
    vermin = Path(sys.executable).with_name("vermin")
    options = ("--no-tips", "--no-config-file", "--violations", "-t=3.8-", "--format", "parsable")
    done = subprocess.run([vermin, *options, *paths], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.+?):(\d+):\d*:[^:]*:3\.(\d+):(.+)$", done.stdout, re.MULTILINE)
    return [
        f"{Path(file).name}:{line}: 3.{minor}: {what}"
        for file, line, minor, what in found
        if int(minor) > 8
    ]


def test_no_program_uses_what_came_after_python_3_8() -> None:
    programs = [
        path
        for path in sorted((SOURCE / "gpufleet/on_node").rglob("*.py"))
        # These two run in the environment of a release, not under the node's own Python.
        if path.parent.name != "flags" and path.stem != "litellm_serve"
    ]
    assert len(programs) > 90
    assert newer_than_3_8(*programs) == []


def test_what_came_later_is_found(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import functools\nfunctools.cache\n'a'.removeprefix('b')\nmatch 1:\n    case 1: pass\n"
    )
    assert newer_than_3_8(tmp_path / "late.py") == [
        "late.py:2: 3.9: 'functools.cache' member",
        "late.py:3: 3.9: 'str.removeprefix' member",
        "late.py:4: 3.10: pattern matching",
    ]


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
        check=True,
    )
    assert done.stdout == ""
