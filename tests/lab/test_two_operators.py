"""Two operators and one fleet: real pyinfra commands over real sshd.

Who comes second is refused before anything is touched. A deploy that is gone has nothing: killed,
or behind a network that is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.nodes import Lab
from tests.lab.conftest import ROOT, Fleet
from tests.support.checkout import own_lab

LAB_ID = own_lab("gf2")
NODES = {"gpu-01": "t4x1", "gpu-02": "t4x1"}
DEPLOY = str(Path(__file__).with_name("held_alone.py"))
RECORD = "/var/lib/gpufleet/change/deploy.json"
# Half a minute of silence and sshd's own end (on_node/common/deploy_mark.py); the rest is for a
# busy machine.
SILENT_SECONDS = 60


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    lab = Lab.open(LAB_ID, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))  # while writing tests
    if not keep:
        lab.purge()  # what a killed run left
    lab.up(NODES)
    project = tmp_path_factory.mktemp("operators")
    shutil.copytree(ROOT / "inventories", project / "inventories")
    (project / "group_vars").mkdir()
    (project / "group_vars/all.yml").write_text("dcgm: null\n")
    yield Fleet(Lab.open(LAB_ID, print), project)
    if not keep:
        lab.purge()


@contextmanager
def deploying(fleet: Fleet, *arguments: str, node: str = "gpu-01") -> Iterator[subprocess.Popen]:
    """Have a deploy at work, which is killed at the end, whatever has become of it."""
    before = record(fleet, node)
    os.environ["HELD_SECONDS"] = "900"
    try:
        process = fleet.popen(*arguments, deploy=DEPLOY)
    finally:
        del os.environ["HELD_SECONDS"]
    try:
        end = time.monotonic() + 300
        while record(fleet, node) == before or "work" not in fleet.log.read_text():
            assert process.poll() is None, fleet.log.read_text()
            assert time.monotonic() < end, fleet.log.read_text()
            time.sleep(0.5)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def record(fleet: Fleet, node: str) -> dict[str, object]:
    text = fleet.ssh(node, f"cat {RECORD} 2>/dev/null || echo '{{}}'")
    found: dict[str, object] = json.loads(text)
    return found


def goes_on(fleet: Fleet, *arguments: str) -> None:
    run = fleet.pyinfra("-y", *arguments, deploy=DEPLOY, seconds=300)
    assert run.status == 0, run.output


def test_a_second_deploy_is_refused_by_name_and_a_killed_one_is_in_nobodys_way(
    fleet: Fleet,
) -> None:
    with deploying(fleet) as first:
        second = fleet.pyinfra("-y", deploy=DEPLOY, seconds=300)
        assert second.status == 1, second.output
        assert "gpu-01, gpu-02: " in second.output
        assert f"process {first.pid} on that machine" in second.output
        assert f"({DEPLOY})" in second.output
        assert "Starting operation" not in second.output

        dry = fleet.pyinfra("--dry", deploy=DEPLOY, seconds=300)
        assert dry.status == 0, dry.output
        assert "gpufleet would refuse a deploy: gpu-01, gpu-02: " in dry.output

        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        goes_on(fleet)


def test_a_node_that_is_being_deployed_is_neither_upgraded_nor_drained(fleet: Fleet) -> None:
    with deploying(fleet):
        for words in (
            ("upgrade", fleet.inventory, "--yes"),
            ("drain", fleet.inventory, "gpu-01", "--why", "a fan"),
        ):
            run = fleet.gpufleet(*words, seconds=300)
            assert run.status == 2, run.output
            assert "is running a deploy there" in run.output
        change = "/var/lib/gpufleet/change"
        assert "json" not in fleet.ssh("gpu-01", f"ls {change} | grep -v deploy.json || :")


def test_nodes_that_a_run_is_not_about_are_free(fleet: Fleet) -> None:
    with deploying(fleet, "--limit", "gpu-01"):
        goes_on(fleet, "--limit", "gpu-02")
        assert fleet.pyinfra("-y", deploy=DEPLOY, seconds=300).status == 1


def test_a_deploy_behind_a_dead_network_has_nothing_after_a_minute(fleet: Fleet) -> None:
    """Its process lives on, and no packet says that the connection has ended."""
    with deploying(fleet, "--limit", "gpu-01") as first:
        fleet.lab.net("gpu-01", "cut")
        time.sleep(SILENT_SECONDS)
        fleet.lab.net("gpu-01", "heal")
        assert first.poll() is None, fleet.log.read_text()
        goes_on(fleet, "--limit", "gpu-01")
