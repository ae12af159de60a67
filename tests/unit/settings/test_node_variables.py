"""Nodes with equal variables share their settings; whoever differs in anything has its own."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.settings import node_variables
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.variables import Origin

GPUS = {"gpus": {"count": 1}}


def checked(**settings: dict[str, Any]) -> dict[str, NodeVars]:
    """Return the checked variables of nodes, each of whose was written in a file of its own."""
    merged = {
        name: {key: (value, Origin(f"{name}.yml", 1)) for key, value in own.items()}
        for name, own in settings.items()
    }
    return node_variables.check(merged, dict.fromkeys(merged, ()))


def test_changed_values_are_those_that_are_written_and_are_not_the_default() -> None:
    written = {
        "serving": {"m": {"model": "/srv/m", "port": 8000, "context": 8192, "flags": {"seed": 0}}},
        "vllm": {"version": "0.32.0", "lock": "locks/x.txt", "listen": "127.0.0.1"},
        "node_exporter": {"port": 9100},
        "monitoring": {},
        "ssh_strict_host_key_checking": "yes",
        "ssh_user": "root",
    }
    found = {key: (value, str(where)) for key, value, where in checked(a=written)["a"].leaves(
        changed=True
    )}  # fmt: skip
    assert found == {
        "serving.m.model": ("/srv/m", "a.yml:1"),
        "serving.m.context": (8192, "a.yml:1"),
        "serving.m.flags.seed": (0, "a.yml:1"),
        "vllm.version": ("0.32.0", "a.yml:1"),
        "vllm.lock": ("locks/x.txt", "a.yml:1"),
        "vllm.listen": ("127.0.0.1", "a.yml:1"),
        "monitoring": ({}, "a.yml:1"),
        "ssh_user": ("root", "a.yml:1"),
    }


def test_equal_variables_are_validated_once() -> None:
    found = checked(a=GPUS, b={"gpus": {"count": 1}}, c={"gpus": {"count": 2}}, d={})
    assert found["a"].settings is found["b"].settings
    assert [found[name].settings.gpus.count for name in "abcd"] == [1, 1, 2, None]


@pytest.mark.parametrize("value", ["1", True, 1.5, None])
def test_what_only_looks_equal_is_validated_by_itself(value: object) -> None:
    """Python takes True for 1, and a text that reads 1 is no number."""
    alone = told(b={"gpus": {"count": value}})
    assert told(a=GPUS, b={"gpus": {"count": value}}) == alone


def told(**settings: dict[str, Any]) -> object:
    """Return what is said of the last node's variables: its settings, or the mistakes."""
    try:
        return checked(**settings)["b"].settings
    except FleetError as error:
        return error.problems


def test_a_mistake_that_two_nodes_make_is_said_of_both() -> None:
    wrong = {"gpus": {"count": 0}}
    with pytest.raises(FleetError) as refused:
        checked(a=wrong, b=wrong)
    assert [problem.partition(":")[0] for problem in refused.value.problems] == ["a.yml", "b.yml"]


def test_origins_are_each_nodes_own() -> None:
    """Where a value was set is no part of what it means."""
    found = checked(a=GPUS, b=GPUS)
    assert [found[name].variables["gpus"][1].file for name in "ab"] == ["a.yml", "b.yml"]
