"""What follows from recorded nodes: their groups, the versions that suit them, remarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.setup.kinds import old_pythons, read_kinds
from tests.support.checkout import ROOT

NODES = ROOT / "src/gpufleet/catalog/data/nodes"


def node(profile: str, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Any:
    document = deepcopy(json.loads((NODES / f"{profile}.json").read_text()))
    change(document)
    return document


def remove_driver(document: dict[str, Any]) -> None:
    document["driver"]["module"] = {"missing": "absent"}
    document["gpus"] = []


def set_driver(version: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["driver"]["module"] = version

    return change


def test_nodes_with_as_many_gpus_of_one_model_are_a_group() -> None:
    def ubuntu(document: dict[str, Any]) -> None:
        document["os_release"] = node("h100x8")["os_release"]

    found = read_kinds({"a": node("h100x8"), "b": node("l40sx8", ubuntu), "c": node("h100x8")})

    assert {kind.group: kind.nodes for kind in found.kinds} == {
        "gpu_h100x8": ("a", "c"),
        "gpu_l40sx8": ("b",),
    }
    assert [kind.gpus for kind in found.kinds] == [8, 8]


def test_a_driver_that_is_there_is_locked_with_what_belongs_to_its_branch() -> None:
    found = read_kinds({"a": node("h100x8", set_driver("580.95.05"))})

    (kind,) = found.kinds
    assert found.remarks == ()
    assert kind.lock
    assert kind.lock.driver == "580.95.05"
    assert kind.lock.toolkit.branch == "13-0"
    assert kind.lock.dcgm
    assert not kind.bare
    assert not kind.gets_driver


def test_a_driver_that_no_set_has_is_to_be_replaced_first() -> None:
    found = read_kinds({"a": node("h100x8", set_driver("570.124.06"))})

    (kind,) = found.kinds
    assert kind.gets_driver
    assert not kind.bare
    assert "run `gpufleet deploy node` first, which installs 580." in found.remarks[0]


def test_nodes_of_one_branch_and_several_versions_keep_theirs() -> None:
    (kind,) = read_kinds(
        {
            "a": node("h100x8", set_driver("580.95.05")),
            "b": node("h100x8", set_driver("580.126.09")),
        }
    ).kinds

    assert kind.lock
    assert kind.lock.driver == "580"


def test_a_node_without_a_driver_is_a_group_by_its_generation_and_is_told_what_comes_first() -> (
    None
):
    found = read_kinds({"a": node("h100x8", remove_driver)})

    (kind,) = found.kinds
    assert (kind.group, kind.gpus, kind.bare) == ("gpu_hopperx8", 8, True)
    assert kind.lock
    assert kind.lock.driver.startswith("580.")
    # At least: the least Hopper of the catalogue.
    assert kind.memory_gib == pytest.approx(79.11)
    (remark,) = found.remarks
    assert remark.startswith("a: no NVIDIA driver is loaded: run `gpufleet deploy node` first")


def test_a_driver_too_old_for_every_set_is_named_with_the_one_that_comes() -> None:
    found = read_kinds({"a": node("h100x8", set_driver("535.261.03"))})

    assert found.kinds[0].lock
    assert found.kinds[0].lock.branch == "580"
    assert "535.261.03" in found.remarks[0]
    assert found.kinds[0].lock.driver in found.remarks[0]


def test_the_repository_is_the_one_of_the_nodes_system() -> None:
    def debian(document: dict[str, Any]) -> None:
        document["os_release"] |= {"id": "debian", "version_id": "12"}

    found = read_kinds({"a": node("h100x8", debian)})

    assert found.repository["url"].endswith("/debian12/x86_64")
    assert len(found.repository["keyring_sha256"]) == 64


def test_nodes_of_several_systems_are_refused_by_name() -> None:
    with pytest.raises(FleetError, match=r"a: ubuntu .*; b: rocky "):
        read_kinds({"a": node("h100x8"), "b": node("l40sx8")})


def test_every_node_whose_system_is_not_known_is_named_at_once() -> None:
    def other(document: dict[str, Any]) -> None:
        document["os_release"] |= {"id": "arch", "version_id": "1"}

    with pytest.raises(FleetError) as refused:
        read_kinds({"a": node("h100x8", other), "b": node("h100x8"), "c": node("t4x1", other)})
    assert [problem[:2] for problem in refused.value.problems] == ["a:", "c:"]


def test_a_python_older_than_the_shipped_lock_is_named() -> None:
    def older(document: dict[str, Any]) -> None:
        document["python"] = "3.11.2"

    def newer(document: dict[str, Any]) -> None:
        document["python"] = "3.12.3"

    assert old_pythons({"b": node("h100x8", newer)}, "0.32.0") is None
    said = old_pythons({"a": node("h100x8", older), "b": node("h100x8", newer)}, "0.32.0")
    assert said
    assert "a (3.11.2)" in said
    assert "`gpufleet packages lock vllm 0.32.0 --python 3.11`" in said
    assert "b (" not in said
