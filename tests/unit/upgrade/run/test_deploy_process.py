"""A deploy that fails within an upgrade is quoted by what tells why: pyinfra fails here itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gevent
import pytest

from gpufleet.errors import FleetError
from gpufleet.upgrade.run.deploy_process import SharedDeploy, failure_lines

DEPLOY = """\
from pyinfra.operations import server

server.shell(name="first", commands=["true"])
server.shell(
    name="build release 0.32.0-ab",
    commands=["echo what is tried; echo 'error: No space left on device (os error 28)' >&2; false"],
)
server.shell(name="never reached", commands=["echo what comes later"])
"""


def test_what_a_node_said_before_it_failed_is_quoted_with_its_operation(tmp_path: Path) -> None:
    """pyinfra's own last lines are a table of counts."""
    (tmp_path / "deploy.py").write_text(DEPLOY)
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", "@local", "deploy.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1

    found = failure_lines(done.stdout + done.stderr)
    assert found.startswith("build release 0.32.0-ab")
    assert "[@local] error: No space left on device (os error 28)" in found
    assert "commands" not in found
    assert "first" not in found
    assert "never" not in found


def test_a_sentence_that_all_nodes_say_is_quoted_once() -> None:
    """Nodes answer in any order, each before pyinfra's own word about it."""
    sentence = "serving.tiny.flags.enforce-eager: vLLM 0.32.6 has `--force-eager`"
    lines = ["--> Starting operation: vLLM, prepared | accepts its flags "]
    for node in ("gpu-02", "gpu-01"):
        lines += [f"    [{node}] {sentence}", f"    [{node}] Error: executed 0 commands"]
    lines += ["    [gpu-03] No changes", "", "--> Results:", "    Operation   Hosts   Error"]

    said = f"vLLM, prepared | accepts its flags; [gpu-02] {sentence}"
    assert failure_lines("\n".join(lines)) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "--> Loading\n--> this run is refused, 1 problem:\n    up.yml:7: no such lock\n",
            "--> this run is refused, 1 problem:; up.yml:7: no such lock",
        ),
        ("[gpu-01] Could not connect (error: timed out)", "[gpu-01] Could not connect"),
        ("", "the deploy printed nothing"),
    ],
)
def test_refusals_and_whatever_else_ends_a_run_are_quoted(text: str, said: str) -> None:
    assert failure_lines(text).startswith(said)


def test_of_output_without_a_known_word_the_end_is_quoted() -> None:
    lines = [f"line {number}" for number in range(20)]

    assert failure_lines("\n".join(lines)) == "; ".join(lines[-6:])
    assert failure_lines("") == "the deploy printed nothing"


def test_groups_that_change_at_once_share_one_deploy_that_began_after_all_of_them() -> None:
    """Two at once would write the same files of a gateway."""
    fleet: list[str] = []
    seen: list[tuple[str, ...]] = []
    running = 0

    def run() -> None:
        nonlocal running
        running += 1
        assert running == 1
        seen.append(tuple(fleet))
        gevent.sleep(0.05)
        running -= 1

    shared = SharedDeploy(run)

    def group(name: str) -> tuple[str, ...]:
        fleet.append(name)
        shared()
        assert any(name in each for each in seen)
        return seen[-1]

    jobs = [gevent.spawn(group, name) for name in "abc"]
    gevent.joinall(jobs, raise_error=True, timeout=60)
    assert [job.value for job in jobs] == [("a",), ("a", "b", "c"), ("a", "b", "c")]
    assert len(seen) == 2
    group("d")
    assert seen[-1] == ("a", "b", "c", "d")


def test_a_shared_deploy_that_failed_is_nobodys_proof() -> None:
    tried: list[int] = []

    def run() -> None:
        tried.append(1)
        gevent.sleep(0.01)
        raise FleetError("the gateway did not answer")

    jobs = [
        gevent.spawn(SharedDeploy.__call__, shared)
        for shared in [SharedDeploy(run)]
        for _ in range(2)
    ]
    for job in jobs:
        with pytest.raises(FleetError):
            job.get(timeout=60)
    assert len(tried) == 2


INVENTORY = """\
from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01", "gpu-02"]}))
"""
RUN = """\
import sys
from pathlib import Path

from gevent import monkey

monkey.patch_all()
from gpufleet.upgrade.run.deploy_process import Deploy

Deploy("inventories/prod.py", Path("logs")).run(
    "deploys/vllm.py", 60, ("gpu-01",), "tiny-1", {"serving.tiny.flags.max-num-seqs": 8}
)
"""


def test_a_deploy_of_no_upgrade_gets_values_in_place_of_declared_ones(tmp_path: Path) -> None:
    """The inventory has no such model, which pyinfra refuses before it connects."""
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories/prod.py").write_text(INVENTORY)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    said = "--data serving.tiny.flags.max-num-seqs: no node has the setting `serving.tiny`"
    assert done.returncode == 1
    assert "FleetError: deploys/vllm.py failed: " in done.stderr
    assert said in done.stderr
    log = (tmp_path / "logs/tiny-1.log").read_text()
    assert "--limit gpu-01 --data serving.tiny.flags.max-num-seqs=8" in log
    assert said in log
