"""An operator's own balancer is told by two commands: their words, their status, their time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from gpufleet.errors import FleetError
from gpufleet.inventory import loader
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.traffic import Frontends

INVENTORY = """\
from gpufleet import inventory

globals().update(inventory.load(
    __file__, groups={"gpu": [("gpu-01", {"ssh_hostname": "192.0.2.11"}), "gpu-02"]}
))
"""
SERVERS = [
    {"name": "tiny/gpu-01.tiny-0", "node": "gpu-01", "port": 8000, "model": "tiny"}
    | {"replica": "tiny-0"},
    {"name": "tiny/gpu-02.tiny-1", "node": "gpu-02", "port": 8001, "model": "tiny"}
    | {"replica": "tiny-1"},
]


def front(folder: Path, program: str, seconds: int = 20) -> Frontends:
    """Return a fleet's front whose commands are a program of Python, with words to fill in."""
    for name in ("inventories", "group_vars"):
        (folder / name).mkdir()
    (folder / "inventories/prod.py").write_text(INVENTORY)
    (folder / "told.py").write_text(program)
    command = [sys.executable, "-IB", str(folder / "told.py"), str(folder / "said")]
    words = ["{node}", "{address}:{port}", "{model}/{replica}", "{other} $HOME;"]
    values = {
        "gpu_node": True,
        "balancer": {
            "drain_command": [*command, "drain", *words],
            "undrain_command": [*command, "undrain", *words],
            "seconds": seconds,
        },
    }
    (folder / "group_vars/all.yml").write_text(json.dumps(values))
    # Without a gateway of ours no node is asked.
    return Frontends(cast("Nodes", None), loader.read(folder / "inventories/prod.py"))


WRITE = """\
import json, sys
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\\n")
"""


def test_each_server_is_told_with_its_own_words_and_no_shell(tmp_path: Path) -> None:
    """Braces that mean nothing, and what a shell would take, arrive as they are."""
    told = front(tmp_path, WRITE)
    told.set_servers("drain", SERVERS, 10)
    told.set_servers("ready", SERVERS[:1], 10)

    said: list[Any] = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert said == [
        ["drain", "gpu-01", "192.0.2.11:8000", "tiny/tiny-0", "{other} $HOME;"],
        ["drain", "gpu-02", "gpu-02:8001", "tiny/tiny-1", "{other} $HOME;"],
        ["undrain", "gpu-01", "192.0.2.11:8000", "tiny/tiny-0", "{other} $HOME;"],
    ]
    assert told.is_declared()
    assert told.wait(SERVERS, 1) == 0


@pytest.mark.parametrize(
    ("program", "seconds", "problem"),
    [
        (
            "import sys; print('no such pool'); sys.exit(3)",
            20,
            r"balancer.drain_command: the command for tiny/gpu-01.tiny-0 ended with status 3: no "
            "such pool",
        ),
        (
            "import time; time.sleep(60)",
            1,
            r"balancer.drain_command: the command for tiny/gpu-01.tiny-0 did not end within 1 s",
        ),
    ],
)
def test_a_command_that_did_not_do_it_is_a_failed_drain(
    tmp_path: Path, program: str, seconds: int, problem: str
) -> None:
    """A replica that may still be sent requests is not stopped."""
    with pytest.raises(FleetError, match=problem):
        front(tmp_path, program, seconds).set_servers("drain", SERVERS[:1], 10)
