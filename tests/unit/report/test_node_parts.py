"""A node in a report: what runs where, versions beside the lock, and probes that are broken."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from gpufleet.fleet import assessment
from gpufleet.fleet.declared_hardware import with_identity
from gpufleet.remote.answer_forms import form_problem
from gpufleet.report.fleet_document import Node
from gpufleet.report.node_parts import gpu_node
from gpufleet.report.node_picture import WIDTH, node_picture, picture_text, uses
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from tests.support.checkout import ROOT
from tests.support.hostile import WRONG, changed
from tests.unit.report.sample_fleet import probe, settings

RECORDED = sorted((ROOT / "src/gpufleet/catalog/data/nodes").glob("*.json"))
SVG = "{http://www.w3.org/2000/svg}"


def node(document: Any, here: NodeSettings | None = None) -> Node:
    declared = {"gpu-01": NodeVars("gpu-01", ("gpu",), here or settings(), {})}
    found = assessment.check_nodes({"gpu-01": document}, declared)
    return gpu_node("gpu-01", declared["gpu-01"], document, found, ["0.32.0-e28e5608c2"])


def versions(found: Node) -> dict[str, tuple[str | None, str, bool | None]]:
    return {each.part: (each.found, each.declared, each.agrees) for each in found.versions}


def test_what_runs_is_on_the_gpus_that_its_unit_names() -> None:
    assert uses(node(probe("gpu-01", 1))) == ["GPUs 0-1: q-0", "GPUs 2-7: free"]


def test_versions_stand_beside_the_lock() -> None:
    found = versions(node(probe("gpu-01", 1)))
    assert found["driver"] == ("570.124.06", "570.124.06", True)
    assert found["vLLM that runs"] == ("0.32.0-e28e5608c2", "0.32.0-e28e5608c2", True)
    other = versions(node(probe("gpu-01", 1), settings(gpu_lock={"driver": "580.95.05"})))
    assert other["driver"] == ("570.124.06", "580.95.05", False)


def test_packages_that_cannot_be_read_are_not_known_and_not_absent() -> None:
    document = probe("gpu-01", 1)
    document["system"]["packages"] = {"missing": "timeout"}
    document["system"]["releases"] = {"missing": "timeout"}
    found = versions(node(document))
    assert found["DCGM"][0] is None
    assert found["CUDA toolkit"][0] is None
    assert found["vLLM that is installed"] == (None, "0.32.0-e28e5608c2", None)
    assert found["driver"][0] == "570.124.06"


def test_no_driver_is_absent_and_one_that_cannot_be_read_is_not_known() -> None:
    for missing, found in (("absent", ""), ("timeout", None)):
        document = probe("gpu-01", 1)
        for key in ("module", "proc", "version", "cuda"):
            document["driver"][key] = {"missing": missing}
        told = versions(node(document))
        assert told["driver"][0] == found
        assert told["newest CUDA that the driver supports"][0] == found
        assert told["kernel modules"][0] == found


def test_no_release_of_vllm_is_absent() -> None:
    document = probe("gpu-02", 2)
    document["system"]["releases"] = {"missing": "absent"}
    assert versions(node(document))["vLLM that is installed"][::2] == ("", False)


def test_a_node_without_a_probe_is_silent_with_the_reason() -> None:
    assert node("no answer within 20 s").silent == "no answer within 20 s"


def test_a_probe_with_a_value_of_another_kind_that_its_form_allows_is_no_traceback() -> None:
    plain = probe("gpu-01", 1)
    declared = NodeVars("gpu-01", ("gpu",), settings(), {})
    found = assessment.check_nodes({"gpu-01": plain}, {"gpu-01": declared})
    read = []
    for _, put in changed(plain, 2):
        for wrong in WRONG:
            document = put(wrong)
            if form_problem("probe/probe", document) is None:  # else it is a sentence
                read.append(gpu_node("gpu-01", declared, document, found))
    assert any(each.silent for each in read)
    assert any(each.gpus for each in read)


@pytest.mark.parametrize("key", ["gpus", "pcie", "system", "driver", "os_release"])
def test_a_probe_that_is_not_whole_is_a_silent_node_with_the_reason(key: str) -> None:
    document = probe("gpu-01", 1)
    declared = NodeVars("gpu-01", ("gpu",), settings(), {})
    found = assessment.check_nodes({"gpu-01": document}, {"gpu-01": declared})
    broken = {name: value for name, value in document.items() if name != key}
    told = gpu_node("gpu-01", declared, broken, found)
    assert told.silent.startswith("the node's probe cannot be read: ")
    assert told.gpus == ()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_each_gpu_of_each_machine_is_drawn_once_and_within_the_picture(path: Any) -> None:
    found = node(with_identity(json.loads(path.read_text()), "gpu-01"), NodeSettings())
    picture = ET.fromstring(node_picture(found))
    texts = [each.text or "" for each in picture.iter("text")]
    assert sorted(e for e in texts if e.startswith("GPU ")) == sorted(
        f"GPU {gpu.index}" for gpu in found.gpus
    )
    boxes = [each for each in picture.iter("rect") if "gpu" in (each.get("class") or "").split()]
    places = {(each.get("x"), each.get("y")) for each in boxes}
    assert len(places) == len(found.gpus)
    for each in picture.iter("rect"):
        assert float(each.get("x", -1)) >= 0
        assert float(each.get("x", 0)) + float(each.get("width", 0)) <= WIDTH
    for each in picture.iter("text"):
        assert float(each.get("y", 0)) >= 12, "the letters of a line stand above its y"
    title = picture.find("title")
    assert title is not None
    assert title.text == picture_text(found)


def test_gpus_without_nvlink_have_the_nearest_class_of_pcie() -> None:
    document = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/l40sx8.json").read_text())
    found = node(with_identity(document, "gpu-01"), NodeSettings())
    picture = ET.fromstring(node_picture(found))
    words = [each.text for each in picture.iter("text")]
    assert "no NVLink" in words
    assert found.tiers[0].name in words
    boxes = [each for each in picture.iter("rect") if each.get("class") == "gpu"]
    middles = {float(each.get("x", 0)) + float(each.get("width", 0)) / 2 for each in boxes}
    assert len(middles) == 4, "a row has four GPUs"
    for line in (each for each in picture.iter("line") if each.get("class") == "pcie"):
        assert {float(line.get("x1", 0)), float(line.get("x2", 0))} <= middles
