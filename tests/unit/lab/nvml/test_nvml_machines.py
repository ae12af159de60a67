"""Each healthy profile, asked through the unmodified binding, is the hardware that it names."""

import pytest

from lab import nvml

MIB = 1 << 20

#             name, GPUs, MiB, compute capability, driver, CUDA, NVLinks
MACHINES = {
    "a100x2-pcie": ("NVIDIA A100 80GB PCIe", 2, 81920, [8, 0], "580.95.05", 13000, 12),
    "a100x4-pcie": ("NVIDIA A100 80GB PCIe", 4, 81920, [8, 0], "550.163.01", 12040, 12),
    "a100x8": ("NVIDIA A100-SXM4-80GB", 8, 81920, [8, 0], "535.183.06", 12020, 12),
    "b200x8": ("NVIDIA B200", 8, 183359, [10, 0], "580.95.05", 13000, 18),
    "gb200x4": ("NVIDIA GB200", 4, 189471, [10, 0], "580.105.08", 13000, 18),
    "h100x2-nvl": ("NVIDIA H100 NVL", 2, 95830, [9, 0], "580.95.05", 13000, 18),
    "h100x8": ("NVIDIA H100 80GB HBM3", 8, 81559, [9, 0], "570.124.06", 12080, 18),
    "h200x8": ("NVIDIA H200", 8, 143771, [9, 0], "580.105.08", 13000, 18),
    "l40sx8": ("NVIDIA L40S", 8, 46068, [8, 9], "550.163.01", 12040, 0),
    "rtx4090x2": ("NVIDIA GeForce RTX 4090", 2, 24564, [8, 9], "550.163.01", 12040, 0),
    "t4x1": ("Tesla T4", 1, 15360, [7, 5], "535.183.06", 12020, 0),
}


def all_alike(size, cell):
    return [["X" if i == j else cell for j in range(size)] for i in range(size)]


MATRICES = {
    "a100x2-pcie": all_alike(2, "NODE"),
    "a100x4-pcie": [
        ["X", "NV12", "SYS", "SYS"],
        ["NV12", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "NV12"],
        ["SYS", "SYS", "NV12", "X"],
    ],
    "a100x8": all_alike(8, "NV12"),
    "b200x8": all_alike(8, "NV18"),
    "gb200x4": all_alike(4, "NV18"),
    "h100x2-nvl": all_alike(2, "NV12"),
    "h100x8": all_alike(8, "NV18"),
    "h200x8": all_alike(8, "NV18"),
    "l40sx8": [
        ["X", "PIX", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS"],
        ["PIX", "X", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS"],
        ["NODE", "NODE", "X", "PIX", "SYS", "SYS", "SYS", "SYS"],
        ["NODE", "NODE", "PIX", "X", "SYS", "SYS", "SYS", "SYS"],
        ["SYS", "SYS", "SYS", "SYS", "X", "PIX", "NODE", "NODE"],
        ["SYS", "SYS", "SYS", "SYS", "PIX", "X", "NODE", "NODE"],
        ["SYS", "SYS", "SYS", "SYS", "NODE", "NODE", "X", "PIX"],
        ["SYS", "SYS", "SYS", "SYS", "NODE", "NODE", "PIX", "X"],
    ],
    "rtx4090x2": all_alike(2, "PHB"),
    "t4x1": [["X"]],
}


def test_every_profile_is_described_here():
    """A profile that is added gets its expected answers in this file."""
    assert nvml.profiles() == tuple(sorted(MACHINES)) == tuple(sorted(MATRICES))


@pytest.mark.parametrize("profile", MACHINES)
def test_inventory(machine, profile):
    """Names, memory in both forms, and versions are the board's."""
    name, count, mib, capability, driver, cuda, links = MACHINES[profile]

    (
        count_, driver_, nvml_, cuda_,
        names, capabilities, uuids, places, memory, memory_v2, link_count,
    ) = machine(profile).ask(
        "nvmlDeviceGetCount()",
        "nvmlSystemGetDriverVersion()",
        "nvmlSystemGetNVMLVersion()",
        "nvmlSystemGetCudaDriverVersion_v2()",
        f"[nvmlDeviceGetName(gpu(i)) for i in range({count})]",
        f"[nvmlDeviceGetCudaComputeCapability(gpu(i)) for i in range({count})]",
        f"[nvmlDeviceGetUUID(gpu(i)) for i in range({count})]",
        f"[nvmlDeviceGetPciInfo(gpu(i)).busId for i in range({count})]",
        "nvmlDeviceGetMemoryInfo(gpu(0))",
        "nvmlDeviceGetMemoryInfo(gpu(0), version=nvmlMemory_v2)",
        "field(0, NVML_FI_DEV_NVLINK_LINK_COUNT)",
    )  # fmt: skip

    assert (count_, driver_, cuda_) == (count, driver, cuda)
    assert nvml_ == f"{cuda // 1000}.{driver}"
    assert names == [name] * count
    assert capabilities == [capability] * count
    assert len(set(uuids)) == len(set(places)) == count
    assert all(len(uuid) == len("GPU-8-4-4-4-12") + 26 for uuid in uuids)
    assert memory["total"] == memory_v2["total"] == mib * MIB
    assert memory_v2["used"] == 0
    assert memory["used"] == memory_v2["reserved"] > 0, "the first form counts what is reserved"
    assert link_count == (links or {"error": 3})


@pytest.mark.parametrize("profile", MACHINES)
def test_topology_is_what_nvidia_smi_would_print(machine, profile):
    """NVLink widths from links and far ends; PCIe levels where there is no NVLink."""
    assert machine(profile).ask("matrix()") == [MATRICES[profile]]


@pytest.mark.parametrize("profile", MACHINES)
def test_a_healthy_machine_has_nothing_to_report(machine, profile):
    """Not one counter, pending mode, process or recovery action on any GPU."""
    gpus = f"range({MACHINES[profile][1]})"
    fine = [0, {"error": 3}, {"error": 13}]  # or the board or its driver cannot say

    answers = machine(profile).ask(
        f"[answer(f'nvmlDeviceGetTotalEccErrors(gpu({{i}}), 1, 0)') for i in {gpus}]",
        f"[answer(f'nvmlDeviceGetTotalEccErrors(gpu({{i}}), 0, 1)') for i in {gpus}]",
        f"[answer(f'nvmlDeviceGetMemoryErrorCounter(gpu({{i}}), 1, 1, 7)') for i in {gpus}]",
        f"[answer(f'nvmlDeviceGetRetiredPagesPendingStatus(gpu({{i}}))') for i in {gpus}]",
        f"[nvmlDeviceGetComputeMode(gpu(i)) for i in {gpus}]",
        f"[nvmlDeviceGetPcieReplayCounter(gpu(i)) for i in {gpus}]",
        f"[len(nvmlDeviceGetComputeRunningProcesses(gpu(i))) for i in {gpus}]",
    )
    assert all(value in fine for row in answers for value in row)

    widths, persistence, reasons, mig, ecc, remapped, recovery = machine(profile).ask(
        f"[nvmlDeviceGetCurrPcieLinkWidth(gpu(i)) for i in {gpus}]",
        f"[nvmlDeviceGetPersistenceMode(gpu(i)) for i in {gpus}]",
        f"[nvmlDeviceGetCurrentClocksEventReasons(gpu(i)) for i in {gpus}]",
        f"[answer(f'nvmlDeviceGetMigMode(gpu({{i}}))') for i in {gpus}]",
        f"[answer(f'nvmlDeviceGetEccMode(gpu({{i}}))') for i in {gpus}]",
        f"[answer(f'nvmlDeviceGetRemappedRows(gpu({{i}}))') for i in {gpus}]",
        f"[field(i, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) for i in {gpus}]",
    )
    assert set(widths) == {16}
    assert set(persistence) == {1}
    assert set(reasons) == {1}, "idle"
    assert all(mode in ([0, 0], {"error": 3}) for mode in mig)
    assert all(mode in ([1, 1], [0, 0]) for mode in ecc)
    assert all(rows in ([0, 0, 0, 0], {"error": 3}) for rows in remapped)
    newer = int(MACHINES[profile][4].split(".")[0]) >= 570
    assert all(action == (0 if newer else {"error": 2}) for action in recovery)


def test_a_data_centre_gpu_in_full(machine):
    """Everything else that the probe reads of an H100."""
    gpu = machine("h100x8").ask(
        "nvmlDeviceGetSerial(gpu(0))",
        "nvmlDeviceGetMinorNumber(gpu(5))",
        "nvmlDeviceGetModuleId(gpu(0))",
        "nvmlDeviceGetArchitecture(gpu(0)) == NVML_DEVICE_ARCH_HOPPER",
        "nvmlDeviceGetPciInfo(gpu(0)).busIdLegacy",
        "[f'{w:x}' for w in nvmlDeviceGetCpuAffinityWithinScope(gpu(4), 4, 0)]",
        "list(nvmlDeviceGetMemoryAffinity(gpu(4), 1, 0))",
        "nvmlDeviceGetTemperatureV(gpu(0), 0)",
        "nvmlDeviceGetTemperature(gpu(0), 0)",
        "nvmlDeviceGetTemperatureThreshold(gpu(0), NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)",
        "nvmlDeviceGetMarginTemperature(gpu(0))",
        "field(0, NVML_FI_DEV_MEMORY_TEMP)",
        "field(0, NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT)",
        "nvmlDeviceGetPowerManagementLimitConstraints(gpu(0))",
        "nvmlDeviceGetEnforcedPowerLimit(gpu(0))",
        "nvmlDeviceGetRowRemapperHistogram(gpu(0))",
        "filled('nvmlDeviceGetSramEccErrorStatus', 'c_nvmlEccSramErrorStatus_v1_t', 0)"
        "['bThresholdExceeded']",
        "nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(gpu(3))).contents is not None",
        "nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId('0000:3A:00.0'))",
        "nvmlDeviceGetHandleByUUID('GPU-of-another-machine')",
        "nvmlDeviceGetHandleByIndex(8)",
        "nvmlSystemGetDriverBranch().branch",
        "nvmlGetExcludedDeviceCount()",
    )

    assert gpu == [
        "1654922010000", 5, 2, True, "0000:18:00.0",
        ["ff00000000000000", "ffffffffffff", "ffffff0000000000", "ffffffff"],  # 56-111,168-223
        [2],
        34, 34, 89, 55, 40, -8,
        [200000, 700000], 700000,
        {"max": 2560, "high": 0, "partial": 0, "low": 0, "none": 0}, 0,
        True, 2, {"error": 6}, {"error": 2},
        "r570_00", 0,
    ]  # fmt: skip


def test_nvlink_in_full(machine):
    """State, version, speed and far end of a link; one past the last is an invalid argument."""
    links = machine("h100x8", "gpu.0.nvlink.err.recovery.4 = 3", "gpu.0.nvlink.sleep = 5").ask(
        "nvmlDeviceGetNvLinkState(gpu(0), 17)",
        "nvmlDeviceGetNvLinkState(gpu(0), 18)",
        "nvmlDeviceGetNvLinkState(gpu(0), 5)",
        "nvmlDeviceGetNvLinkVersion(gpu(0), 0) == NVML_NVLINK_VERSION_4_0",
        "field(0, NVML_FI_DEV_NVLINK_GET_SPEED, 17)",
        "field(0, NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON)",
        "field(0, NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT)",
        "nvmlDeviceGetNvLinkErrorCounter(gpu(0), 4, NVML_NVLINK_ERROR_DL_RECOVERY)",
        "field(0, NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, 4)",
    )
    assert links == [1, {"error": 2}, 2, True, 26562, 26562, 18, 3, 3]

    without = machine("l40sx8").ask(
        "nvmlDeviceGetNvLinkState(gpu(0), 0)",
        "field(0, NVML_FI_DEV_NVLINK_GET_SPEED, 0)",
        "field(0, NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT)",
    )
    assert without == [{"error": 3}] * 3


def test_a_gb200_hides_its_switches(machine):
    """The far end of every link is a switch without an address, and domains are not zero."""
    answers = machine("gb200x4").ask(
        "nvmlDeviceGetNvLinkRemoteDeviceType(gpu(0), 0)",
        "nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), 0).busId",
        "nvmlDeviceGetPciInfo(gpu(3)).busId",
        "nvmlDeviceGetNumaNodeId(gpu(3))",
        "list(nvmlDeviceGetMemoryAffinity(gpu(3), 1, 0))",
        "nvmlDeviceGetAddressingMode(gpu(0))",
        "field(0, NVML_FI_DEV_C2C_LINK_COUNT)",
        "field(0, NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS, 3)",
        "filled('nvmlDeviceGetPlatformInfo', 'c_nvmlPlatformInfo_v2_t', 0)['slotNumber']",
        "nvmlDeviceGetNvLinkErrorCounter(gpu(0), 0, 0)",
    )

    assert answers == [
        2, "FFFFFFFF:FF:FF.0", "00000019:01:00.0", 26, [2], 2, 5, 0, "\x01", {"error": 3}
    ]  # fmt: skip


def test_peer_to_peer(machine):
    """NVLink inside a bridge's pair only; GeForce refuses reads over PCIe."""
    pairs = machine("a100x4-pcie").ask(
        *(f"nvmlDeviceGetP2PStatus(gpu(0), gpu({other}), {NVLINK})" for other in (1, 2)),
        f"nvmlDeviceGetP2PStatus(gpu(0), gpu(2), {READ})",
    )
    assert pairs == [0, 5, 0]

    assert machine("rtx4090x2").ask(f"nvmlDeviceGetP2PStatus(gpu(0), gpu(1), {READ})") == [2]


READ, NVLINK = 0, 2  # the binding's own NVML_P2P_CAPS_INDEX_READ is a tuple by mistake
