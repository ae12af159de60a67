"""What a node's variables do not declare any more goes, but not by a misspelt group."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpufleet.fleet.undeclared import removal_problem
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.parse import parse_settings
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.support.rows import each_row

VLLM = {"version": "0.32.0", "lock": "locks/vllm.txt", "listen": "127.0.0.1"}
SERVES = {"vllm": VLLM, "serving": {"m": {"model": "/srv/m"}}}
GATEWAY = {"gateway": {"allow_unauthenticated": True, "allow_plain_http": True}}


def problem(setting: str, *left: str, **nodes: Mapping[str, Any]) -> str | None:
    declared = {
        name: NodeVars(name, (), parse_settings(dict(own)), {}) for name, own in nodes.items()
    }
    return removal_problem(setting, left, declared)


@each_row("setting", ["gateway", "monitoring"])
def test_the_last_one_of_a_fleet_that_serves_stays_unless_it_is_named(setting: str) -> None:
    said = problem(setting, "a", a={}, gpu=SERVES)
    assert said is not None
    assert said.startswith(f"a: `{setting}` runs on this node, but")
    assert f"`absent: {{parts: [{setting}]}}`" in said

    named = {"absent": {"parts": [setting]}}
    assert problem(setting, "a", a=named, gpu=SERVES) is None
    half = problem(setting, "a", "b", a=named, b={}, gpu=SERVES)
    assert half is not None
    assert half.startswith("b: ")
    both = problem(setting, "a", "b", a={}, b={}, gpu=SERVES)
    assert both is not None
    assert "runs on these nodes, but" in both


def test_where_nothing_is_served_or_another_has_it_it_goes() -> None:
    assert problem("gateway", "a", a={}) is None
    assert problem("monitoring", "a", a={}, b={"monitoring": {}}, gpu=SERVES) is None
    assert problem("gateway", "a", a={}, b=GATEWAY, gpu=SERVES) is None
    balancer = {"balancer": {"drain_command": ["true"], "undrain_command": ["true"]}}
    assert problem("gateway", "a", a={}, gpu={**SERVES, **balancer}) is None


def test_dcgm_goes_without_a_word() -> None:
    assert problem("dcgm", "gpu", gpu=SERVES) is None


@pytest.mark.parametrize("setting", ["gateway", "monitoring"])
def test_a_run_after_the_removal_of_the_last_one_is_not_refused(
    tmp_path: Path, setting: str
) -> None:
    """This machine is the node. Without `absent.parts` no node of the run has to do with it."""
    for folder, name, text in (
        ("inventories", "one.py", 'groups={"front": ["@local"]}'),
        ("group_vars", "front.yml", "gpu_node: false\n"),
    ):
        (tmp_path / folder).mkdir()
        load = "from gpufleet import inventory\nglobals().update(inventory.load(__file__, {}))\n"
        (tmp_path / folder / name).write_text(load.format(text) if "groups" in text else text)

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        inventory = tmp_path / "inventories/one.py"
        words = ["--dry", inventory, f"deploys/{setting}.py", *more]
        return warm_command.run_pyinfra(words, cwd=ROOT)

    refused = run()
    assert refused.returncode != 0
    assert "no node of this run" in refused.stderr

    named = run("--data", f'absent={{"parts": ["{setting}"]}}')
    assert named.returncode == 0, named.stderr
