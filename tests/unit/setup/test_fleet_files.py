"""The files of a new fleet: loaded as they are, short, and never written over a person's."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpufleet.inventory.loader import Fleet, read
from gpufleet.setup.first_model import ROWS, FirstModel
from gpufleet.setup.fleet_files import API_KEY, INVENTORY, KNOWN_HOSTS, render, write_files
from gpufleet.setup.hosts import Host
from gpufleet.setup.kinds import read_kinds
from tests.support.checkout import ROOT

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
HOSTS = (
    Host("gpu-01", "192.0.2.11", "admin"),
    Host("gpu-02", "192.0.2.12", "admin", 2222),
    Host("gpu-03", "gpu-03", "admin"),
)
PROFILES = {"gpu-01": "h100x8", "gpu-02": "h100x8", "gpu-03": "h200x8"}


def made(
    model: FirstModel | None = ROWS[0],
    given: dict[str, Any] | None = None,
    hosts: tuple[Host, ...] = HOSTS,
) -> dict[str, str]:
    documents = {
        name: json.loads((NODES / f"{profile}.json").read_text())
        for name, profile in PROFILES.items()
    }
    found = read_kinds(documents)
    files = render(hosts, found, model=model, release="0.32.0", given=given or {})
    return files | {KNOWN_HOSTS: "192.0.2.11 ssh-ed25519 AAAA\n"}


def loaded(root: Path, files: dict[str, str]) -> Fleet:
    list(write_files(root, files, api_key=True))
    return read(root / "inventories/fleet.py")


def test_the_files_load_without_a_remark_and_say_what_was_found(tmp_path: Path) -> None:
    fleet = loaded(tmp_path, made())

    assert fleet.remarks == ()
    node = fleet.nodes["gpu-02"]
    assert node.values["ssh_hostname"] == "192.0.2.12"
    assert node.values["ssh_port"] == 2222
    assert (node.values["ssh_user"], node.values["_sudo"]) == ("admin", True)
    assert node.groups[-1] == "gpu_h100x8"
    assert node.settings.gpu_lock
    assert node.settings.vllm
    assert node.settings.vllm.lock.endswith("locks/vllm-0.32.0.txt")
    assert node.settings.serving["qwen3-8b"].replicas == len(HOSTS)
    assert fleet.nodes["gpu-03"].settings.gpus.count == 8


def test_under_35_lines_of_settings_are_left_to_read(tmp_path: Path) -> None:
    """Without comments, and without the locks, which are values with a reason each."""
    files = made()

    lines = [
        line
        for path, text in files.items()
        if path.startswith("group_vars/") and not path.endswith(".lock.yml")
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert 10 < len(lines) < 35


def test_every_deploy_has_a_file_that_pyinfra_runs(tmp_path: Path) -> None:
    """Until a node is asked: this one is not reached, by the deploy and config.py of gpufleet."""
    shipped = {f"deploys/{file.name}" for file in (ROOT / "deploys").glob("*.py")}
    files = made(hosts=tuple(Host(name, "127.0.0.1", "admin", 1) for name in PROFILES))
    files[KNOWN_HOSTS] = ""
    list(write_files(tmp_path, files, api_key=True))

    assert {path for path in files if path.startswith("deploys/")} == shipped
    for words, says in (
        (["--dry", INVENTORY, "deploys/vllm.py"], "[gpu-01]"),
        (
            ["--no-wait", INVENTORY, "deploys/check.py"],
            "--no-wait: with this option, pyinfra exits with status 0",
        ),
    ):
        run = subprocess.run(
            [sys.executable, "-m", "pyinfra", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 1
        assert says in run.stdout + run.stderr
        assert "Traceback" not in run.stdout + run.stderr


def test_a_second_run_keeps_every_file_and_says_which_differ(tmp_path: Path) -> None:
    files = made()
    first = list(write_files(tmp_path, files, api_key=True))
    changed = tmp_path / "group_vars/gpu.yml"
    changed.write_text("serving: {}\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    second = list(write_files(tmp_path, files, api_key=True))

    assert all(each.new for each in first)
    assert not any(each.new for each in second)
    assert [each.path for each in second if each.differs] == ["group_vars/gpu.yml"]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_group_that_the_inventory_that_is_there_does_not_have_gets_no_variables(
    tmp_path: Path,
) -> None:
    """Nodes whose driver came meanwhile are of another kind; the inventory stays as it is."""
    list(write_files(tmp_path, made(), api_key=True))
    (tmp_path / "group_vars/gpu.yml").unlink()
    other = {"group_vars/gpu_l4x1.yml": "gpus: {}\n", "group_vars/gpu_l4x1.lock.yml": "a: 1\n"}

    second = list(write_files(tmp_path, made() | other, api_key=True))

    assert [each.path for each in second if each.left_out] == [*other]
    assert [each.path for each in second if each.new] == ["group_vars/gpu.yml"]
    assert not [path for path in other if (tmp_path / path).exists()]


def test_the_api_key_is_its_owners_alone_and_ignored_by_git(tmp_path: Path) -> None:
    list(write_files(tmp_path, made(), api_key=True))

    key = tmp_path / API_KEY
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert len(key.read_text().strip()) == 64
    assert "/secrets/" in (tmp_path / ".gitignore").read_text().splitlines()
    others = [each for each in tmp_path.rglob("*") if each.is_file() and each != key]
    assert len(others) > 5
    assert [each for each in others if key.read_text().strip() in each.read_text()] == []


def test_given_settings_go_over_the_derived_ones_key_by_key(tmp_path: Path) -> None:
    given = {
        "vllm": {"device": "cpu"},
        "ssh_key": "keys/köln",
        "serving": {"own": {"model": "/srv/own"}},
        "offline": False,
    }

    files = made(given=given)
    fleet = loaded(tmp_path, files)

    assert "ssh_key: keys/köln\n" in "".join(files.values())
    node = fleet.nodes["gpu-01"]
    assert node.settings.vllm
    assert (node.settings.vllm.device, node.settings.vllm.version) == ("cpu", "0.32.0")
    assert set(node.settings.serving) == {"own"}
    assert node.values["ssh_key"] == "keys/köln"


def test_a_model_without_a_commit_is_a_comment_with_the_line_to_fill_in(tmp_path: Path) -> None:
    fleet = loaded(tmp_path, made(FirstModel("Qwen/Qwen3-1.7B")))

    text = (tmp_path / "group_vars/gpu.yml").read_text()
    assert fleet.nodes["gpu-01"].settings.serving == {}
    assert "#     revision: COMMIT" in text.splitlines()
    uncommented = [line.removeprefix("# ") for line in text.splitlines() if ":" in line][1:]
    assert "serving:" in uncommented


def test_without_a_model_it_is_said_where_to_write_one(tmp_path: Path) -> None:
    fleet = loaded(tmp_path, made(None))

    assert fleet.nodes["gpu-01"].settings.serving == {}
    assert "No model is chosen" in (tmp_path / "group_vars/gpu.yml").read_text()


def test_users_that_differ_stand_beside_the_nodes(tmp_path: Path) -> None:
    hosts = (HOSTS[0], Host("gpu-02", "gpu-02", "root"), HOSTS[2])

    fleet = loaded(tmp_path, made(hosts=hosts))

    first, second = fleet.nodes["gpu-01"].values, fleet.nodes["gpu-02"].values
    assert (first["ssh_user"], first["_sudo"]) == ("admin", True)
    assert second["ssh_user"] == "root"
    assert "_sudo" not in second


@pytest.mark.parametrize("name", ['gpu"01', "gpu\\01"])
def test_a_name_with_a_quote_cannot_leave_its_text(name: str) -> None:
    from gpufleet.setup.fleet_files import inventory_of

    text = inventory_of({"gpu_x": [Host(name, "192.0.2.1", "root")]}, "root")

    compile(text, "fleet.py", "exec")
    assert repr(name) in text
