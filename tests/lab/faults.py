"""Interrupt a deploy at a moment, and what has to hold after the next one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import yaml

from tests.lab.conftest import ROOT, Fleet


def declared(model: str) -> dict[str, Any]:
    """Return a model's settings as the repository declares them."""
    settings: dict[str, Any] = yaml.safe_load((ROOT / "group_vars/lab.yml").read_text())
    return settings["serving"][model]


def change(fleet: Fleet, seqs: int) -> None:
    """Change one value that both replicas are started with."""
    arguments = {**declared("tiny")["flags"], "max-num-seqs": seqs}
    fleet.set({"tiny": {"flags": arguments}})


def deploy_killed_after(fleet: Fleet, seconds: float, seqs: int) -> str:
    """
    Start a deploy of a changed value and `kill -9` it, with all its children, in the middle.

    Returns the operation that it had reached.
    """
    change(fleet, seqs)
    run = fleet.popen()
    time.sleep(seconds)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait(timeout=10)
    return reached(fleet)


def power_cut_after(fleet: Fleet, node: str, seconds: float, seqs: int) -> str:
    """
    Start a deploy of a changed value, pull a node's plug in the middle, plug it in again.

    Returns the operation that it had reached when the power went.
    """
    change(fleet, seqs)
    run = fleet.popen()
    time.sleep(seconds)
    fleet.lab.power(node, "off")
    try:
        operation = reached(fleet)
        # No connection may hang: every remote command has a deadline. The other node may be
        # building its release meanwhile, which takes minutes.
        run.wait(timeout=900)
    finally:
        fleet.lab.power(node, "on")
    return operation


def reached(fleet: Fleet) -> str:
    """Return the last operation that a deploy in the background began."""
    lines = fleet.log.read_text(errors="replace").splitlines()
    begun = [line for line in lines if line.startswith("--> Starting operation: ")]
    if not begun:
        return "before the first operation"
    if any(line.startswith("--> Results") for line in lines):
        return "after the last operation"
    return begun[-1].removeprefix("--> Starting operation: ").strip()


def converged(fleet: Fleet, seqs: int) -> None:
    """The next run succeeds, every process runs with the new value, and a third changes nothing."""
    run = fleet.pyinfra("-y", seconds=1200)
    assert run.status == 0, run.output
    pids = fleet.pids()
    assert len(pids) == 2, pids
    for name, pid in pids.items():
        argv = fleet.ssh(name.split()[0], f"tr '\\0' '\\n' </proc/{pid}/cmdline").split("\n")
        assert argv[argv.index("--max-num-seqs") + 1] == str(seqs), (
            f"{name} runs with the old value"
        )
    again = fleet.pyinfra("-y", "--json")
    assert again.status == 0, again.output
    assert again.changed == {}
    assert fleet.pids() == pids
