"""A stranger finds any line: docs/architecture.md names every room, and file names are unique.

The order in which rooms may import each other is import-linter's, in `make lint`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from gpufleet.engines.engine import engines
from gpufleet.settings import engine_flags
from tests import conftest
from tests.support.checkout import ROOT

SOURCE = ROOT / "src/gpufleet"
MODULES = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
ROOMS = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


def test_each_room_has_a_row_and_each_row_a_room() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", ARCHITECTURE, re.MULTILINE)) == ROOMS


def test_at_most_ten_files_lie_beside_the_rooms_and_the_page_names_them() -> None:
    leaves = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    assert len(leaves) <= 10
    listed = ARCHITECTURE[ARCHITECTURE.index("The files beside the rooms") :].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == leaves


def test_the_page_names_files_that_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", ARCHITECTURE))
    missing = {name for name in named if not ((SOURCE / name).exists() or (ROOT / name).exists())}
    assert len(named) > 8
    assert missing == set()


def test_no_two_files_have_one_name_but_a_program_and_its_other_end() -> None:
    places = defaultdict(list)
    for path in MODULES:
        places[path.name].append(path.relative_to(SOURCE))
    twice = [
        paths
        for paths in places.values()
        if len(paths) > 2
        or (len(paths) == 2 and len({Path(str(p).removeprefix("on_node/")) for p in paths}) > 1)
    ]
    assert twice == []


def test_a_room_of_more_than_ten_files_has_a_readme() -> None:
    rooms = {path.parent for path in MODULES} - {SOURCE}
    large = {room for room in rooms if len([*room.glob("[!_]*.py")]) > 10}
    assert [str(room) for room in sorted(large) if not (room / "README.md").is_file()] == []


def test_what_runs_on_a_node_needs_only_the_standard_library() -> None:
    """Its own parts and the NVML binding travel along; nothing else is on a node."""
    outside = set()
    # It is installed, and runs under the Python of LiteLLM's release.
    installed = SOURCE / "on_node/network/litellm_serve.py"
    for path in {*SOURCE.glob("on_node/*/*.py")} - {installed}:
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 8))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            outside |= {
                (path.name, name)
                for name in names
                if name.split(".")[0] not in {*sys.stdlib_module_names, "pynvml"}
                and not name.startswith("gpufleet.on_node")
            }
    assert outside == set()


# Where an operator's or a release's own words are read or written: settings, lines of other tools,
# parsers of releases, logs, programs and locks.
READS_NAMES = (
    "settings", "importer", "flags", "failures", "artifacts", "cli", "on_node/flags",
    "on_node/serving/sglang_serve.py", "node_paths.py", "serving/readiness.py",
)  # fmt: skip
# The list of vLLM's metrics in the reference, and which of them a release's parser has.
LISTS_METRICS = ("monitoring/metrics/vllm_metrics.py", "on_node/flags/metrics.py")


def test_names_and_metrics_of_an_engine_stand_in_its_room() -> None:
    """But for vLLM's own name, which units, folders and sections of settings have for all."""
    outside = set()
    others = [each.name for each in engines() if each.name != engine_flags.DEFAULT]
    for path in SOURCE.rglob("*.py"):
        inside = str(path.relative_to(SOURCE))
        tree = ast.parse(path.read_text())
        docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        words = [
            each.value
            for each in ast.walk(tree)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
            if id(each) not in docs
        ]
        for engine in engines():
            if not inside.startswith((f"engines/{engine.name}/", *LISTS_METRICS)):
                metric = re.compile(rf"\b{engine.prefix}(\w|$)")
                outside |= {(inside, each) for each in words if metric.search(each)}
        if not inside.startswith((*READS_NAMES, *(f"engines/{each}/" for each in others))):
            outside |= {(inside, each) for each in words for name in others if name in each.lower()}
    assert outside == set()


def test_a_unit_test_has_a_deadline_of_its_own(request: pytest.FixtureRequest) -> None:
    (seconds,) = request.node.get_closest_marker("timeout").args
    assert 60 <= seconds < 600 * 10


def test_tests_run_without_xdist_too() -> None:
    """`pytest -p no:xdist` has no such hook: an internal error, unless it is optional."""
    assert vars(conftest.pytest_xdist_make_scheduler)["pytest_impl"]["optionalhook"]
