"""A node with `gpu_node: false` is passed over by everything that is about GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

INVENTORY = """\
from gpufleet import inventory
globals().update(inventory.load(__file__, groups={"watching": ["@local"]}))
"""


@pytest.fixture
def watching(tmp_path):
    """The inventory of a fleet whose only node has no GPUs, although models are set for all."""
    for folder, name, text in (
        ("inventories", "fleet.py", INVENTORY),
        ("group_vars", "watching.yml", "gpu_node: false\n"),
        ("group_vars", "all.yml", "gpus: {count: 8}\ndcgm: null\n"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    return tmp_path / "inventories/fleet.py"


def ran(*command):
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *map(str, command[1:])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("deploy", ["vllm", "verify"])
def test_deploys_of_gpu_nodes_leave_it_alone(watching, deploy):
    status, said = ran("pyinfra", "--dry", watching, f"deploys/{deploy}.py")
    assert status == 0, said
    assert "Traceback" not in said
    assert "would" not in said


@pytest.mark.parametrize("command", ["check", "probe", "plan"])
def test_where_no_node_has_gpus_there_is_nothing_to_say_of_them(watching, command):
    """Nothing found is not everything well."""
    status, said = ran("gpufleet", command, watching)
    assert status == 2, said
    assert "gpu_node: false" in said
    assert "Traceback" not in said
