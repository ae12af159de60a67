"""Imports go one way: pure modules do not know pyinfra, what runs on nodes knows nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

SOURCE = ROOT / "src/gpufleet"

# The border: only these may import pyinfra (docs/architecture.md).
BORDER = {
    "acting",
    "asking",
    "balancing",
    "call_order",
    "connection",
    "converge",
    "course",
    "distributing",
    "dry_run",
    "facts",
    "fleet",
    "inventory",
    "invocation",
    "looking",
    "meanwhile",
    "proof",
    "pyinfra_variables",
    "reaching",
    "rebooting",
    "refusal",
    "serving",
    "streams",
    "survey",
}


def imported(path: Path) -> set[str]:
    """Return every module that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


PURE = sorted(
    path
    for folder in (
        "",
        "architecture/",
        "bundle/",
        "checks/",
        "flags/",
        "imported/",
        "monitoring/**/",
        "upgrade/",
    )
    for path in SOURCE.glob(f"{folder}*.py")
    if path.stem not in BORDER
)
ON_NODE = sorted(SOURCE.glob("on_node/*.py"))


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_a_pure_module_does_not_know_pyinfra(path: Path) -> None:
    assert {name for name in imported(path) if name.split(".")[0].startswith("pyinfra")} == set()


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_a_pure_module_does_not_import_the_border_when_loaded(path: Path) -> None:
    """A command may import the border when it runs (inside a function), never when it is loaded."""
    tree = ast.parse(path.read_text())
    top = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            top |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert {name for name in top if name.removeprefix("gpufleet.") in BORDER} == set()


@pytest.mark.parametrize("path", ON_NODE, ids=lambda path: path.stem)
def test_what_runs_on_a_node_needs_only_an_old_python(path: Path) -> None:
    """Python 3.8's syntax and standard library; the NVML binding and its own parts travel along."""
    ast.parse(path.read_text(), feature_version=(3, 8))
    outside = {
        name
        for name in imported(path)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "pynvml"}
        and not name.startswith("gpufleet.on_node")
    }
    assert outside == set()
