"""What a profile can break, and that nothing else breaks with it."""

import json
import os
import signal
import subprocess
import time

import pytest

LOST = {"error": 15}


@pytest.mark.parametrize(
    ("code", "meaning"), [(9, "driver not loaded"), (18, "version mismatch"), (4, "no permission")]
)
def test_the_library_does_not_open(machine, code, meaning):
    """nvmlInit itself answers what a broken driver answers."""
    broken = machine("h100x8", f"error.nvmlInitWithFlags = {code}")

    assert broken.ask("nvmlDeviceGetCount()") == [{"error": code}]


def test_no_profile_is_no_driver(machine, tmp_path):
    """A machine that nobody described has no driver loaded, and says which file is missing."""
    bare = machine("t4x1")
    bare.overlay.unlink()

    run = bare.run(json.dumps(["nvmlDeviceGetCount()"]))

    assert json.loads(run.stdout) == [{"error": 9}]
    assert str(bare.overlay) in run.stderr


def test_a_lost_gpu_fails_alone(machine):
    """Every call on it answers 15, its handle included; its neighbours stay whole."""
    names = [f"nvmlDeviceGetName(gpu({index}))" for index in range(8)]

    answers = machine("h100x8", "gpu.5.error.* = 15").ask(
        "nvmlDeviceGetCount()", *names, "nvmlDeviceGetGpuOperationMode(gpu(5))"
    )

    assert answers[0] == 8
    assert answers[6] == LOST
    assert [name for name in answers[1:9] if name != LOST] == ["NVIDIA H100 80GB HBM3"] * 7
    assert answers[9] == LOST


def test_a_lost_gpu_whose_handle_still_comes(machine):
    """0 excepts one function from the star: then functions that are only stubs are lost as well."""
    lost = machine("h100x8", "gpu.5.error.* = 15", "gpu.5.error.nvmlDeviceGetHandleByIndex_v2 = 0")

    answers = lost.ask(
        "gpu(5) is not None",
        "nvmlDeviceGetUUID(gpu(5))",
        "nvmlDeviceGetGpuOperationMode(gpu(5))",
        "nvmlDeviceGetGpuOperationMode(gpu(4))",
        "nvmlDeviceGetP2PStatus(gpu(0), gpu(5), 2)",
    )
    assert answers == [True, LOST, LOST, {"error": 3}, LOST]


def test_an_error_every_third_time(machine):
    """A flaky call fails on its third, sixth ... time, and is counted once a call."""
    flaky = machine("t4x1", "error.nvmlDeviceGetHandleByIndex_v2 = 999/3")

    answers = flaky.ask(*["gpu(0) is not None"] * 6)

    assert answers == [True, True, {"error": 999}, True, True, {"error": 999}]


def test_an_error_from_the_third_time_on(machine):
    """Counted in each process: a GPU that falls off the bus while it is asked."""
    vanishing = machine("h100x8", "gpu.2.error.* = 15@4")

    # gpu(2) is a call as well.
    assert vanishing.ask(
        "[nvmlDeviceGetIndex(gpu(2)), nvmlDeviceGetNvLinkState(gpu(0), 3)]",
        "nvmlDeviceGetMinorNumber(gpu(2))",
        "nvmlDeviceGetIndex(gpu(2))",
        "nvmlDeviceGetIndex(gpu(1))",
    ) == [[2, 1], LOST, LOST, 1]


def test_a_gpu_that_answers_now_and_then_is_still_linked(machine):
    """Only who has lost all calls takes the links of its peers down."""
    flaky = machine("a100x4-pcie", "gpu.1.error.* = 999/3")

    assert flaky.ask("nvmlDeviceGetNvLinkState(gpu(0), 3)") == [1]
    assert machine("a100x4-pcie", "gpu.1.error.* = 15").ask(
        "nvmlDeviceGetNvLinkState(gpu(0), 3)"
    ) == [0]


def test_fewer_gpus_from_a_call_on(machine):
    """The last GPU is gone from then on, under a handle that was good before."""
    shrinking = machine("h100x8", "count = 8,7@5")

    answers = shrinking.ask(
        "nvmlDeviceGetCount()",
        "nvmlDeviceGetIndex(gpu(7))",
        "nvmlDeviceGetCount()",
        "nvmlDeviceGetCount()",
        "nvmlDeviceGetIndex(gpu(7))",
    )
    assert answers == [8, 7, 8, 7, {"error": 2}]


def test_reasons_that_change_from_question_to_question(machine):
    """The last one stays: a slowdown of a moment."""
    momentary = machine("h100x8", "gpu.1.clocks.reasons = 0x48,0x40,1")

    assert momentary.ask(
        "[nvmlDeviceGetCurrentClocksEventReasons(gpu(1)) for _ in range(5)]",
        "nvmlDeviceGetCurrentClocksEventReasons(gpu(0))",
    ) == [[0x48, 0x40, 1, 1, 1], 1]


def test_bytes_that_are_no_text(machine):
    """Written as escapes, so that the profile itself stays text."""
    garbled = machine("h100x8", r"gpu.0.name = A\xff\x80B", r"gpu.1.name = C:\xyz")

    assert garbled.ask("nvmlDeviceGetName(gpu(0))", "nvmlDeviceGetName(gpu(1))") == [
        {"error": "not text"},
        r"C:\xyz",
    ]


@pytest.mark.parametrize("code", [0, 4, 9, 18])
def test_the_library_tells_its_own_version_unopened(machine, code):
    """That is how a library is known that is newer than the loaded module."""
    mismatched = machine(
        "h100x8", f"error.nvmlInitWithFlags = {code}", "system.library = 575.57.08"
    )
    program = (
        "import ctypes; nvml = ctypes.CDLL('libnvidia-ml.so.1')\n"
        "text = ctypes.create_string_buffer(80)\n"
        "print(nvml.nvmlSystemGetNVMLVersion(text, 80), text.value.decode())\n"
        "print(nvml.nvmlInitWithFlags(0), nvml.nvmlSystemGetNVMLVersion(text, 80))\n"
        "print(text.value.decode())\n"
    )

    done = subprocess.run(
        ["python3", "-c", program],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(mismatched.library.parent),
            "GPUFLEET_NVML_PROFILE": f"{mismatched.profile}:{mismatched.overlay}",
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n") == [
        "0 12.575.57.08", f"{code} 0", "12.575.57.08", "",
    ]  # fmt: skip


def test_a_link_without_errors_has_a_tiny_bit_error_rate_not_none(machine):
    """Mantissa 15 and exponent -255; a link with errors has what the profile says."""
    rates = machine("b200x8", "gpu.1.field.220.3 = 0x109").ask(
        "field(0, NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER, 3)",
        "field(0, NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER, 3)",
        "field(1, NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER, 3)",
        "field(0, NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS, 3)",
    )

    assert rates == [0xFFF, 0xFFF, 0x109, 0]


def test_a_call_that_hangs(machine):
    """The call comes back after the time that was asked for, with its usual answer."""
    slow = machine("h100x8", "gpu.2.hang.nvmlDeviceGetName = 0.7")

    began = time.monotonic()
    answers = slow.ask("nvmlDeviceGetName(gpu(2))", "nvmlDeviceGetName(gpu(1))")

    assert time.monotonic() - began >= 0.7
    assert answers == ["NVIDIA H100 80GB HBM3"] * 2
    with pytest.raises(subprocess.TimeoutExpired):
        machine("h100x8", "gpu.2.hang.* = 600").ask("nvmlDeviceGetUUID(gpu(2))", timeout=1)


def test_a_call_that_crashes(machine):
    """The process that asks dies of SIGSEGV, as it does in a driver that lost its GPU."""
    crashing = machine("h100x8", "gpu.2.crash.nvmlDeviceGetName = 1")

    run = crashing.run(json.dumps(["nvmlDeviceGetName(gpu(2))"]))

    assert run.returncode == -signal.SIGSEGV
    assert crashing.ask("nvmlDeviceGetName(gpu(1))") == ["NVIDIA H100 80GB HBM3"]


def test_one_dead_link(machine):
    """The GPU with the dead link is narrower towards all; the other pairs keep their width."""
    (matrix, states, count, switched) = machine("h100x8", "gpu.3.nvlink.down = 7").ask(
        "matrix()",
        "[nvmlDeviceGetNvLinkState(gpu(3), link) for link in (6, 7, 8)]",
        "field(3, NVML_FI_DEV_NVLINK_LINK_COUNT)",
        "[field(i, NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT) for i in (2, 3)]",
    )

    assert (states, count, switched) == ([1, 0, 1], 18, [18, 17])
    assert all(
        cell == ("X" if i == j else "NV17" if 3 in (i, j) else "NV18")
        for i, row in enumerate(matrix)
        for j, cell in enumerate(row)
    )


def test_a_gpu_without_any_link(machine):
    """It falls back to PCIe towards everyone, and P2PStatus says so."""
    (matrix, p2p) = machine("h100x8", "gpu.2.nvlink.down = all").ask(
        "matrix()", "nvmlDeviceGetP2PStatus(gpu(2), gpu(3), 2)"
    )

    assert matrix[2] == ["NODE", "NODE", "X", "NODE", "SYS", "SYS", "SYS", "SYS"]
    assert p2p == 5


def test_a_fabric_that_did_not_start(machine):
    """The state is told, and nobody reaches anybody over NVLink."""
    answers = machine("h100x8", "gpu.*.fabric.state = 1").ask(
        "fabric(0, 'c_nvmlGpuFabricInfo_v2_t')['state']",
        "nvmlDeviceGetP2PStatus(gpu(0), gpu(1), 2)",
    )

    assert answers == [1, 5]


def test_broken_memory(machine):
    """ECC counters by place and their sum, remapped rows, and the driver's own verdict."""
    answers = machine(
        "h100x8",
        "gpu.1.ecc.unc_vol.dram = 2",
        "gpu.1.ecc.unc_agg.sram = 5",
        "gpu.1.ecc.sram_threshold = 1",
        "gpu.1.remap.unc = 9",
        "gpu.1.remap.pending = 1",
        "gpu.1.remap.none = 1",
        "gpu.1.recovery_action = 1",
        "gpu.1.ecc.pending = 0",
        "gpu.1.inforom.corrupted = 1",
    ).ask(
        "nvmlDeviceGetTotalEccErrors(gpu(1), 1, 0)",
        "nvmlDeviceGetTotalEccErrors(gpu(1), 1, 1)",
        "nvmlDeviceGetMemoryErrorCounter(gpu(1), 1, 0, NVML_MEMORY_LOCATION_DRAM)",
        "nvmlDeviceGetMemoryErrorCounter(gpu(1), 1, 1, NVML_MEMORY_LOCATION_SRAM)",
        "filled('nvmlDeviceGetSramEccErrorStatus', 'c_nvmlEccSramErrorStatus_v1_t', 1)"
        "['bThresholdExceeded']",
        "nvmlDeviceGetRemappedRows(gpu(1))",
        "field(1, NVML_FI_DEV_REMAPPED_PENDING)",
        "nvmlDeviceGetRowRemapperHistogram(gpu(1)).none",
        "field(1, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)",
        "nvmlDeviceGetEccMode(gpu(1))",
        "nvmlDeviceValidateInforom(gpu(1))",
        "nvmlDeviceGetTotalEccErrors(gpu(0), 1, 1)",
    )

    assert answers == [
        2, 5, 2, 5, 1, [0, 9, 1, 0], 1, 1, 1, [1, 0], {"error": 14}, 0
    ]  # fmt: skip


def test_retired_pages(machine):
    """Turing's way: one address for every page."""
    answers = machine("t4x1", "gpu.0.retired.dbe = 3", "gpu.0.retired.pending = 1").ask(
        "len(nvmlDeviceGetRetiredPages(gpu(0), 1))",
        "nvmlDeviceGetRetiredPages(gpu(0), 0)",
        "nvmlDeviceGetRetiredPagesPendingStatus(gpu(0))",
    )

    assert answers == [3, [], 1]


def test_foreign_processes(machine):
    """
    They are listed with their memory and name, and their memory is used memory. No process of this
    machine has their number: the kernel's highest is 4,194,304.
    """
    answers = machine(
        "h100x8",
        "gpu.0.proc.0 = 4194342,30000,/opt/train.py",
        "gpu.0.proc.1 = 4194343,-",
        f"gpu.1.graphics.0 = {os.getpid()},10",
    ).ask(
        "[(p.pid, p.usedGpuMemory) for p in nvmlDeviceGetComputeRunningProcesses(gpu(0))]",
        "nvmlDeviceGetMemoryInfo(gpu(0), version=nvmlMemory_v2).used >> 20",
        "nvmlSystemGetProcessName(4194342)",
        "nvmlSystemGetProcessName(4194343)",
        "[p.pid for p in nvmlDeviceGetGraphicsRunningProcesses(gpu(1))]",
    )

    assert answers == [
        [[4194342, 30000 << 20], [4194343, None]],
        30000, "/opt/train.py", {"error": 6}, [os.getpid()],
    ]  # fmt: skip


def test_hot_narrow_and_switched_off(machine):
    """Clock reasons, temperatures, PCIe width, MIG, compute mode, a chassis power cap."""
    answers = machine(
        "h100x8",
        "gpu.4.clocks.reasons = 0x48",
        "gpu.4.temp.gpu = 91",
        "gpu.4.pcie.width = 8",
        "gpu.4.mig = 1",
        "gpu.4.computemode = 3",
        "gpu.4.power.enforced_mw = 500000",
        "gpu.4.vbios =",
    ).ask(
        "nvmlDeviceGetCurrentClocksEventReasons(gpu(4))",
        "nvmlDeviceGetMarginTemperature(gpu(4))",
        "nvmlDeviceGetCurrPcieLinkWidth(gpu(4))",
        "nvmlDeviceGetMigMode(gpu(4))",
        "nvmlDeviceGetComputeMode(gpu(4))",
        "nvmlDeviceGetEnforcedPowerLimit(gpu(4))",
        "nvmlDeviceGetVbiosVersion(gpu(4))",
    )

    assert answers == [0x48, -2, 8, [1, 1], 3, 500000, {"error": 3}]


def test_excluded_gpus_are_named(machine):
    """A GPU hidden by the driver's configuration is not counted but can be asked for."""
    answers = machine("h100x8", "count = 7", "excluded.0 = 0000:db:00.0,GPU-hidden").ask(
        "nvmlDeviceGetCount()",
        "nvmlGetExcludedDeviceCount()",
        "nvmlGetExcludedDeviceInfoByIndex(0).pci.busId",
        "nvmlGetExcludedDeviceInfoByIndex(0).uuid",
        "gpu(7)",
    )

    assert answers == [7, 1, "00000000:DB:00.0", "GPU-hidden", {"error": 2}]


def test_a_fault_reaches_a_process_that_is_already_running(machine):
    """A GPU falls off the bus, and the count goes down, under a program's hands."""
    falling = machine("t4x1")
    path = str(falling.overlay)

    answers = falling.ask(
        "nvmlDeviceGetName(gpu(0))",
        f"open({path!r}, 'w').write('error.nvmlDeviceGetName = 15') > 0",
        "nvmlDeviceGetName(gpu(0))",
        f"open({path!r}, 'w').write('count = 0') > 0",
        "nvmlDeviceGetCount()",
    )

    assert answers == ["Tesla T4", True, LOST, True, 0]


def test_a_line_that_is_none_is_named(machine):
    """A typing mistake is told with file and line, and the rest of the profile is used."""
    mistyped = machine("t4x1", "# fine", "gpu.0.mig: 1")

    run = mistyped.run(json.dumps(["nvmlDeviceGetCount()"]))

    assert json.loads(run.stdout) == [1]
    assert f"{mistyped.overlay}:2:" in run.stderr
