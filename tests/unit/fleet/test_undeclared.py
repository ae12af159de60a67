"""What a node's variables do not declare any more goes, but not by a misspelt group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpufleet.fleet.undeclared import removal_problem
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.parse import parse_settings
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
    assert said.startswith(f"a: `{setting}` runs there")
    assert f"`absent: {{parts: [{setting}]}}`" in said

    named = {"absent": {"parts": [setting]}}
    assert problem(setting, "a", a=named, gpu=SERVES) is None
    half = problem(setting, "a", "b", a=named, b={}, gpu=SERVES)
    assert half is not None
    assert half.startswith("b: ")


def test_where_nothing_is_served_or_another_has_it_it_goes() -> None:
    assert problem("gateway", "a", a={}) is None
    assert problem("monitoring", "a", a={}, b={"monitoring": {}}, gpu=SERVES) is None
    assert problem("gateway", "a", a={}, b=GATEWAY, gpu=SERVES) is None
    balancer = {"balancer": {"drain_command": ["true"], "undrain_command": ["true"]}}
    assert problem("gateway", "a", a={}, gpu={**SERVES, **balancer}) is None


def test_dcgm_goes_without_a_word() -> None:
    assert problem("dcgm", "gpu", gpu=SERVES) is None
