"""`gpufleet preflight` over nodes that do not answer: every line is there, and it ends."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest

from gpufleet.cli.preflight_requests import git_state
from gpufleet.preflight.line import CHECKS
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.support.fleet_folder import VLLM

INVENTORY = """\
from gpufleet import inventory

def at(number):
    return {{"ssh_hostname": f"127.0.0.{{number}}", "ssh_port": {port}}}

globals().update(inventory.load(__file__, groups={{
    "gpu": [(f"gpu-{{n:02}}", at(n)) for n in range(1, 14)],
    "front": [("front", at(99))],
}}))
"""
GPU = {"vllm": VLLM, "serving": {"tiny": {"model": "/srv/tiny", "replicas": 2}}}
FRONT = {
    "gpu_node": False,
    "gateway": {
        "port": 9,
        "allow_plain_http": True,
        "clients": [{"name": "app", "key_sha256": "a" * 64}],
    },
}


@pytest.fixture
def mute() -> Iterator[int]:
    """Return a port that takes connections at every loopback address, and says nothing."""
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))
        listening.listen(128)
        yield int(listening.getsockname()[1])


def preflight(folder: Path, port: int, *words: str) -> subprocess.CompletedProcess[str]:
    for name in ("inventories", "group_vars"):
        (folder / name).mkdir()
    (folder / "inventories/prod.py").write_text(INVENTORY.format(port=port))
    for group, values in (("gpu", GPU), ("front", FRONT)):
        (folder / f"group_vars/{group}.yml").write_text(json.dumps(values))
    command = ["preflight", "inventories/prod.py", *words]
    return warm_command.run(command, cwd=folder, timeout=120, connects=True)


def test_nodes_that_refuse_are_one_line_of_each_check_and_no_check_is_missing(
    tmp_path: Path,
) -> None:
    run = preflight(tmp_path, 9, "--json", "-o", str(tmp_path / "preflight.html"))

    assert run.returncode == 1, run.stderr
    schema = json.loads((ROOT / "docs/reference/preflight.schema.json").read_text())
    jsonschema.validate(json.loads(run.stdout), schema)
    lines = json.loads(run.stdout)["lines"]
    assert list(dict.fromkeys(line["check"] for line in lines)) == list(CHECKS)
    silent = [e for e in lines if e["check"] == "node-checks"]
    assert {each["status"] for each in silent} == {"FAIL"}
    assert len(silent) == 14, "each with its own reason"
    clocks = [(e["status"], e["subject"]) for e in lines if e["check"] == "clocks"]
    assert clocks == [("UNKNOWN", "gpu-[01-13] front")]
    assert "does not answer" in (tmp_path / "preflight.html").read_text()


@pytest.mark.slow
def test_fourteen_nodes_that_hang_cost_less_than_a_minute(tmp_path: Path, mute: int) -> None:
    began = time.monotonic()
    run = preflight(tmp_path, mute, "--json")

    assert time.monotonic() - began < 60
    assert run.returncode == 1, run.stderr
    assert {line["check"] for line in json.loads(run.stdout)["lines"]} == {*CHECKS}


def test_a_key_file_that_is_not_there_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    run = preflight(tmp_path, 9, "--key-file", "no-such-file")

    assert run.returncode == 2
    assert "no-such-file" in run.stderr


def git_in(folder: Path) -> Callable[..., str]:
    def git(*words: str) -> str:
        named = ("-c", "user.name=ada", "-c", "user.email=ada@example.net")
        run = subprocess.run(
            ["git", "-C", str(folder), *named, *words], capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    git("init", "-q")
    return git


def test_secrets_that_are_committed_as_they_are_are_named_and_encrypted_ones_not(
    tmp_path: Path,
) -> None:
    root = tmp_path / "fleet"
    (root / "secrets").mkdir(parents=True)
    git = git_in(root)
    names = ["secrets/plain", "secrets/crypt", "secrets/ignored"]
    for name in names:
        (root / name).write_text("x")
    (root / ".gitattributes").write_text("secrets/crypt filter=git-crypt diff=git-crypt\n")
    git("add", ".gitattributes", *names[:2])
    git("commit", "-qm", "settings")
    paths = [str(root / "secrets/plain"), "secrets/crypt", "secrets/ignored", "/etc/ssl/key"]
    assert git_state(root, paths).secrets == ("secrets/plain",)
    assert git_state(root).secrets == ()


def test_files_that_are_not_committed_are_named_whole(tmp_path: Path) -> None:
    git = git_in(tmp_path)
    (tmp_path / "all.yml").write_text("a: 1\n")
    git("add", "all.yml")
    git("commit", "-qm", "settings")
    (tmp_path / "all.yml").write_text("a: 2\n")
    (tmp_path / "new.yml").write_text("b: 1\n")

    found = git_state(tmp_path)
    assert found.changed == ("all.yml", "new.yml")
    assert found.commit_id == git("rev-parse", "HEAD")
    assert found.commit.startswith(f"{found.commit_id[:7]}")
