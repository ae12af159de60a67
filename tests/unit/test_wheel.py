"""The wheel brings all that a fleet needs: tried in an empty environment and directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.wheel import build_wheel, install_wheel

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
MODEL = ROOT / "tests/data/models/Qwen--Qwen3-8B.json"
SHIPPED = ("config.py", "deploys", "docs/*.md", "locks", "roles", "templates")
PROJECT = "gpufleet/_project/"

VARIABLES = """\
vllm: {version: 0.32.0, lock: locks/vllm-0.32.0.txt, listen: 127.0.0.1}
serving:
  small: {model: /srv/small, kind: generate, tensor_parallel: 2, replicas: 1}
"""
INVENTORY = """\
from gpufleet import inventory
globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01"]}))
"""
THIS_MACHINE = INVENTORY.replace("gpu-01", "@local")
LOCK_OF = """\
from gpufleet.inventory.loader import read
print(read("inventories/fleet.py").nodes["gpu-01"].settings.vllm.lock)
"""


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(wheel, tmp_path_factory.mktemp("environment"))


def test_it_has_every_file_of_deploys_roles_templates_and_locks(wheel: Path) -> None:
    tracked = run("git", "ls-files", "--", *SHIPPED, cwd=ROOT).stdout.splitlines()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    brought = {name.removeprefix(PROJECT) for name in names if name.startswith(PROJECT)}
    assert len(tracked) > 50
    assert set(tracked) - brought == set()


def test_every_page_that_a_message_names_is_in_it(wheel: Path) -> None:
    """`gpufleet docs` prints them: no message of an installed package names a file it lacks."""
    rooms = ("src", "roles", "deploys")
    sources = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    named = {
        page
        for file in sources
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    with zipfile.ZipFile(wheel) as archive:
        missing = {page for page in named if f"{PROJECT}{page}" not in archive.namelist()}
    assert missing == {"docs/web-configuration.md"}  # the exporter toolkit's own


def test_it_has_nothing_of_the_lab_the_tests_and_example_inventories(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    inside = {name.removeprefix(PROJECT).split("/")[0] for name in names if PROJECT in name}
    assert inside == {each.split("/")[0] for each in SHIPPED}
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"gpufleet"}
    assert [name for name in names if "__pycache__" in name] == []


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """Return a directory with what an operator has: settings, a model's config.json, no project."""
    (tmp_path / "serving.yml").write_text(VARIABLES)
    (tmp_path / "model.json").write_text(json.dumps(json.loads(MODEL.read_text())["config"]))
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        ("presets",),
        ("size", "model.json", "--gpu", "H100"),
        ("flags", "explain", "dtype"),
        ("docs", "docs/checks/driver-loaded.md"),
        ("plan", "--vars", "serving.yml", "--nodes", NODES / "h100x8.json"),
    ],
    ids=lambda command: command[0],
)
def test_what_needs_no_nodes_runs_in_an_empty_directory(
    installed: Path, empty: Path, command: tuple[object, ...]
) -> None:
    done = run(installed, *command, cwd=empty)

    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) > 5


def test_a_fleet_that_has_no_lock_of_its_own_gets_the_one_of_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    for file, text in (("inventories/fleet.py", INVENTORY), ("group_vars/gpu.yml", VARIABLES)):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)

    found = run(installed.with_name("python"), "-c", LOCK_OF, cwd=tmp_path)

    assert found.returncode == 0, found.stderr
    lock = Path(found.stdout.strip())
    assert lock.is_relative_to(installed.parents[1])
    assert lock.read_bytes() == (ROOT / "locks/vllm-0.32.0.txt").read_bytes()


def test_a_deploy_of_the_wheel_runs_with_its_roles_and_the_only_inventory(
    installed: Path, tmp_path: Path
) -> None:
    """`check` only reads: this machine, which need not be fit."""
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories/fleet.py").write_text(THIS_MACHINE)

    done = run(installed, "deploy", "check", cwd=tmp_path)
    refused = run(installed, "deploy", "check", "-y", "--dry", cwd=tmp_path)

    assert f"Loading: {installed.parents[1]}" in done.stderr
    assert "driver-loaded" in done.stdout, done.stderr
    assert refused.returncode == 1
    assert "--dry with -y" in refused.stderr


def test_the_lab_says_that_it_needs_a_checkout(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "lab", "up", cwd=tmp_path)

    assert done.returncode == 2
    assert "needs the project's directory" in done.stderr
    assert "Traceback" not in done.stderr
