"""PCIe: lanes that are missing by fault or by design, speed under load, replays."""

from __future__ import annotations

import math

import pytest

from gpufleet.checks.finding import Severity
from tests.support.rows import each_row

UNREAD = {"missing": "unknown", "code": 999}


def width(document, lanes, *gpus):
    for gpu in gpus or range(len(document["gpus"])):
        document["gpus"][gpu]["pcie_width"] = lanes
    return document


def working(document, gpu, state=0):
    """A worker of ours computes on it."""
    document["gpus"][gpu].update(
        performance_state=state,
        processes=[
            {
                "pid": 4711,
                "usedGpuMemory": 20 << 30,
                "name": "VLLM::Worker",
                "unit": "vllm-llama-0.service",
                "uid": 998,
            }
        ],
    )
    return document


# --- pcie-width


def test_one_gpu_narrower_than_the_others_of_its_node_is_unfit(document, judged):
    said = judged(width(document("h100x8"), 8, 5))

    assert said.troubles == {("pcie-width", "block", 5)}
    text = said.text("pcie-width")
    bus_id = document("h100x8")["gpus"][5]["pci"]["bus_id"]
    assert all(word in text for word in ["8 PCIe lanes", "16 lanes", f"lspci -vv -s {bus_id}"])


def test_another_model_beside_it_says_nothing_of_its_slot(document, judged):
    found = width(document("l40sx8"), 8, 5)
    found["gpus"][5]["name"] = "NVIDIA L4"

    assert judged(found).worst("pcie-width").severity is Severity.WARN


def test_gpus_that_are_narrow_alike_may_be_so_by_design(document, judged):
    """T4 and GeForce boards are often built into slots of eight lanes."""
    said = judged(width(document("l40sx8"), 8))

    assert said.troubles == {("pcie-width", "warn", gpu) for gpu in range(8)}
    assert "gpus.pcie_width: 8" in said.text("pcie-width")


def test_of_two_gpus_the_second_slot_may_be_smaller(document, judged):
    assert judged(width(document("rtx4090x2"), 4, 1)).troubles == {("pcie-width", "warn", 1)}


def test_a_narrow_gpu_alone_is_a_warning(document, judged):
    assert judged(width(document("t4x1"), 8)).troubles == {("pcie-width", "warn", 0)}


@pytest.mark.parametrize(
    ("declared", "lanes", "troubles"),
    [(8, 8, set()), (8, 16, set()), (8, 4, {("pcie-width", "block", 0)})],
)
def test_the_declared_width_decides(document, judged, declared, lanes, troubles):
    settings = {"gpus": {"pcie_width": declared}}

    assert judged(width(document("t4x1"), lanes), settings=settings).troubles == troubles


def test_siblings_with_the_same_slot_decide(document, judged):
    """The second slot of all these workstations has four lanes; the first has sixteen."""
    siblings = [width(document("rtx4090x2"), 4, 1) for _ in range(2)]

    assert judged(width(document("rtx4090x2"), 4, 1), siblings=siblings).troubles == set()
    said = judged(width(document("rtx4090x2"), 4), siblings=siblings)
    assert said.troubles == {("pcie-width", "block", 0)}
    assert said.worst("pcie-width").source == "2 siblings of the same kind"


def test_one_sibling_alone_does_not_excuse_a_gpu(document, judged):
    sibling = width(document("h100x8"), 8, 5)

    said = judged(width(document("h100x8"), 8, 5), siblings=[sibling])

    assert said.troubles == {("pcie-width", "block", 5)}


def test_lanes_hardly_matter_where_the_cpu_is_reached_over_c2c(document, judged):
    said = judged(width(document("gb200x4"), 1))

    assert said.troubles == set()
    assert said.worst("pcie-width").severity is Severity.INFO


@pytest.mark.parametrize("lanes", [0, 33, 0xFFFFFFFF])
def test_a_width_that_pcie_does_not_have_is_unknown(document, judged, lanes):
    assert judged(width(document("gb200x4"), lanes, 2)).troubles == {("pcie-width", "unknown", 2)}


@pytest.mark.parametrize("fact", ["pcie_width", "pcie_width_max"])
def test_a_width_that_could_not_be_read_is_unknown(document, judged, fact):
    found = document("t4x1")
    found["gpus"][0][fact] = UNREAD

    assert ("pcie-width", "unknown", 0) in judged(found).troubles


# --- pcie-generation


def test_an_idle_gpu_may_run_its_link_slowly(document, judged):
    """The recorded GeForce idles at generation 1 of 4: nothing is known of its link."""
    said = judged(document("rtx4090x2"))

    assert said.troubles == set()
    assert said.worst("pcie-generation").severity is Severity.INFO


def test_a_working_gpu_at_less_than_its_generation_is_a_warning(document, judged):
    found = working(document("h100x8"), 5)
    found["gpus"][5]["pcie_generation"] = 3

    said = judged(found)

    assert said.troubles == {("pcie-generation", "warn", 5)}
    assert "generation 3" in said.worst("pcie-generation").found


@pytest.mark.parametrize("state", [2, 8])
def test_a_gpu_in_a_lower_power_state_is_not_judged(document, judged, state):
    """GeForce computes in P2, and an idle GPU with a model loaded rests in P8."""
    assert judged(working(document("rtx4090x2"), 0, state)).troubles == set()


def test_a_generation_that_could_not_be_read_is_unknown(document, judged):
    found = document("h100x8")
    found["gpus"][5]["pcie_generation"] = UNREAD

    assert ("pcie-generation", "unknown", 5) in judged(found).troubles


# --- pcie-replays


@each_row(
    ("replays", "hours", "severity"),
    [
        (0, 1, "ok"),
        (31, 0.01, "ok"),  # of the first minute after boot: links train
        (32, 0.01, "warn"),
        (31 * 60, 1, "ok"),  # 16 lanes of generation 5: 31 a minute
        (31 * 60 + 1, 1, "warn"),
        (100_000, 24, "warn"),
        (100_000, 240, "ok"),
    ],
)
def test_more_replays_than_the_bit_error_rate_explains(document, judged, replays, hours, severity):
    found = document("h100x8")
    found["system"]["uptime_seconds"] = hours * 3600
    found["gpus"][5]["pcie_replays"] = replays

    said = judged(found)

    assert said.worst("pcie-replays", gpu=5).severity.word == severity
    assert {trouble[0] for trouble in said.troubles} <= {"pcie-replays"}


def test_a_slow_link_may_replay_less(document, judged):
    """The T4's 16 lanes of generation 3 may have 8 a minute."""
    found = document("t4x1")
    found["system"]["uptime_seconds"] = 3600
    found["gpus"][0]["pcie_replays"] = 8 * 60 + 1

    said = judged(found)

    assert said.troubles == {("pcie-replays", "warn", 0)}
    assert "8 per minute at most" in said.text("pcie-replays")


@each_row(
    ("generation", "gigabits"), [(1, 2.5), (2, 5), (3, 8), (4, 16), (5, 32), (6, 64), (7, 64)]
)
def test_what_one_wrong_bit_in_a_million_million_makes(document, judged, generation, gigabits):
    """By a lane's bits a minute; a generation that is not known is judged as the fastest."""
    found = document("h100x8")
    found["gpus"][5].update(pcie_generation_max=generation, pcie_replays=10**9)

    allowed = math.ceil(16 * gigabits * 1e9 * 60 / 1e12)

    assert judged(found).worst("pcie-replays").expected == f"{allowed} per minute at most"


def test_replays_without_a_time_are_unknown(document, judged):
    found = document("h100x8")
    found["gpus"][5]["pcie_replays"] = 7
    found["system"]["uptime_seconds"] = UNREAD

    assert ("pcie-replays", "unknown", 5) in judged(found).troubles


def test_replays_that_could_not_be_read_are_unknown(document, judged):
    found = document("h100x8")
    found["gpus"][5]["pcie_replays"] = UNREAD

    assert judged(found).troubles == {("pcie-replays", "unknown", 5)}


@pytest.mark.parametrize(
    ("fact", "check", "value"),
    [
        ("pcie_replays", "pcie-replays", -5),
        ("pcie_generation", "pcie-generation", 0),
        ("pcie_generation", "pcie-generation", -5),
        ("pcie_generation_max", "pcie-generation", 0),
    ],
)
def test_a_number_that_cannot_be_is_no_answer(document, judged, fact, check, value):
    found = document("h100x8")
    found["gpus"][3][fact] = value

    assert judged(found).troubles == {(check, "unknown", 3)}
