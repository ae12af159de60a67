"""`on_node/` imports nothing of the rest: its paths are compared with `node_paths`."""

from __future__ import annotations

import ast
import re

from gpufleet import node_paths
from gpufleet.fleet import facts_timer
from gpufleet.on_node.monitoring import node_facts
from tests.support.checkout import ROOT
from tests.support.rows import each_row

ON_NODE = ROOT / "src/gpufleet/on_node"
ROOTS = ("CONFIGURATION", "STATE", "CACHE", "PROGRAMS", "RUN", "ARCHIVES", "VLLM", "VLLM_STATE")
OURS = re.compile(r"/(opt|etc|run|var/lib|var/cache|usr/local/libexec)/(gpufleet|vllm)\b[\w./-]*")

SAME = [
    ("change/releases.py", "CACHE", "UV_CACHE"),
    ("change/releases.py", "RELEASES", "RELEASES"),
    ("change/systemd.py", "STARTED", "STARTED"),
    ("common/change_files.py", "HOME", "CHANGE"),
    ("common/system.py", "RELEASES", "RELEASES"),
    ("common/textfile.py", "DIRECTORY", "TEXTFILES"),
    ("converge/place_files.py", "HOME", "STATE"),
    ("converge/snapshot.py", "STARTED_DIRECTORY", "STARTED"),
    ("gpu_software/driver_reload.py", "STATE", "STATE"),
    ("monitoring/node_facts.py", "DECLARED", "FACTS_DECLARED"),
    ("monitoring/record.py", "DEPLOYS", "DEPLOYS"),
    ("packages/apt_transaction.py", "HOME", "APT"),
    ("packages/apt_transaction.py", "STATE", "PACKAGES"),
    ("probe/cordon_mark.py", "HOME", "CHANGE"),
    ("watchdog/watchdog.py", "CONFIGURATION", "WATCHDOG_CONFIGURATION"),
]


def constants(file: str) -> dict[str, str]:
    return {
        target.id: str(node.value.value)
        for node in ast.parse((ON_NODE / file).read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@each_row(("file", "name", "path"), SAME)
def test_both_sides_mean_the_same_path(file: str, name: str, path: str) -> None:
    assert constants(file)[name] == getattr(node_paths, path)


def test_every_path_of_ours_lies_in_a_folder_that_is_named() -> None:
    named = tuple(getattr(node_paths, each) for each in ROOTS)
    found = {
        value
        for file in ON_NODE.glob("*/*.py")
        for value in constants(str(file.relative_to(ON_NODE))).values()
        if OURS.fullmatch(value)
    }
    assert len(found) > 15
    assert [each for each in sorted(found) if not each.startswith(named)] == []


def test_the_facts_are_looked_for_where_they_are_written() -> None:
    assert f"{node_paths.TEXTFILES}/{node_facts.FILE}" == facts_timer.FACTS


def test_every_path_is_said_what_it_is_for() -> None:
    lines = (ROOT / "src/gpufleet/node_paths.py").read_text().splitlines()
    undocumented = [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if re.match(r"[A-Z_]+ = ", line) and not after.startswith('"""')
    ]
    assert undocumented == []
