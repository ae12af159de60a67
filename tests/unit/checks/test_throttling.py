"""What slows a GPU down, and what only looks so."""

from __future__ import annotations

import pytest

from gpufleet.checks.finding import Severity
from tests.support.rows import each_row

UNREAD = {"missing": "unknown", "code": 999}
GONE = {"missing": "function_not_found", "code": 13}
NOT_SUPPORTED = {"missing": "not_supported", "code": 3}
IDLE, SW_POWER, HW, SW_THERMAL, HW_THERMAL, BRAKE = 0x1, 0x4, 0x8, 0x20, 0x40, 0x80


def serving(pid=4711):
    """A worker of ours."""
    return {
        "pid": pid,
        "usedGpuMemory": 70 << 30,
        "name": "VLLM::Worker",
        "unit": "vllm-llama-0.service",
        "uid": 998,
    }


def samples(document, *bits, gpu=3):
    document["gpus"][gpu].update(throttle_samples=list(bits), throttle_reasons=bits[0])
    return document


# --- hardware-slowdown


@each_row(
    ("bits", "severity", "words"),
    [
        ([HW | HW_THERMAL] * 3, "block", "heat"),
        ([HW | BRAKE] * 3, "block", "power supply"),
        ([HW] * 3, "block", "hardware throttles"),
        ([HW | HW_THERMAL, HW | HW_THERMAL, 0], "warn", "2 of 3 samples"),
        ([HW | BRAKE, 0, 0], "warn", "1 of 3 samples"),
        # A passing brake beside lasting heat: the worse one is told.
        ([HW | HW_THERMAL | BRAKE, HW | HW_THERMAL, HW | HW_THERMAL], "block", "heat"),
    ],
)
def test_a_lasting_hardware_slowdown_stops_and_a_passing_one_warns(
    document, judged, bits, severity, words
):
    said = judged(samples(document("h100x8"), *bits))

    assert said.troubles == {("hardware-slowdown", severity, 3)}
    assert words in said.worst("hardware-slowdown").found


@pytest.mark.parametrize("bits", [[IDLE], [0], [SW_POWER | 0x100], [HW, 0, IDLE]])
def test_no_hardware_slowdown(document, judged, bits):
    """0x8 alone for a moment: a change of the power state reports it."""
    found = samples(document("h100x8"), *bits)
    found["gpus"][3]["processes"] = [serving()]

    said = judged(found)

    assert said.troubles == set()
    passing = HW in bits
    assert said.worst("hardware-slowdown", gpu=3).severity == (
        Severity.INFO if passing else Severity.OK
    )


def test_one_sample_proves_nothing_lasting(document, judged):
    assert judged(samples(document("h100x8"), HW | HW_THERMAL)).troubles == {
        ("hardware-slowdown", "warn", 3)
    }


def test_samples_that_could_not_be_read_are_unknown(document, judged):
    found = document("h100x8")
    found["gpus"][3]["throttle_samples"] = UNREAD

    assert judged(found).troubles == {("hardware-slowdown", "unknown", 3)}


# --- software-throttle


@pytest.mark.parametrize(("bits", "words"), [(SW_POWER, "power cap"), (SW_THERMAL, "heat")])
def test_an_idle_gpu_that_the_driver_slows_down_is_a_warning(document, judged, bits, words):
    said = judged(samples(document("h100x8"), bits))

    assert said.troubles == {("software-throttle", "warn", 3)}
    assert words in said.worst("software-throttle").found
    if bits == SW_POWER:
        assert "idles at 70 W" in said.worst("software-throttle").found


@pytest.mark.parametrize("bits", [SW_POWER, SW_THERMAL, SW_POWER | SW_THERMAL])
def test_under_load_the_driver_may_slow_a_gpu_down(document, judged, bits):
    found = samples(document("h100x8"), bits)
    found["gpus"][3]["processes"] = [serving()]

    assert judged(found).troubles == set()


def test_whether_a_slow_gpu_idles_may_be_unknown(document, judged):
    found = samples(document("h100x8"), SW_POWER)
    found["gpus"][3]["processes"] = UNREAD

    assert ("software-throttle", "unknown", 3) in judged(found).troubles


# --- temperature


@each_row(
    ("celsius", "severity"), [(86, "ok"), (87, "warn"), (88, "warn"), (89, "block"), (91, "block")]
)
def test_temperature_against_the_devices_own_limits(document, judged, celsius, severity):
    """The recorded H100: lowered clocks from 87 °C, halved from 89 °C, off at 92 °C."""
    found = document("h100x8")
    found["gpus"][3]["temperature_celsius"] = celsius

    said = judged(found)

    assert said.worst("temperature", gpu=3).severity.word == severity
    assert {trouble[0] for trouble in said.troubles} <= {"temperature", "gpu-outlier"}
    if severity != "ok":
        assert f"{celsius} °C" in said.worst("temperature").found
        limit = {"warn": 87, "block": 89}[severity]
        assert said.worst("temperature").expected == f"below {limit} °C"


@pytest.mark.parametrize(("celsius", "severity"), [(86, "ok"), (87, "warn"), (95, "warn")])
def test_a_device_that_names_only_where_it_lowers_its_clocks(document, judged, celsius, severity):
    found = document("h100x8")
    found["gpus"][3].update(temperature_celsius=celsius, temperature_slowdown_celsius=NOT_SUPPORTED)

    said = judged(found)

    assert said.worst("temperature", gpu=3).severity.word == severity
    if severity == "warn":
        assert said.worst("temperature").expected == "below 87 °C"


def by_margin(document, celsius, margin):
    """Ada and newer name no limits in °C, but how far the next one is."""
    gpu = document["gpus"][3]
    gpu.update(
        temperature_celsius=celsius,
        margin_celsius=margin,
        temperature_slowdown_celsius=NOT_SUPPORTED,
        temperature_gpu_max_celsius=NOT_SUPPORTED,
    )
    return document


@each_row(
    ("celsius", "margin", "severity"),
    [
        (60, 27, "ok"),
        (86, 1, "ok"),
        (87, 0, "warn"),
        (89, -2, "warn"),  # the recorded H100 halves its clocks below -2
        (90, -3, "block"),
        (45, -5, "ok"),  # H100s answer so while they are cool
        (45, 0, "ok"),
        (69, 0, "ok"),
        (70, 0, "warn"),
    ],
)
def test_temperature_by_margin(document, judged, celsius, margin, severity):
    said = judged(by_margin(document("h100x8"), celsius, margin))

    assert said.worst("temperature", gpu=3).severity.word == severity


@pytest.mark.parametrize(("margin", "severity"), [(1, "ok"), (0, "warn"), (-1, "block")])
def test_a_margin_without_its_limits_ends_at_zero(document, judged, margin, severity):
    found = by_margin(document("h100x8"), 87, margin)
    found["gpus"][3]["temperature_limits"] = NOT_SUPPORTED

    assert judged(found).worst("temperature", gpu=3).severity.word == severity


def test_a_wrong_margin_beside_good_limits_is_not_believed(document, judged):
    found = document("h100x8")
    for gpu in found["gpus"]:
        gpu.update(temperature_celsius=80, margin_celsius=-5)

    assert judged(found).troubles == set()


def test_a_device_that_names_no_limits_is_not_judged_and_that_is_said(document, judged):
    found = by_margin(document("h100x8"), 95, 0)
    found["gpus"][3]["margin_celsius"] = NOT_SUPPORTED

    assert judged(found).worst("temperature", gpu=3).severity is Severity.INFO


@pytest.mark.parametrize(("celsius", "troubles"), [(94, set()), (95, {("temperature", "warn", 3)})])
def test_hot_memory_is_a_warning(document, judged, celsius, troubles):
    """The recorded H100's memory is slowed down from 95 °C."""
    found = document("h100x8")
    found["gpus"][3]["temperature_memory_celsius"] = celsius

    said = judged(found)

    assert said.troubles - {("gpu-outlier", "warn", 3)} == troubles
    if troubles:
        assert "memory is at 95 °C" in said.worst("temperature").found


@pytest.mark.parametrize("fact", ["temperature_celsius", "temperature_slowdown_celsius"])
def test_a_temperature_or_limit_that_could_not_be_read_is_unknown(document, judged, fact):
    found = document("h100x8")
    found["gpus"][3][fact] = UNREAD

    assert judged(found).troubles == {("temperature", "unknown", 3)}


# --- power-limit


def limited(document, watts, *gpus):
    for gpu in gpus or range(len(document["gpus"])):
        document["gpus"][gpu]["power_limit_milliwatts"] = watts * 1000
    return document


def test_a_power_limit_below_the_boards_default_is_a_warning(document, judged):
    said = judged(limited(document("h100x8"), 500, 3))

    assert said.troubles == {("power-limit", "warn", 3)}
    text = said.text("power-limit")
    assert all(word in text for word in ["500 W", "700 W", "nvidia-smi -i 3 -pl 700"])


@each_row(
    ("settings", "watts", "fires"),
    [
        ({}, 699, False),
        ({}, 698, True),
        ({"power_limit_watts": 500}, 501, False),
        ({"power_limit_watts": 500}, 502, True),
        ({"power_limit_watts": 500}, 499, False),
        ({"power_limit_watts": 500}, 498, True),
    ],
)
def test_a_watt_more_or_less_is_rounding(document, judged, settings, watts, fires):
    found = limited(limited(document("h100x8"), settings.get("power_limit_watts", 700)), watts, 3)

    said = judged(found, settings={"gpus": settings})

    assert said.troubles == ({("power-limit", "warn", 3)} if fires else set())


def test_a_declared_power_limit_is_the_right_one(document, judged):
    settings = {"gpus": {"power_limit_watts": 500}}

    assert judged(limited(document("h100x8"), 500), settings=settings).troubles == set()


def test_a_declared_power_limit_that_was_forgotten_is_a_warning(document, judged):
    """A reboot sets the board's default again: the rack was wired for less."""
    said = judged(
        limited(limited(document("h100x8"), 500), 700, 3),
        settings={"gpus": {"power_limit_watts": 500}},
    )

    assert said.troubles == {("power-limit", "warn", 3)}
    assert said.worst("power-limit").source == "gpus.power_limit_watts in group_vars"


def test_a_fleet_that_runs_at_less_power_is_of_one_mind(document, judged):
    siblings = [limited(document("h100x8"), 500) for _ in range(2)]

    assert judged(limited(document("h100x8"), 500), siblings=siblings).troubles == set()
    said = judged(limited(document("h100x8"), 400, 3), siblings=siblings)
    assert said.troubles == {("power-limit", "warn", 3)}
    assert said.worst("power-limit").expected == "500 W"


def test_one_sibling_is_no_fleet(document, judged):
    """Eight GPUs of one node are one voice."""
    sibling = limited(document("h100x8"), 500)

    said = judged(limited(document("h100x8"), 500, 3), siblings=[sibling])

    assert said.troubles == {("power-limit", "warn", 3)}


def test_a_power_limit_that_could_not_be_read_is_unknown(document, judged):
    found = document("h100x8")
    found["gpus"][3]["power_limit_milliwatts"] = UNREAD

    assert judged(found).troubles == {("power-limit", "unknown", 3)}


@pytest.mark.parametrize("samples", [[], [-5], [0, -1, 0]])
def test_samples_that_say_nothing_or_nonsense_are_no_answer(document, judged, samples):
    found = document("h100x8")
    found["gpus"][3]["throttle_samples"] = samples

    assert judged(found).troubles == {("hardware-slowdown", "unknown", 3)}


@pytest.mark.parametrize(
    ("fact", "checks"),
    [
        ("throttle_reasons", {"software-throttle", "locked-clocks"}),
        ("power_limit_milliwatts", {"power-limit"}),
    ],
)
def test_a_number_that_cannot_be_is_no_answer(document, judged, fact, checks):
    found = document("h100x8")
    found["gpus"][3][fact] = -5

    assert judged(found).troubles == {(check, "unknown", 3) for check in checks}


# --- locked-clocks


@each_row(
    ("reasons", "facts", "words"),
    [
        (IDLE | 0x2, {}, "a setting has locked the GPU's clocks"),
        (IDLE, {"application_clocks_mhz": {"sm": 1200, "memory": 2619}}, "1200 MHz instead of"),
        (0x2, {"application_clocks_mhz": {"sm": 1980, "memory": 1593}}, "2619 (memory)"),
    ],
)
def test_clocks_that_a_setting_holds_down_warn(document, judged, reasons, facts, words):
    found = samples(document("h100x8"), reasons)
    found["gpus"][3] |= facts

    said = judged(found)

    assert said.troubles == {("locked-clocks", "warn", 3)}
    assert words in said.worst("locked-clocks").found
    assert "nvidia-smi -i 3 -rac" in said.text("locked-clocks")


@each_row(
    ("profile", "reasons", "facts"),
    [
        # Raised, or as delivered below the highest, as a V100 is.
        ("h100x8", 0x2, {"application_clocks_mhz": {"sm": 1980, "memory": 2700}}),
        ("h100x8", 0x2, {"application_clocks_mhz": {"sm": 1312, "memory": 2619},
                         "default_application_clocks_mhz": {"sm": 1312, "memory": 2619}}),
        ("rtx4090x2", IDLE, {}),
        # CUDA 14's drivers no longer tell them.
        ("h100x8", IDLE, {
            name: dict.fromkeys(("sm", "memory"), GONE)
            for name in ("application_clocks_mhz", "default_application_clocks_mhz")
        }),
    ],
)  # fmt: skip
def test_clocks_as_delivered_or_raised_are_no_problem(document, judged, profile, reasons, facts):
    found = document(profile)
    for gpu in found["gpus"]:
        gpu.update(throttle_samples=[reasons], throttle_reasons=reasons, **facts)

    assert judged(found).troubles == set()


def test_a_document_of_an_older_probe_is_judged_by_the_reasons(document, judged):
    found = samples(document("h100x8"), 0x2)
    for gpu in found["gpus"]:
        for name in ("application_clocks_mhz", "default_application_clocks_mhz", "clocks_max_mhz"):
            del gpu[name]

    assert judged(found).troubles == {("locked-clocks", "warn", 3)}


def test_clocks_that_could_not_be_read_are_unknown(document, judged):
    found = document("h100x8")
    found["gpus"][3]["application_clocks_mhz"]["sm"] = UNREAD

    assert judged(found).worst("locked-clocks", 3).severity.word == "unknown"
