"""What a GPU's memory counters mean: a recorded healthy node, one of its GPUs' counters changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.rows import each_row

NOT_SUPPORTED = {"missing": "not_supported", "code": 3}
TOO_OLD = {"missing": "function_not_found", "code": 13}
LOST = {"missing": "lost", "code": 15}

NOT_OF_TURING = [
    "ecc-mode",
    "ecc-uncorrected",
    "ecc-sram",
    "ecc-corrected",
    "row-remap-pending",
    "row-remap-failed",
    "row-remap-count",
    "row-remap-spares",
]


def put(gpu: dict[str, Any], facts: dict[str, Any]) -> None:
    """Set facts of a GPU; those of one of its objects keep the object's others."""
    for key, value in facts.items():
        if isinstance(value, dict) and "missing" not in value:
            gpu[key] = {**gpu[key], **value}
        else:
            gpu[key] = value


# Profile, GPU, facts, check, severity, what the operator must read.
FAULTS = [
    pytest.param(
        "h100x8", 3, {"ecc_mode": {"current": 0, "pending": 0}},
        "ecc-mode", "warn", ["ECC is off", "nvidia-smi -i 3 -e 1", "are delivered with ECC on"],
        id="ECC is off on a data centre board",
    ),
    pytest.param(
        "l40sx8", 0, {"ecc_mode": {"current": 0, "pending": 1}},
        "ecc-mode", "warn", ["ECC is off, and on after the next reset", "nvidia-smi -r -i 0"],
        id="ECC was switched on and is pending until a reset",
    ),
    pytest.param(
        "t4x1", 0, {"ecc_mode": {"current": 1, "pending": 0}},
        "ecc-mode", "warn", ["ECC is on, and off after the next reset", "nvidia-smi -i 0 -e 1"],
        id="the next reset switches ECC off",
    ),
    pytest.param(
        "rtx4090x2", 1, {"ecc_mode": {"current": 0, "pending": 1}},
        "ecc-mode", "warn", ["on after the next reset"],
        id="a desktop board's ECC is pending until a reset",
    ),
    pytest.param(
        "h100x8", 6, {"ecc_uncorrected_volatile": 1},
        "ecc-uncorrected", "block", ["1 uncorrectable memory error since", "nvidia-bug-report.sh"],
        id="one uncorrectable error",
    ),
    pytest.param(
        "t4x1", 0, {"ecc_uncorrected_volatile": 12},
        "ecc-uncorrected", "block", ["12 uncorrectable memory errors", "nvidia-smi -r -i 0"],
        id="uncorrectable errors on Turing",
    ),
    pytest.param(
        "h100x8", 2, {"ecc_sram": {"bThresholdExceeded": 1, "aggregateUncSecDed": 3}},
        "ecc-sram", "block", ["threshold for a replacement", "3 uncorrectable SRAM errors"],
        id="the driver's SRAM flag, however few the errors",
    ),
    pytest.param(
        "h100x8", 2, {"ecc_sram": {"aggregateUncParity": 3, "aggregateUncSecDed": 2}},
        "ecc-sram", "warn", ["5 uncorrectable SRAM errors", "at most 4"],
        id="parity and double-bit errors of SRAM count together",
    ),
    pytest.param(
        "a100x8", 1, {"ecc_sram": TOO_OLD, "ecc_sram_counts": {"uncorrected_aggregate": 5}},
        "ecc-sram", "warn", ["5 uncorrectable SRAM errors"],
        id="SRAM errors where the driver has no flag yet",
    ),
    pytest.param(
        "h100x8", 4, {"ecc_dram": {"corrected_volatile": 20_000_000}},
        "ecc-corrected", "warn", ["DRAM had 20,000,000 correctable", "nvidia-smi -q -d ECC"],
        id="a flood of correctable DRAM errors",
    ),
    pytest.param(
        "h100x8", 4, {"ecc_sram_counts": {"corrected_volatile": 10_000}},
        "ecc-corrected", "warn", ["SRAM had 10,000 correctable"],
        id="a flood of correctable SRAM errors",
    ),
    pytest.param(
        "t4x1", 0, {"ecc_dram": NOT_SUPPORTED, "ecc_corrected_volatile": 30_000_000},
        "ecc-corrected", "warn", ["memory had 30,000,000 correctable"],
        id="a flood on a board that counts DRAM and SRAM together",
    ),
    pytest.param(
        "a100x8", 5, {"remapped_rows": {"pending": 1}},
        "row-remap-pending", "warn", ["next maintenance window", "does not use the page"],
        id="a pending remap on GA100, which contains errors",
    ),
    pytest.param(
        "b200x8", 5, {"remapped_rows": {"pending": 1}},
        "row-remap-pending", "warn", ["next maintenance window"],
        id="a pending remap on GB100, which contains errors",
    ),
    pytest.param(
        "l40sx8", 5, {"remapped_rows": {"pending": 1}},
        "row-remap-pending", "block", ["may use the faulty row", "nvidia-smi -r -i 5"],
        id="a pending remap on AD102, which does not contain errors",
    ),
    pytest.param(
        "l40sx8", 5, {"compute_capability": [8, 6], "remapped_rows": {"pending": 1}},
        "row-remap-pending", "block", ["may use the faulty row"],
        id="a pending remap on GA102",
    ),
    pytest.param(
        "l40sx8", 5, {"compute_capability": [12, 0], "remapped_rows": {"pending": 1}},
        "row-remap-pending", "block", ["may use the faulty row"],
        id="a pending remap on GB202",
    ),
    pytest.param(
        "h100x8", 7, {"remapped_rows": {"failed": 1}},
        "row-remap-failed", "block", ["could not be remapped", "field diagnostic"],
        id="a failed remap",
    ),
    pytest.param(
        "h100x8", 7, {"remapped_rows": {"uncorrected": 512}},
        "row-remap-count", "block", ["512 rows", "fewer than 512"],
        id="as many remapped rows as DCGM's limit",
    ),
    pytest.param(
        "h100x8", 7, {"remap_histogram": {"max": 2558, "low": 2}},
        "row-remap-spares", "warn", ["have no spare row left, 2 banks have only a few"],
        id="banks with few spare rows",
    ),
    pytest.param(
        "h100x8", 7, {"remap_histogram": {"max": 2559, "none": 1}},
        "row-remap-spares", "warn", ["1 memory banks have no spare row left"],
        id="a bank without spare rows",
    ),
    pytest.param(
        "t4x1", 0, {"retired_pages_pending": 1},
        "retired-pages", "warn", ["will be retired at the next reset"],
        id="a page waits to be retired",
    ),
    pytest.param(
        "t4x1", 0, {"retired_pages": {"single_bit": 60, "double_bit": 3}},
        "retired-pages", "block", ["63 pages are retired", "fewer than 63"],
        id="as many retired pages as DCGM's limit",
    ),
    pytest.param(
        "t4x1", 0, {"retired_pages": {"double_bit": 15}},
        "retired-pages", "warn", ["15 of them after double-bit", "PAGE_RETIREMENT"],
        id="many pages retired after double-bit errors",
    ),
    pytest.param(
        "b200x8", 2, {"repair": {"channel_pending": 1, "tpc_pending": 1}},
        "memory-repair", "warn", ["a repair of a memory channel and of a TPC is pending"],
        id="repairs wait",
    ),
    pytest.param(
        "b200x8", 2, {"memory_unrepairable": 1},
        "memory-repair", "block", ["unrepairable"],
        id="memory beyond repair",
    ),
]  # fmt: skip


@each_row("fault", [pytest.param(each.values, id=each.id) for each in FAULTS])
def test_a_fault_of_memory_is_told_of_its_gpu_and_nothing_else_is_alarmed(document, judged, fault):
    profile, gpu, facts, check, severity, words = fault
    node = document(profile)
    put(node["gpus"][gpu], facts)
    said = judged(node)
    assert said.troubles == {(check, severity, gpu)}
    text = said.text(check, gpu)
    for word in words:
        assert any(each in text for each in word.split("|")), (word, text)


JUST_GOOD = [
    ("h100x8", {"ecc_sram": {"aggregateUncParity": 2, "aggregateUncSecDed": 2}}),
    ("h100x8", {"ecc_dram": {"corrected_volatile": 19_999_999}}),
    ("h100x8", {"ecc_sram_counts": {"corrected_volatile": 9_999}}),
    ("h100x8", {"ecc_corrected_volatile": 19_999_999}),
    ("h100x8", {"remapped_rows": {"uncorrected": 511, "corrected": 600}}),
    ("h100x8", {"remap_histogram": {"max": 2000, "high": 300, "partial": 260}}),
    ("h100x8", {"ecc_uncorrected_aggregate": 40}),
    ("t4x1", {"retired_pages": {"single_bit": 48, "double_bit": 14}}),
    ("rtx4090x2", {"ecc_mode": {"current": 0, "pending": 0}}),
    ("rtx4090x2", {"ecc_mode": {"current": 1, "pending": 1}}),
    ("rtx4090x2", {"brand": 14, "ecc_mode": {"current": 0, "pending": 0}}),
    ("l40sx8", {"name": "NVIDIA RTX A6000", "brand": 13, "ecc_mode": {"current": 0, "pending": 0}}),
    ("l40sx8", {"ecc_mode": NOT_SUPPORTED}),
    ("b200x8", {"repair": NOT_SUPPORTED}),
    ("b200x8", {"memory_unrepairable": 0}),
    ("h100x8", {"repair": {"missing": "unknown", "code": 999}}),  # Hopper has no such repair
]


@each_row(("profile", "facts"), JUST_GOOD)
def test_what_is_just_below_a_limit_or_normal_for_its_kind_alarms_nobody(
    document, judged, profile, facts
):
    node = document(profile)
    for gpu in node["gpus"]:
        put(gpu, facts)
    checks = {*NOT_OF_TURING, "retired-pages", "memory-repair"}
    assert not [trouble for trouble in judged(node).troubles if trouble[0] in checks]


def test_errors_of_an_earlier_life_are_history_and_are_told_as_such(document, judged):
    node = document("h100x8")
    node["gpus"][1]["ecc_uncorrected_aggregate"] = 40
    found = judged(node).worst("ecc-uncorrected", 1)
    assert found.severity.word == "info"
    assert "40 uncorrectable memory errors in the GPU's life" in found.found


# Whether ECC is on, what is declared, what follows.
DECLARED = [
    (0, True, "block"),
    (0, False, "ok"),
    (1, False, "block"),
    (1, True, "ok"),
]


@pytest.mark.parametrize(("current", "declared", "severity"), DECLARED)
def test_what_is_declared_of_ecc_decides(document, judged, current, declared, severity):
    node = document("l40sx8")
    for gpu in node["gpus"]:
        gpu["ecc_mode"] = {"current": current, "pending": current}
    found = judged(node, {"gpus": {"ecc": declared}}).worst("ecc-mode", 4)
    assert found.severity.word == severity
    if severity == "block":
        assert found.source == "gpus.ecc in group_vars"
        assert f"-e {int(declared)}" in found.remedy[0].text


def test_declared_ecc_that_only_waits_for_a_reset_needs_no_switching_on(document, judged):
    node = document("l40sx8")
    node["gpus"][0]["ecc_mode"] = {"current": 0, "pending": 1}
    found = judged(node, {"gpus": {"ecc": True}}).worst("ecc-mode", 0)
    assert found.severity.word == "block"
    assert not [step for step in found.remedy if "-e 1" in step.text]


def test_ecc_is_declared_and_the_board_has_none(document, judged):
    node = document("rtx4090x2")
    for gpu in node["gpus"]:
        gpu["ecc_mode"] = NOT_SUPPORTED
    found = judged(node, {"gpus": {"ecc": True}}).worst("ecc-mode", 0)
    assert (found.severity.word, found.found) == ("block", "the GPU has no ECC")
    assert judged(node).worst("ecc-mode", 0).severity.word == "ok"


def test_a_desktop_board_is_expected_to_be_as_its_siblings(document, judged):
    off, on = document("rtx4090x2"), document("rtx4090x2")
    for gpu in on["gpus"]:
        gpu["ecc_mode"] = {"current": 1, "pending": 1}
    found = judged(off, siblings=[on, on]).worst("ecc-mode", 0)
    assert found.severity.word == "warn"
    assert found.source == "2 siblings of the same kind"


def test_siblings_without_ecc_do_not_make_it_right_on_a_data_centre_board(document, judged):
    node = document("h100x8")
    for gpu in node["gpus"]:
        gpu["ecc_mode"] = {"current": 0, "pending": 0}
    assert judged(node, siblings=[node, node]).worst("ecc-mode", 0).severity.word == "warn"


def test_remapped_rows_are_unknown_and_not_absent_while_mig_hides_them(document, judged):
    node = document("a100x8")
    node["gpus"][2].update(
        mig_mode={"current": 1, "pending": 1},
        remapped_rows=NOT_SUPPORTED,
        remap_histogram=NOT_SUPPORTED,
    )
    for check in ("pending", "failed", "count", "spares"):
        found = judged(node).worst(f"row-remap-{check}", 2)
        assert found.severity.word == "unknown"
        assert "while MIG is on" in found.found


FACTS_OF = {
    "ecc-mode": ["ecc_mode"],
    "ecc-uncorrected": ["ecc_uncorrected_volatile"],
    "ecc-sram": ["ecc_sram"],
    "ecc-corrected": ["ecc_dram"],
    "row-remap-pending": ["remapped_rows"],
    "row-remap-failed": ["remapped_rows"],
    "row-remap-count": ["remapped_rows"],
    "row-remap-spares": ["remap_histogram"],
    "memory-repair": ["repair"],
}


@each_row("check", FACTS_OF)
def test_a_fact_that_could_not_be_read_is_never_taken_for_a_pass(document, judged, check):
    node = document("b200x8")
    for fact in FACTS_OF[check]:
        node["gpus"][1][fact] = LOST
    found = judged(node).worst(check, 1)
    assert found.severity.word == "unknown"
    assert FACTS_OF[check][0] in found.found
    assert "lost" in found.found


@each_row(
    ("check", "path"),
    [
        *(("ecc-sram", ("ecc_sram", name)) for name in (
            "bThresholdExceeded", "aggregateUncParity", "aggregateUncSecDed")),
        *(("row-remap-spares", ("remap_histogram", name)) for name in ("none", "low")),
        *((f"row-remap-{name}", ("remapped_rows", fact)) for name, fact in (
            ("pending", "pending"), ("failed", "failed"), ("count", "uncorrected"))),
        *(("memory-repair", ("repair", f"{name}_pending")) for name in ("channel", "tpc")),
    ],
)  # fmt: skip
def test_a_part_of_a_fact_that_could_not_be_read_is_unknown(document, judged, check, path):
    node = document("b200x8")
    node["gpus"][1][path[0]][path[1]] = LOST
    found = judged(node).worst(check, 1)
    assert (found.severity.word, found.found) == (
        "unknown", f"{'.'.join(path)} could not be read (lost, code 15)"
    )  # fmt: skip


@pytest.mark.parametrize("fact", ["retired_pages", "retired_pages_pending"])
def test_retired_pages_that_could_not_be_read_are_unknown_where_there_are_such(
    document, judged, fact
):
    node = document("t4x1")
    node["gpus"][0][fact] = LOST
    assert judged(node).worst("retired-pages", 0).severity.word == "unknown"
    ampere = document("a100x8")
    ampere["gpus"][0][fact] = LOST
    assert judged(ampere).worst("retired-pages", 0).severity.word == "ok"


def test_a_board_whose_kind_cannot_be_read_is_not_judged_by_the_kinder_rule(document, judged):
    node = document("h100x8")
    node["gpus"][0]["remapped_rows"]["pending"] = 1
    node["gpus"][0]["compute_capability"] = LOST
    assert judged(node).worst("row-remap-pending", 0).severity.word == "unknown"


@pytest.mark.parametrize("fact", ["ecc_uncorrected_volatile", "remapped_rows", "remap_histogram"])
def test_an_answer_that_makes_no_sense_is_unknown(document, judged, fact):
    node = document("h100x8")
    node["gpus"][0][fact] = "garbage"
    checks = {check for check, severity, gpu in judged(node).troubles if severity == "unknown"}
    assert checks & set(NOT_OF_TURING)


def test_a_count_that_cannot_be_is_no_answer(document, judged):
    node = document("h100x8")
    node["gpus"][3]["ecc_uncorrected_volatile"] = -5
    assert judged(node).troubles == {("ecc-uncorrected", "unknown", 3)}
