"""A fact that one GPU of a node does not tell: when that is believed, and when not."""

from __future__ import annotations

import pytest

from tests.support.rows import each_row

from .wiring import NOT_SUPPORTED

# Fact, the check that asks for it.
FACTS = [
    ("pcie_width", "pcie-width"),
    ("pcie_replays", "pcie-replays"),
    ("ecc_mode", "ecc-mode"),
    ("ecc_uncorrected_volatile", "ecc-uncorrected"),
    ("ecc_sram", "ecc-sram"),
    ("ecc_corrected_volatile", "ecc-corrected"),
    ("remapped_rows", "row-remap-failed"),
    ("remap_histogram", "row-remap-spares"),
    ("recovery_action", "recovery-action"),
    ("throttle_samples", "hardware-slowdown"),
    ("temperature_celsius", "temperature"),
    ("persistence_mode", "persistence"),
    ("mig_mode", "mig"),
    ("compute_mode", "compute-mode"),
    ("power_limit_milliwatts", "power-limit"),
    ("processes", "foreign-processes"),
]


@each_row(("fact", "check"), FACTS)
def test_what_one_gpu_lacks_and_its_like_have_is_unknown(document, judged, fact, check):
    node = document("h100x8")
    node["gpus"][7][fact] = NOT_SUPPORTED
    said = judged(node)
    assert (check, "unknown", 7) in said.troubles
    assert {gpu for _, _, gpu in said.troubles} == {7}
    assert "although the node's other GPUs report it" in said.text(check, 7)


@each_row(("fact", "check"), FACTS)
def test_what_no_gpu_of_the_node_has_is_no_part_of_the_board(document, judged, fact, check):
    node = document("h100x8")
    for gpu in node["gpus"]:
        gpu[fact] = NOT_SUPPORTED
    assert not [each for each in judged(node).troubles if each[0] == check]


def test_another_board_need_not_have_it(document, judged):
    node = document("h100x8")
    node["gpus"][7].update(name="NVIDIA DGX Display", remapped_rows=NOT_SUPPORTED)
    assert judged(node).worst("row-remap-failed", 7).severity.word == "ok"


def test_a_gpu_alone_has_nobody_to_be_compared_with(document, judged):
    node = document("t4x1")
    node["gpus"][0]["pcie_replays"] = NOT_SUPPORTED
    assert judged(node).troubles == set()


def test_without_ecc_nothing_counts_its_errors(document, judged):
    """The driver then says that the counters are not supported: ecc-mode has the trouble."""
    node = document("h100x8")
    gpu = node["gpus"][2]
    gpu["ecc_mode"] = {"current": 0, "pending": 0}
    for fact in [each for each in gpu if each.startswith("ecc_") and each != "ecc_mode"]:
        gpu[fact] = NOT_SUPPORTED
    assert judged(node).troubles == {("ecc-mode", "warn", 2)}


def test_with_mig_some_things_are_not_told(document, judged):
    node = document("h100x8")
    node["gpus"][2].update(mig_mode={"current": 1, "pending": 1}, pcie_replays=NOT_SUPPORTED)
    assert {check for check, *_ in judged(node).troubles} == {"mig"}


@pytest.mark.parametrize(
    ("setting", "fact", "check"),
    [
        ("pcie_width", "pcie_width", "pcie-width"),
        ("power_limit_watts", "power_limit_milliwatts", "power-limit"),
    ],
)
def test_what_is_declared_has_to_be_told(document, judged, setting, fact, check):
    node = document("t4x1")
    node["gpus"][0][fact] = NOT_SUPPORTED
    assert judged(node).troubles == set()
    said = judged(node, {"gpus": {setting: 16}})
    assert (check, "unknown", 0) in said.troubles
    assert f"gpus.{setting} declares" in said.text(check, 0)


def test_a_gpu_whose_answers_make_no_sense_is_no_witness(document, judged):
    node = document("h100x8")
    for at, gpu in enumerate(node["gpus"]):
        gpu["remapped_rows"] = NOT_SUPPORTED if at else "garbage"
    found = judged(node).worst("row-remap-failed", 3)
    assert found.severity.word == "ok"
