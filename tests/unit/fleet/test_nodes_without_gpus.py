"""A node with `gpu_node: false` is passed over by everything that is about GPUs."""

from __future__ import annotations

import pytest

from tests.support import warm_command
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


@pytest.mark.parametrize("deploy", ["vllm", "verify"])
def test_deploys_of_gpu_nodes_leave_it_alone(watching, deploy):
    done = warm_command.run_pyinfra(["--dry", watching, f"deploys/{deploy}.py"], cwd=ROOT)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Traceback" not in said
    assert "would" not in said


@pytest.mark.parametrize("command", ["check", "probe", "plan"])
def test_where_no_node_has_gpus_there_is_nothing_to_say_of_them(watching, command):
    """Nothing found is not everything well."""
    done = warm_command.run([command, watching], cwd=ROOT)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "gpu_node: false" in said
    assert "Traceback" not in said
