"""RUNS ON THE NODE: read NVML's values of the driver and of each GPU.

The tables map each value to its NVML function. Some of the binding's constants are wrong or newer
than the driver. They are replaced with numbers from nvml.h.
"""

from __future__ import annotations

import time
from typing import Any, Callable

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.answers import CannotRead, is_missing, missing, read, to_json_types
from gpufleet.on_node.common.nvml import (
    Ask,
    ask_all,
    first_of,
    get,
    get_struct,
    number,
    start_nvml,
    sysfs_bus_id,
    table_answers,
    text,
)  # fmt: skip
from gpufleet.on_node.common.processes import describe_process
from gpufleet.on_node.probe import nvml_links

# A larger number of GPUs is implausible, because NVIDIA's largest machine has 16 GPUs. The limit is
# needed because a process is forked for each GPU.
GPUS_MAX = 64

# Clock event reasons in nvml.h: hardware slowdown, hardware thermal slowdown, power brake. They may
# last only a moment, so they are read three times.
HARDWARE_SLOWDOWN = 0x08 | 0x40 | 0x80
SAMPLES, SAMPLES_APART = 3, 0.3  # seconds


def pci(nvml: Any, gpu: Any) -> dict[str, Any]:
    """Return a GPU's PCI address in NVML's form and in sysfs' form."""
    info = nvml.nvmlDeviceGetPciInfo(gpu)
    return {
        "bus_id": sysfs_bus_id(to_json_types(info.busId)),
        "nvml_bus_id": info.busId,
        "device_id": "0x%08x" % info.pciDeviceId,
        "subsystem_id": "0x%08x" % info.pciSubSystemId,
    }


def affinity(function: str, words: int) -> Ask:
    """
    Return a question for a bit mask of `words` 64-bit words.

    The answer is in Linux' list notation, for example "0-15,32".
    """

    def ask(nvml: Any, gpu: Any) -> str:
        # 0: of the NUMA node, not of the socket
        mask = getattr(nvml, "nvmlDeviceGet" + function)(gpu, words, 0)
        return linux_facts.format_ranges(
            64 * index + bit
            for index, word in enumerate(mask)
            for bit in range(64)
            if word >> bit & 1
        )

    return ask


def processes(kind: str) -> Ask:
    """Return a question for the GPU's processes, with `usedGpuMemory` in bytes or null."""
    question = first_of(get(kind + "RunningProcesses_v3"), get(kind + "RunningProcesses_v2"))

    def ask(nvml: Any, gpu: Any) -> list[dict[str, Any]]:
        return [
            {**vars(process), **describe_process(process.pid, nvml.nvmlSystemGetProcessName)}
            for process in question(nvml, gpu)
        ]

    return ask


def throttle_samples(nvml: Any, gpu: Any) -> list[int]:
    """
    Return the throttling reasons.

    They are read once. If the hardware throttles, they are read three times.
    """
    question = first_of(get("CurrentClocksEventReasons"), get("CurrentClocksThrottleReasons"))
    samples = [question(nvml, gpu)]
    while samples[0] & HARDWARE_SLOWDOWN and len(samples) < SAMPLES:
        time.sleep(SAMPLES_APART)
        samples.append(question(nvml, gpu))
    return samples


def inforom_valid(nvml: Any, gpu: Any) -> bool:
    """
    Make the driver verify the InfoROM's checksum.

    A wrong checksum raises NVML's error `corrupted_inforom`.
    """
    nvml.nvmlDeviceValidateInforom(gpu)
    return True


def retired_page_count(cause: int) -> Ask:
    """
    Return a question for the number of pages that were retired for a cause.

    The causes are 0 (single-bit errors) and 1 (double-bit errors).
    """
    question = get("RetiredPages", cause)
    return lambda nvml, gpu: len(question(nvml, gpu))


def ecc_at(location: int) -> Ask:
    """Return a question for the error counters of a location (2: DRAM, 7: SRAM)."""
    return ask_all(
        corrected_volatile=get("MemoryErrorCounter", 0, 0, location),
        uncorrected_volatile=get("MemoryErrorCounter", 1, 0, location),
        corrected_aggregate=get("MemoryErrorCounter", 0, 1, location),
        uncorrected_aggregate=get("MemoryErrorCounter", 1, 1, location),
    )


def platform(nvml: Any, gpu: Any) -> dict[str, Any]:
    """
    Return a board's position in its rack.

    The struct is read as raw bytes, because the binding would read its members as text.
    """
    import ctypes

    info = nvml.c_nvmlPlatformInfo_v2_t()
    nvml.nvmlDeviceGetPlatformInfo(gpu, ctypes.byref(info))

    def member(name: str) -> bytes:
        at = getattr(type(info), name)
        return ctypes.string_at(ctypes.addressof(info) + at.offset, at.size)

    return {
        "ib_guid": member("ibGuid").hex(),
        "chassis_serial": member("chassisSerialNumber").split(b"\0")[0],
        **{
            ours: member(theirs)[0]
            for ours, theirs in (
                ("slot", "slotNumber"),
                ("tray", "trayIndex"),
                ("host", "hostId"),
                ("peer_type", "peerType"),
                ("module", "moduleId"),
            )
        },
    }


def fabric_by_struct(version: int, structure: str, function: str) -> Ask:
    """Return a question for the GPU's registration with the NVLink fabric."""
    filled = get_struct(function, structure)

    def ask(nvml: Any, gpu: Any) -> dict[str, Any]:
        info = filled(nvml, gpu)
        unknown = missing("version")
        return {
            "struct": version,
            "cluster_uuid": bytes(info.clusterUuid).hex(),
            "status": info.status,
            "clique": info.cliqueId,
            "state": info.state,
            "health_mask": getattr(info, "healthMask", unknown),
            "health_summary": getattr(info, "healthSummary", unknown),
        }

    return ask


# GPUs from Hopper on register with the fabric. Drivers R550 and R580 added members to the struct.
FABRIC = first_of(
    fabric_by_struct(3, "c_nvmlGpuFabricInfo_v3_t", "GpuFabricInfoV"),
    fabric_by_struct(2, "c_nvmlGpuFabricInfo_v2_t", "GpuFabricInfoV"),
    fabric_by_struct(1, "c_nvmlGpuFabricInfo_t", "GpuFabricInfo"),
)

GPU_FACTS: tuple[tuple[str, Ask], ...] = (
    ("name", text(get("Name"))),
    ("uuid", text(get("UUID"))),
    ("serial", text(get("Serial"))),
    ("part", text(get("BoardPartNumber"))),
    ("vbios", text(get("VbiosVersion"))),
    ("gsp_firmware", text(get("GspFirmwareVersion"))),
    ("inforom", text(get("InforomImageVersion"))),
    ("inforom_valid", inforom_valid),
    ("pci", pci),
    ("minor", get("MinorNumber")),
    ("module_id", get("ModuleId")),
    ("compute_capability", get("CudaComputeCapability")),
    ("architecture", get("Architecture")),
    ("brand", get("Brand")),
    # In bytes. Version 1 of the struct counts the driver's own reserve (about half a GiB) as used.
    # 0x02000028 selects nvmlMemory_v2; this word has the struct's size and version.
    ("memory", first_of(get("MemoryInfo", 0x02000028), get("MemoryInfo"))),
    ("persistence_mode", get("PersistenceMode")),
    ("compute_mode", get("ComputeMode")),
    ("mig_mode", get("MigMode", keys=("current", "pending"))),
    ("ecc_mode", get("EccMode", keys=("current", "pending"))),
    # Arguments: error type (0 corrected, 1 uncorrected), then counter (0 since the driver was
    # loaded, 1 since the GPU was made).
    ("ecc_corrected_volatile", get("TotalEccErrors", 0, 0)),
    ("ecc_uncorrected_volatile", get("TotalEccErrors", 1, 0)),
    ("ecc_corrected_aggregate", get("TotalEccErrors", 0, 1)),
    ("ecc_uncorrected_aggregate", get("TotalEccErrors", 1, 1)),
    ("ecc_sram", get_struct("SramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t")),
    (
        "remapped_rows",
        get("RemappedRows", keys=("corrected", "uncorrected", "pending", "failed")),
    ),
    ("remap_histogram", get("RowRemapperHistogram")),
    ("ecc_dram", ecc_at(2)),
    ("ecc_sram_counts", ecc_at(7)),
    ("retired_pages_pending", get("RetiredPagesPendingStatus")),
    ("retired_pages", ask_all(single_bit=retired_page_count(0), double_bit=retired_page_count(1))),
    # From Blackwell on. Pending repairs are done at the next reset.
    ("repair", get("RepairStatus", keys=("channel_pending", "tpc_pending"))),
    ("memory_unrepairable", lambda nvml, gpu: nvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(gpu)),
    ("throttle_samples", throttle_samples),
    ("temperature_celsius", first_of(get("TemperatureV", 0), get("Temperature", 0))),
    ("temperature_shutdown_celsius", get("TemperatureThreshold", 0)),
    ("temperature_slowdown_celsius", get("TemperatureThreshold", 1)),
    ("temperature_memory_max_celsius", get("TemperatureThreshold", 2)),
    ("temperature_gpu_max_celsius", get("TemperatureThreshold", 3)),
    ("temperature_memory_celsius", number(82)),
    # Degrees Celsius that the GPU may still get hotter before a threshold, then the thresholds.
    ("margin_celsius", get("MarginTemperature")),
    (
        "temperature_limits",
        ask_all(
            shutdown=number(193),
            slowdown=number(194),
            memory_max=number(195),
            gpu_max=number(196),
        ),
    ),
    ("power_draw_milliwatts", get("PowerUsage")),
    ("power_limit_milliwatts", get("EnforcedPowerLimit")),
    ("power_default_limit_milliwatts", get("PowerManagementDefaultLimit")),
    ("power_limits_milliwatts", get("PowerManagementLimitConstraints", keys=("min", "max"))),
    ("performance_state", get("PerformanceState")),
    # In MHz. nvmlClockType_t is 1 for the SMs, 2 for memory. NVML does not return the clocks that
    # `nvidia-smi -lgc` has set.
    ("clocks_max_mhz", ask_all(sm=get("MaxClockInfo", 1), memory=get("MaxClockInfo", 2))),
    (
        "application_clocks_mhz",
        ask_all(sm=get("ApplicationsClock", 1), memory=get("ApplicationsClock", 2)),
    ),
    (
        "default_application_clocks_mhz",
        ask_all(sm=get("DefaultApplicationsClock", 1), memory=get("DefaultApplicationsClock", 2)),
    ),
    ("pcie_width", get("CurrPcieLinkWidth")),
    ("pcie_width_max", get("MaxPcieLinkWidth")),
    ("pcie_generation", get("CurrPcieLinkGeneration")),
    ("pcie_generation_max", get("MaxPcieLinkGeneration")),
    ("pcie_replays", get("PcieReplayCounter")),
    # What the driver (R570 and newer) recommends: 0 nothing, 1 reset the GPU, 2 reboot, 3 drain
    # P2P, ...
    ("recovery_action", number(230)),
    ("c2c_links", number(170)),
    ("addressing_mode", get("AddressingMode")),
    ("platform", platform),
    ("processes", processes("Compute")),
    ("graphics_processes", processes("Graphics")),
    ("mps_processes", processes("MPSCompute")),
)

NUMA_FACTS: tuple[tuple[str, Ask], ...] = (
    (
        "node",
        lambda nvml, gpu: linux_facts.number(
            "/sys/bus/pci/devices/%s/numa_node" % pci(nvml, gpu)["bus_id"]
        ),
    ),
    ("memory_nodes", affinity("MemoryAffinity", 16)),
    ("cpus", affinity("CpuAffinityWithinScope", 128)),
    # Only with Grace: the NUMA node of the GPU's own memory. Processes must not be pinned to it.
    ("gpu_memory_node", get("NumaNodeId")),
)

DRIVER_FACTS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("version", text(lambda nvml: nvml.nvmlSystemGetDriverVersion())),
    ("branch", lambda nvml: nvml.nvmlSystemGetDriverBranch().branch),
    ("nvml", lambda nvml: nvml.nvmlSystemGetNVMLVersion()),
    ("cuda", lambda nvml: nvml.nvmlSystemGetCudaDriverVersion_v2()),
    ("gpu_count", lambda nvml: checked_count(nvml.nvmlDeviceGetCount())),
    (
        "excluded",
        lambda nvml: [
            excluded_gpu(nvml, i) for i in range(checked_count(nvml.nvmlGetExcludedDeviceCount()))
        ],
    ),
)


def checked_count(count: int) -> int:
    """Return `count`. Raises `CannotRead` if this number of GPUs is implausible."""
    if count > GPUS_MAX:
        raise CannotRead("implausible", detail="the driver reports %d GPUs" % count)
    return count


def excluded_gpu(nvml: Any, index: int) -> dict[str, Any]:
    """Return the facts about a GPU that an option of the kernel module excludes."""
    info = nvml.nvmlGetExcludedDeviceInfoByIndex(index)
    return {"bus_id": sysfs_bus_id(to_json_types(info.pci.busId)), "uuid": info.uuid}


def driver() -> dict[str, Any]:
    """Return NVML's values of the driver. Raises an exception if NVML does not work."""
    nvml = start_nvml()
    return {name: read(function, nvml) for name, function in DRIVER_FACTS}


def gpu(index: int) -> dict[str, Any]:
    """Return all facts about one GPU. Raises NVML's error if NVML returns no handle."""
    nvml = start_nvml()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    facts = table_answers(GPU_FACTS, nvml, handle)
    samples = facts["throttle_samples"]
    facts["throttle_reasons"] = samples if is_missing(samples) else samples[0]
    return {
        "gpus": {"index": index, **facts},
        "nvlink": nvml_links.links_of(nvml, handle),
        "numa": table_answers(NUMA_FACTS, nvml, handle),
        "fabric": read(FABRIC, nvml, handle),
    }
