"""RUNS ON THE NODE: what NVML says of the driver, of each GPU, of each pair of GPUs.

The tables say what is asked, and by which NVML function. Numbers stand in for constants of the
binding where those are wrong or newer than the driver; nvml.h has them.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

from gpufleet.on_node import machine
from gpufleet.on_node.answers import is_missing, missing, plain, read

Ask = Callable[[Any, Any], Any]  # (binding, GPU handle) -> value

# nvmlReturn_t: this driver or board does not know this way to ask (not supported, no such
# function, no such version of the struct), but may know an older one.
ASK_DIFFERENTLY = {3, 13, 25}


def get(function: str, *arguments: Any, keys: tuple[str, ...] = ()) -> Ask:
    """Return a question: `nvmlDeviceGet<function>`; `keys` name the members of a tuple answer."""

    def ask(nvml: Any, gpu: Any) -> Any:
        answer = getattr(nvml, "nvmlDeviceGet" + function)(gpu, *arguments)
        return dict(zip(keys, answer)) if keys else answer  # noqa: B905  # Python 3.8

    return ask


def fill(function: str, structure: str) -> Ask:
    """Return a question whose answer NVML writes into a versioned struct."""

    def ask(nvml: Any, gpu: Any) -> Any:
        import ctypes

        answer = getattr(nvml, structure)()
        getattr(nvml, "nvmlDeviceGet" + function)(gpu, ctypes.byref(answer))
        return answer

    return ask


def either(*questions: Ask) -> Ask:
    """Return a question that falls back to the next where a driver or board does not know one."""

    def ask(nvml: Any, gpu: Any) -> Any:
        for question in questions[:-1]:
            try:
                return question(nvml, gpu)
            except nvml.NVMLError as error:
                if error.value not in ASK_DIFFERENTLY:
                    raise
        return questions[-1](nvml, gpu)

    return ask


def pci(nvml: Any, gpu: Any) -> dict[str, Any]:
    """Return a GPU's place on the PCI bus, in NVML's and in sysfs' spelling."""
    info = nvml.nvmlDeviceGetPciInfo(gpu)
    return {
        "bus_id": sysfs_bus_id(plain(info.busId)),
        "nvml_bus_id": info.busId,
        "device_id": "0x%08x" % info.pciDeviceId,
        "subsystem_id": "0x%08x" % info.pciSubSystemId,
    }


def sysfs_bus_id(bus_id: str) -> str:
    """Return NVML's "00000008:01:00.0" as sysfs writes it: "0008:01:00.0"."""
    domain, rest = bus_id.lower().split(":", 1)
    return "%04x:%s" % (int(domain, 16), rest)


def affinity(function: str, words: int) -> Ask:
    """Return a question for a bit mask of `words` 64-bit words, answered as Linux writes lists."""

    def ask(nvml: Any, gpu: Any) -> str:
        mask = getattr(nvml, "nvmlDeviceGet" + function)(gpu, words, 0)  # 0: NUMA node, not socket
        return machine.collapsed(
            64 * index + bit
            for index, word in enumerate(mask)
            for bit in range(64)
            if word >> bit & 1
        )

    return ask


def processes(version: str) -> Ask:
    """Return a question for who computes on the GPU; `usedGpuMemory` in bytes, or null."""
    question = get("ComputeRunningProcesses" + version)
    return lambda nvml, gpu: [vars(process) for process in question(nvml, gpu)]


def fabric_by_struct(version: int, structure: str, function: str) -> Ask:
    """Return a question for the GPU's registration with the NVLink fabric."""
    filled = fill(function, structure)

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


# Hopper and newer register with the fabric; the struct grew with R550 and R580.
FABRIC = either(
    fabric_by_struct(3, "c_nvmlGpuFabricInfo_v3_t", "GpuFabricInfoV"),
    fabric_by_struct(2, "c_nvmlGpuFabricInfo_v2_t", "GpuFabricInfoV"),
    fabric_by_struct(1, "c_nvmlGpuFabricInfo_t", "GpuFabricInfo"),
)

GPU_FACTS: tuple[tuple[str, Ask], ...] = (
    ("name", get("Name")),
    ("uuid", get("UUID")),
    ("serial", get("Serial")),
    ("part", get("BoardPartNumber")),
    ("vbios", get("VbiosVersion")),
    ("gsp_firmware", get("GspFirmwareVersion")),
    ("inforom", get("InforomImageVersion")),
    ("pci", pci),
    ("minor", get("MinorNumber")),
    ("module_id", get("ModuleId")),
    ("compute_capability", get("CudaComputeCapability")),
    ("architecture", get("Architecture")),
    ("brand", get("Brand")),
    # Bytes. Version 1 counts the driver's own reserve, about half a GiB, as used. 0x02000028 is
    # nvmlMemory_v2: the struct's size and its version in one word.
    ("memory", either(get("MemoryInfo", 0x02000028), get("MemoryInfo"))),
    ("persistence_mode", get("PersistenceMode")),
    ("compute_mode", get("ComputeMode")),
    ("mig_mode", get("MigMode", keys=("current", "pending"))),
    ("ecc_mode", get("EccMode", keys=("current", "pending"))),
    # (error type 0 corrected, 1 not; counter 0 since the driver loaded, 1 in the GPU's life)
    ("ecc_corrected_volatile", get("TotalEccErrors", 0, 0)),
    ("ecc_uncorrected_volatile", get("TotalEccErrors", 1, 0)),
    ("ecc_corrected_aggregate", get("TotalEccErrors", 0, 1)),
    ("ecc_uncorrected_aggregate", get("TotalEccErrors", 1, 1)),
    ("ecc_sram", fill("SramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t")),
    (
        "remapped_rows",
        get("RemappedRows", keys=("corrected", "uncorrected", "pending", "failed")),
    ),
    ("remap_histogram", get("RowRemapperHistogram")),
    ("retired_pages_pending", get("RetiredPagesPendingStatus")),
    (
        "throttle_reasons",
        either(get("CurrentClocksEventReasons"), get("CurrentClocksThrottleReasons")),
    ),
    ("temperature_celsius", either(get("TemperatureV", 0), get("Temperature", 0))),
    ("temperature_shutdown_celsius", get("TemperatureThreshold", 0)),
    ("temperature_slowdown_celsius", get("TemperatureThreshold", 1)),
    ("power_draw_milliwatts", get("PowerUsage")),
    ("power_limit_milliwatts", get("EnforcedPowerLimit")),
    ("power_default_limit_milliwatts", get("PowerManagementDefaultLimit")),
    ("pcie_width", get("CurrPcieLinkWidth")),
    ("pcie_width_max", get("MaxPcieLinkWidth")),
    ("pcie_generation", get("CurrPcieLinkGeneration")),
    ("pcie_generation_max", get("MaxPcieLinkGeneration")),
    ("pcie_replays", get("PcieReplayCounter")),
    # The driver's own verdict, R570 and newer: 0 none, 1 reset the GPU, 2 reboot, 3 drain P2P, ...
    ("recovery_action", lambda nvml, gpu: field(nvml, gpu, 230)),
    ("c2c_links", lambda nvml, gpu: field(nvml, gpu, 170)),
    ("processes", either(processes("_v3"), processes("_v2"))),
)

NUMA_FACTS: tuple[tuple[str, Ask], ...] = (
    (
        "node",
        lambda nvml, gpu: machine.number(
            "/sys/bus/pci/devices/%s/numa_node" % pci(nvml, gpu)["bus_id"]
        ),
    ),
    ("memory_nodes", affinity("MemoryAffinity", 16)),
    ("cpus", affinity("CpuAffinityWithinScope", 128)),
    # Grace only: the NUMA node that the GPU's own memory is. Not a place to pin processes.
    ("gpu_memory_node", get("NumaNodeId")),
)

DRIVER_FACTS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("version", lambda nvml: nvml.nvmlSystemGetDriverVersion()),
    ("branch", lambda nvml: nvml.nvmlSystemGetDriverBranch().branch),
    ("nvml", lambda nvml: nvml.nvmlSystemGetNVMLVersion()),
    ("cuda", lambda nvml: nvml.nvmlSystemGetCudaDriverVersion_v2()),
    ("gpu_count", lambda nvml: nvml.nvmlDeviceGetCount()),
    (
        "excluded",
        lambda nvml: [excluded(nvml, i) for i in range(nvml.nvmlGetExcludedDeviceCount())],
    ),
)

NO_LINK = {"invalid_argument", "function_not_found", "not_supported"}
LINKS_MAX = 64  # more than any: NVML itself ends the count (18 links from R525, 36 from R610)

# nvmlGpuP2PCapsIndex_t. The numbers, because the binding's NVML_P2P_CAPS_INDEX_READ is a tuple.
P2P_INDEXES = (("read", 0), ("write", 1), ("nvlink", 2))


def excluded(nvml: Any, index: int) -> dict[str, Any]:
    """Return a GPU that a module option hides from everybody."""
    info = nvml.nvmlGetExcludedDeviceInfoByIndex(index)
    return {"bus_id": sysfs_bus_id(plain(info.pci.busId)), "uuid": info.uuid}


def field(nvml: Any, gpu: Any, number: int, scope: int = 0) -> int | float:
    """Return one of NVML's numbered fields; raises its own error like any other question."""
    (answer,) = nvml.nvmlDeviceGetFieldValues(gpu, [(number, scope)])
    if answer.nvmlReturn:
        raise nvml.NVMLError(answer.nvmlReturn)
    member = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    value: int | float = getattr(answer.value, member[answer.valueType])
    return value


def started_nvml() -> Any:
    """Import the binding and initialise NVML in this process."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def driver() -> dict[str, Any]:
    """Return what NVML says of the driver; raises when there is no NVML."""
    nvml = started_nvml()
    return {name: read(function, nvml) for name, function in DRIVER_FACTS}


def gpu(index: int) -> dict[str, Any]:
    """Return everything about one GPU by itself; raises when NVML gives no handle to it."""
    nvml = started_nvml()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "gpus": {"index": index, **asked(GPU_FACTS, nvml, handle)},
        "nvlink": nvlink(nvml, handle),
        "numa": asked(NUMA_FACTS, nvml, handle),
        "fabric": read(FABRIC, nvml, handle),
    }


def asked(facts: Iterable[tuple[str, Ask]], nvml: Any, gpu: Any) -> dict[str, Any]:
    """Return a table's answers."""
    return {name: read(ask, nvml, gpu) for name, ask in facts}


def nvlink(nvml: Any, gpu: Any) -> dict[str, Any]:
    """Return a GPU's NVLinks: how many it has, how many reach a switch, and each one's state."""
    states = []
    for number in range(LINKS_MAX):
        state = read(nvml.nvmlDeviceGetNvLinkState, gpu, number)
        states.append(state)
        if is_missing(state) and state["missing"] in {"invalid_argument", "function_not_found"}:
            break
    links = [
        link(nvml, gpu, number, state)
        for number, state in enumerate(states)
        if not is_missing(state) or state["missing"] not in NO_LINK
    ]
    return {
        "count": read(field, nvml, gpu, 91),
        "switch_links": read(field, nvml, gpu, 147),
        "links": links or states[0],
    }


def link(nvml: Any, gpu: Any, number: int, state: Any) -> dict[str, Any]:
    """Return one NVLink: its state, and what is at its other end."""
    return {
        "link": number,
        "state": state,
        "version": read(nvml.nvmlDeviceGetNvLinkVersion, gpu, number),
        "remote_type": read(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, gpu, number),
        "remote_pci": read(lambda: remote_bus_id(nvml, gpu, number)),
        "speed_mbps": read(field, nvml, gpu, 164, number),
    }


def remote_bus_id(nvml: Any, gpu: Any, number: int) -> str:
    """Return the PCI function at the other end; "ffffffff:ff:ff.0" where NVML does not know."""
    return sysfs_bus_id(plain(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, number).busId))


def pairs(index: int, others: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return how one GPU reaches the others."""
    nvml = started_nvml()
    here = nvml.nvmlDeviceGetHandleByIndex(index)
    return {other: read(pair, nvml, here, other) for other in others}


def pair(nvml: Any, here: Any, other: int) -> dict[str, Any]:
    """Return one pair: P2P status by kind, and the PCIe ancestor (10 PIX ... 50 SYS)."""
    there = nvml.nvmlDeviceGetHandleByIndex(other)
    return {
        "pcie": read(nvml.nvmlDeviceGetTopologyCommonAncestor, here, there),
        **{kind: read(nvml.nvmlDeviceGetP2PStatus, here, there, n) for kind, n in P2P_INDEXES},
    }
