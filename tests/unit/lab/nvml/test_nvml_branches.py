"""An older simulated driver has fewer functions, structures and fields."""

import pytest

NOT_FOUND, WRONG_VERSION, BAD_FIELD = {"error": 13}, {"error": 25}, {"error": 2}


@pytest.mark.parametrize(
    ("question", "before", "since"),
    [
        (
            "nvmlDeviceGetMemoryInfo(gpu(0), version=nvmlMemory_v2).total >> 20",
            "495.46",
            "510.47.03",
        ),
        ("nvmlDeviceGetComputeRunningProcesses_v3(gpu(0))", "495.46", "510.47.03"),
        ("nvmlDeviceGetCurrentClocksEventReasons(gpu(0))", "525.147.05", "535.54.03"),
        ("nvmlDeviceGetModuleId(gpu(0))", "525.147.05", "535.54.03"),
        (
            "filled('nvmlDeviceGetSramEccErrorStatus', 'c_nvmlEccSramErrorStatus_v1_t', 0)",
            "535.129.03",
            "535.161.07",
        ),
        ("nvmlSystemGetDriverBranch().branch", "550.163.01", "560.28.03"),
        ("nvmlDeviceGetTemperatureV(gpu(0), 0)", "565.57.01", "570.86.10"),
        ("nvmlDeviceGetRepairStatus(gpu(0))", "575.51.02", "580.65.06"),
    ],
)
def test_a_function_appears_with_its_branch(machine, question, before, since):
    """Before, the library does not know it (13); since then it answers."""
    asked = "nvmlSystemGetDriverVersion()", question
    old = machine("b200x8", f"system.driver = {before}").ask(*asked)
    new = machine("b200x8", f"system.driver = {since}").ask(*asked)

    assert old == [before, NOT_FOUND]
    assert new[0] == since
    assert "error" not in str(new[1])


def test_a_stub_has_a_branch_as_well(machine):
    """What is not simulated is unknown to old drivers and not supported by new ones."""
    question = "nvmlDeviceGetNvlinkBwMode(gpu(0), byref(c_uint()))"

    assert machine("h100x8", "system.driver = 550.54").ask(question) == [NOT_FOUND]
    assert machine("h100x8", "system.driver = 570.124").ask(question) == [{"error": 3}]


@pytest.mark.parametrize(
    ("driver", "first", "second", "third"),
    [
        ("515.105.01", NOT_FOUND, NOT_FOUND, NOT_FOUND),
        ("535.183.06", 3, NOT_FOUND, NOT_FOUND),
        ("570.124.06", 3, 3, WRONG_VERSION),
        ("580.95.05", 3, 3, 3),
    ],
)
def test_fabric_information_grew_with_the_branches(machine, driver, first, second, third):
    """R525 brought the plain form, R550 version 2, R580 version 3; a caller has to step down."""
    answers = machine("b200x8", f"system.driver = {driver}").ask(
        "fabric(0, 'c_nvmlGpuFabricInfo_t')",
        "fabric(0, 'c_nvmlGpuFabricInfo_v2_t')",
        "fabric(0, 'c_nvmlGpuFabricInfo_v3_t')",
    )

    states = [answer.get("state", answer) for answer in answers]
    assert states == [first, second, third]


def test_what_the_fabric_says(machine):
    """A rack's trays share a cluster and a clique; health is in the mask and its summary."""
    (info,) = machine("gb200x4").ask("fabric(0, 'c_nvmlGpuFabricInfo_v3_t')")

    assert info["cliqueId"] == 32766
    assert info["status"] == 0
    assert info["healthMask"] == 0b0001_10_10_10_10
    assert info["healthSummary"] == 1


def test_an_ampere_gpu_is_on_no_fabric(machine):
    """The driver knows the call; the board does not support it."""
    answers = machine("a100x8", "system.driver = 570.124.06").ask(
        "fabric(0, 'c_nvmlGpuFabricInfo_v2_t')", "fabric(0, 'c_nvmlGpuFabricInfo_t')"
    )

    assert answers == [{"error": 3}, {"error": 3}]


@pytest.mark.parametrize(
    ("driver", "recovery", "speed"),
    [("450.80.02", BAD_FIELD, BAD_FIELD), ("525.60.13", BAD_FIELD, 26562)],
)
def test_a_field_appears_with_its_branch(machine, driver, recovery, speed):
    """An id past the branch's last is an invalid argument; the call itself succeeds."""
    answers = machine("h100x8", f"system.driver = {driver}").ask(
        "field(0, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)",
        "field(0, NVML_FI_DEV_NVLINK_GET_SPEED, 0)",
        "field(0, NVML_FI_DEV_NVLINK_LINK_COUNT)",
    )

    assert answers == [recovery, speed, 18]


def test_the_answer_to_an_unknown_field_can_be_chosen(machine):
    """Nobody has seen what an old driver says, so a probe has to cope with either."""
    old = machine("a100x8", "system.unknown_field = 3")

    assert old.ask("field(0, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)") == [{"error": 3}]


def test_a_structure_of_another_version_is_refused(machine):
    """The version word is compared whole, size and number."""
    answers = machine("h100x8").ask(
        "nvmlDeviceGetMemoryInfo(gpu(0), version=nvmlMemory_v2 + 1)",
        "nvmlDeviceGetMemoryInfo(gpu(0), version=0x1000028)",
    )

    assert answers == [WRONG_VERSION] * 2
