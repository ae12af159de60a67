"""What rebuilds a fleet, and what differs between two of them, in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpufleet.report.fleet_document import Checkout, Document, form_text, read_form
from gpufleet.report.fleet_manifest import Manifest, compare, manifest_of
from tests.support.rows import each_row
from tests.unit.report.sample_fleet import REVISION, SILENT, document


def plain() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(form_text(manifest_of(document())))
    return found


def differences(after: dict[str, Any]) -> list[str]:
    both = [Manifest.model_validate_json(json.dumps(each)) for each in (plain(), after)]
    return list(map(str, compare(*both).differences))


def test_it_has_what_rebuilds_the_fleet() -> None:
    found = plain()
    assert found["gpufleet"] == "0.2.0"
    assert found["checkout"]["commit"] == "c" * 40
    assert found["files"]["inventories/prod.py"] == "e" * 64
    node = found["nodes"]["gpu-01"]
    assert node["versions"]["driver"] == "570.124.06"
    assert node["packages"]["nvidia-fabricmanager-570"]
    assert node["releases"] == ["0.32.0-e28e5608c2"]
    assert found["nodes"][SILENT] is None
    (qwen,) = [each for each in found["models"] if each["name"] == "qwen"]
    assert qwen["revision"] == REVISION
    assert qwen["files"] == {"config.json": ["git", "a" * 40]}


def test_a_manifest_does_not_differ_from_itself_nor_by_when_it_was_written() -> None:
    assert differences(plain()) == []
    assert differences(plain() | {"when": "2027-01-01T00:00:00Z"}) == []
    same = manifest_of(document())
    assert compare(same, same).status == 0
    assert list(compare(same, same).lines())[-1] == "no difference"


def edited(*path: str | int, value: Any) -> dict[str, Any]:
    found = plain()
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return found


@each_row(
    ("path", "value", "says"),
    [
        (("gpufleet",), "0.3.0", "gpufleet: version: 0.2.0 -> 0.3.0"),
        (("checkout", "changed"), [], "settings: commit: " + "c" * 40 + " with uncommitted"),
        (("files", "group_vars/gpu.yml"), None, "file group_vars/gpu.yml: content: sha256 ffff"),
        (("nodes", "gpu-01", "versions", "driver"), "580.95.05",
         "gpu-01: driver: 570.124.06 -> 580.95.05"),
        (("nodes", "gpu-01", "versions", "driver"), "",
         "gpu-01: driver: 570.124.06 -> not there"),
        (("nodes", "gpu-02"), None, "gpu-02: node: there -> not there"),
        (("models", 0, "replicas"), "4", "model q: replicas: 2 -> 4"),
        (("models", 1, "revision"), "f" * 40, f"model qwen: revision: {REVISION} -> ffff"),
        (("models", 1, "files", "config.json"), ["git", "b" * 40],
         "model qwen: file config.json: git aaaaaaaaaaaa -> git bbbbbbbbbbbb"),
        (("models", 1), None, "model qwen: declared: Qwen/Qwen3-32B " + REVISION),
    ],
)  # fmt: skip
def test_each_thing_that_differs_is_a_line(path: Any, value: Any, says: str) -> None:
    (line,) = differences(edited(*path, value=value))
    assert line.startswith(says)


def test_nodes_with_the_same_difference_are_one_line() -> None:
    after = plain()
    for name in ("gpu-01", "gpu-02"):
        after["nodes"][name]["versions"]["driver"] = "580.95.05"
    assert differences(after) == ["gpu-[01-02]: driver: 570.124.06 -> 580.95.05"]


def test_a_node_that_fell_silent_differs_as_such_and_not_in_its_versions() -> None:
    after = plain()
    after["nodes"]["gpu-01"] = None
    assert differences(after) == [
        "gpu-01: node: answers -> does not answer, so its state is unknown"
    ]


def test_programs_get_the_same_differences() -> None:
    before = manifest_of(document())
    after = manifest_of(document(checkout=Checkout(problem="no git")))
    found = json.loads(json.dumps(compare(before, after).as_json()))
    (line,) = found["differences"]
    assert line == {
        "about": "settings",
        "what": "commit",
        "before": "c" * 40 + " with uncommitted changes",
        "after": "not in git",
    }


def test_it_is_the_same_by_way_of_a_document() -> None:
    there = read_form(Document, form_text(document()), "a.json", "")
    assert form_text(manifest_of(there)) == form_text(manifest_of(document()))


@pytest.mark.parametrize("word", ["secret", "key", "password", "token"])
def test_no_key_of_it_names_a_secret(word: str) -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return {*value}.union(*(keys(each) for each in value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    assert not [each for each in keys(plain()) if word in each.lower()]
