"""RUNS ON THE NODE: what is this machine made of? Reads, changes nothing, judges nothing.

Takes (global `PARAMETERS`, all optional):
  sysroot  prefix of every file read: "" is the real machine
  seconds  {"init": 20, "gpu": 15, "pairs": 15}: deadlines of the three rounds of questions
Prints one JSON document, described in docs/probe.md. Every value that could not be read is
{"missing": reason, ...}; none is left out.

NVML hangs and crashes on broken GPUs, so this process asks nothing itself. It forks one process a
GPU, waits no longer than the deadline, and reports that GPU as `timeout` or `crashed`. A process
stuck in the kernel cannot be killed, so none is ever waited for, and none holds this program's
output open. Python 3.8, standard library, and the binding that travels along as `pynvml`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import platform
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}
ROOT: str = PARAMETERS.get("sysroot", "")

# Their sum stays below the minute that the controller grants. `init` is long because without
# persistence mode the driver wakes every GPU first, which takes seconds each.
SECONDS = {"init": 20, "gpu": 15, "pairs": 15, **PARAMETERS.get("seconds", {})}

Missing = Dict[str, Any]  # {"missing": reason, ...}

# nvmlReturn_t, nvml.h. What is not here is "nvml_error"; the code is always reported beside it.
REASONS = {
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    6: "not_found",
    9: "driver_not_loaded",
    10: "timeout",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "lost",
    16: "reset_required",
    17: "operating_system",
    18: "version_mismatch",
    25: "version",
    999: "unknown",
}
ERRNO_REASONS = {
    errno.ENOENT: "absent",
    errno.ENODEV: "absent",
    errno.EADDRNOTAVAIL: "absent",  # a net device without an address
    errno.EACCES: "no_permission",
    errno.EPERM: "no_permission",
    errno.EINVAL: "not_supported",  # the speed of a net device without a link
    errno.EOPNOTSUPP: "not_supported",
}
NEXT_BEST = {3, 13, 25}  # a newer way to ask that this driver or board does not have

# --------------------------------------------------------------------------- one value


def missing(reason: str, **more: Any) -> Missing:
    """Return the value that stands for one that could not be read."""
    return {"missing": reason, **more}


def read(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's value as JSON has it, or why there is none."""
    try:
        return plain(function(*arguments))
    except Exception as error:
        return missing_after(error)


def missing_after(error: Exception) -> Missing:
    """Return what an exception says about the value that it kept us from."""
    code = getattr(error, "value", None)
    if type(error).__name__.startswith("NVMLError") and isinstance(code, int):
        detail = {"detail": loader_error()} if code == 12 else {}
        return missing(REASONS.get(code, "nvml_error"), code=code, **detail)
    if isinstance(error, OSError) and error.errno in ERRNO_REASONS:
        return missing(ERRNO_REASONS[error.errno])
    if isinstance(error, ImportError):
        return missing("no_binding" if error.name == "pynvml" else "no_ctypes", detail=str(error))
    return missing("error", detail="%s: %s" % (type(error).__name__, error))


def loader_error() -> str:
    """Return why NVML's library does not load: the binding says only that it does not."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)
    return "it loads now"


def is_missing(value: Any) -> bool:
    """Say whether a value stands for one that could not be read."""
    return isinstance(value, dict) and "missing" in value


def plain(value: Any) -> Any:
    """Turn what NVML's binding returns (bytes, structs, arrays, tuples) into JSON's types."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "_fields_"):
        # A versioned struct's first word says its size, which is no fact about the node.
        members = [name for name, *_ in value._fields_ if name != "version"]
        return {name: plain(getattr(value, name)) for name in members}
    if isinstance(value, (list, tuple)) or hasattr(value, "_length_"):
        return [plain(item) for item in value]
    return value


# --------------------------------------------------------------------------- the machine's files


def line(path: str) -> str:
    """Return a file's text without the white space around it."""
    with open(ROOT + path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def number(path: str) -> int:
    """Return the integer that a file holds."""
    return int(line(path))


def names(directory: str) -> list[str]:
    """Return what lies in a directory, sorted."""
    return sorted(os.listdir(ROOT + directory))


def os_release() -> dict[str, Any]:
    """Return the distribution's id and version; Debian testing has no version."""
    pairs = (text.split("=", 1) for text in line("/etc/os-release").splitlines() if "=" in text)
    known = {key: value.strip("\"'") for key, value in pairs}
    return {key: known.get(key.upper(), missing("absent")) for key in ("id", "version_id")}


def cpus() -> int:
    """Return how many CPUs are online."""
    return len(expanded(line("/sys/devices/system/cpu/online")))


def memory_mib() -> int:
    """Return the memory that Linux manages, in MiB."""
    return int(re.findall(r"^MemTotal:\s+(\d+) kB", line("/proc/meminfo"), re.MULTILINE)[0]) // 1024


def expanded(ranges: str) -> list[int]:
    """Return the numbers of a list as Linux writes it: "0-1,8" is [0, 1, 8]."""
    numbers: list[int] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def collapsed(numbers: Iterable[int]) -> str:
    """Return a list as Linux writes it: [0, 1, 8] is "0-1,8"."""
    ranges: list[list[int]] = []
    for item in sorted(numbers):
        if ranges and item == ranges[-1][1] + 1:
            ranges[-1][1] = item
        else:
            ranges.append([item, item])
    return ",".join(str(a) if a == b else "%d-%d" % (a, b) for a, b in ranges)


def pci_functions() -> list[dict[str, Any]]:
    """Return NVIDIA's GPUs and NVSwitches as the PCI bus knows them, driver or not."""
    found = []
    for bus_id in names("/sys/bus/pci/devices"):
        at = "/sys/bus/pci/devices/" + bus_id
        # 0x03....: display, 3D controller; 0x0680..: bridge, which NVSwitches are.
        if read(line, at + "/vendor") == "0x10de" and str(read(line, at + "/class")).startswith(
            ("0x03", "0x0680")
        ):
            found.append({"bus_id": bus_id, **pci_place(at)})
    return found


def pci_place(at: str) -> dict[str, Any]:
    """Return where a PCI function sits: `path` gives its distance to any other."""
    return {
        "device": read(line, at + "/device"),
        "class": read(line, at + "/class"),
        "numa_node": read(number, at + "/numa_node"),
        "driver": read(lambda: os.path.basename(os.readlink(ROOT + at + "/driver"))),
        "path": read(real_path, at),
    }


def real_path(path: str) -> str:
    """Return where a link of sysfs leads."""
    return os.path.realpath(ROOT + path)[len(os.path.realpath(ROOT + "/").rstrip("/")) :]


def nics() -> dict[str, Any]:
    """Return the network: InfiniBand and RoCE devices, net devices with their addresses."""
    return {
        "infiniband": read(lambda: [infiniband(name) for name in names("/sys/class/infiniband")]),
        "net": read(
            lambda: [net(name) for name in names("/sys/class/net") if name != "lo"],
        ),
        "default_route": read(default_route),
    }


def infiniband(name: str) -> dict[str, Any]:
    """Return one RDMA device."""
    at = "/sys/class/infiniband/" + name
    return {
        "name": name,
        "pci": read(pci_parent, at),
        "ports": read(
            lambda: [
                {
                    "port": port,
                    **{
                        key: read(line, "%s/ports/%s/%s" % (at, port, key))
                        for key in ("state", "rate", "link_layer")
                    },
                }
                for port in names(at + "/ports")
            ]
        ),
    }


def net(name: str) -> dict[str, Any]:
    """Return one net device; `speed` in Mbit/s, which devices without a link do not know."""
    at = "/sys/class/net/" + name
    return {
        "name": name,
        "mac": read(line, at + "/address"),
        "state": read(line, at + "/operstate"),
        "mtu": read(number, at + "/mtu"),
        "speed": read(number, at + "/speed"),
        "pci": read(pci_parent, at),
        "ipv4": read(ipv4, name),
        "ipv6": read(ipv6, name),
    }


def pci_parent(at: str) -> dict[str, Any]:
    """Return the PCI function that a class device is part of; virtual ones are of none."""
    functions = re.findall(
        r"(?<=/)[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)", real_path(at)
    )
    if not functions:
        raise FileNotFoundError(errno.ENOENT, "not a PCI device")
    return {"bus_id": functions[-1], **pci_place("/sys/bus/pci/devices/" + functions[-1])}


def ipv4(name: str) -> str:
    """Return a net device's first IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        # SIOCGIFADDR, linux/sockios.h; the address lies at bytes 20 to 24 of struct ifreq.
        answer = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))
    return socket.inet_ntoa(answer[20:24])


def ipv6(name: str) -> list[str]:
    """Return a net device's IPv6 addresses, link-local ones too."""
    rows = (text.split() for text in line("/proc/net/if_inet6").splitlines())
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == name
    ]


def default_route() -> str:
    """Return the net device of the IPv4 default route with the lowest metric."""
    rows = [text.split() for text in line("/proc/net/route").splitlines()[1:]]
    routes = sorted((int(row[6]), row[0]) for row in rows if row[1] == row[7] == "00000000")
    if not routes:
        raise FileNotFoundError(errno.ENOENT, "no default route")
    return routes[0][1]


HOST_FACTS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("hostname", lambda: line("/proc/sys/kernel/hostname")),
    ("machine_id", lambda: line("/etc/machine-id")),
    ("boot_id", lambda: line("/proc/sys/kernel/random/boot_id")),
    ("kernel", lambda: line("/proc/sys/kernel/osrelease")),
    ("os_release", os_release),
    ("arch", lambda: os.uname().machine),
    ("python", platform.python_version),
    ("cpus", cpus),
    ("memory_mib", memory_mib),
    ("pci", pci_functions),
    ("nics", nics),
)

# What the kernel module says of itself, whether or not NVML answers.
MODULE_FACTS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("module", lambda: line("/sys/module/nvidia/version")),
    ("proc", lambda: line("/proc/driver/nvidia/version").splitlines()[0]),
    ("proc_gpus", lambda: names("/proc/driver/nvidia/gpus")),
)


def host() -> dict[str, Any]:
    """Return what the machine's files say."""
    facts = {name: read(function) for name, function in HOST_FACTS}
    facts["module"] = {name: read(function) for name, function in MODULE_FACTS}
    return facts


# --------------------------------------------------------------------------- NVML

Ask = Callable[[Any, Any], Any]  # (binding, GPU handle) -> value


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
                if error.value not in NEXT_BEST:
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
        return collapsed(
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
        lambda nvml, gpu: number("/sys/bus/pci/devices/%s/numa_node" % pci(nvml, gpu)["bus_id"]),
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

LINKS_MAX = 64  # more than any: NVML itself ends the count (18 links from R525, 36 from R610)

# nvmlGpuP2PCapsIndex_t. The numbers, because the binding's NVML_P2P_CAPS_INDEX_READ is a tuple.
P2P_INDEXES = (("read", 0), ("write", 1), ("nvlink", 2))


def excluded(nvml: Any, index: int) -> dict[str, Any]:
    """Return a GPU that a module option hides from everybody."""
    info = nvml.nvmlGetExcludedDeviceInfoByIndex(index)
    return {"bus_id": sysfs_bus_id(plain(info.pciInfo.busId)), "uuid": info.uuid}


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
    links, first = [], None
    for number in range(LINKS_MAX):
        state = read(nvml.nvmlDeviceGetNvLinkState, gpu, number)
        first = state if first is None else first
        if is_missing(state) and state["missing"] == "invalid_argument":
            break
        if not is_missing(state) or state["missing"] != "not_supported":
            links.append(link(nvml, gpu, number, state))
    return {
        "count": read(field, nvml, gpu, 91),
        "switch_links": read(field, nvml, gpu, 147),
        "links": links if links else (first if is_missing(first) else []),
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


# --------------------------------------------------------------------------- watched processes


class Watched:
    """A forked process that answers one question, or does not."""

    def __init__(self, function: Callable[[], Any], keep: bool = False) -> None:
        self.output = b""
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            answer(function, end, keep)
        os.close(end)

    def receive(self) -> bool:
        """Take what has arrived; False at the end."""
        arrived = os.read(self.pipe, 1 << 16)
        self.output += arrived
        return bool(arrived)

    def result(self) -> Any:
        """Return the answer, or how the process ended without one."""
        try:
            return json.loads(self.output.decode())
        except ValueError:
            return missing("crashed", signal=self.end())

    def end(self) -> int | None:
        """Return the signal that ended the process; None if that is not known within a second."""
        for _ in range(20):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            time.sleep(0.05)
        return None

    def stop(self) -> None:
        """Kill the process if it still is; do not wait: in the kernel it may outlive us."""
        os.close(self.pipe)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, os.WNOHANG)


def answer(function: Callable[[], Any], end: int, keep: bool) -> None:
    """Be the forked process: answer through the pipe and end; with `keep`, once it is killed."""
    status = 1
    try:
        # Whatever becomes of the parent, this ends; a crash writes no core file; and whoever reads
        # the probe's output does not wait for a process that is stuck.
        signal.alarm(int(sum(SECONDS.values())) + 1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        with os.fdopen(end, "wb") as pipe:
            pipe.write(json.dumps(read(function)).encode())
        status = 0
        if keep:
            signal.pause()
    finally:
        os._exit(status)


def answers(questions: Mapping[Any, Watched], seconds: float) -> dict[Any, Any]:
    """Wait for all, no longer than the deadline; return each one's answer or `timeout`."""
    waiting = {watched.pipe: key for key, watched in questions.items()}
    results: dict[Any, Any] = {}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(list(waiting), [], [], max(0, deadline - time.monotonic()))
        for pipe in ready:
            if not questions[waiting[pipe]].receive():
                key = waiting.pop(pipe)
                results[key] = questions[key].result()
    for key in waiting.values():
        results[key] = missing("timeout", seconds=seconds)
    return results


def asked_of_all(
    function: Callable[..., Any], each: Mapping[int, tuple[Any, ...]], seconds: float
) -> dict[int, Any]:
    """Ask every GPU at once, each in its own process; return the answers by GPU."""
    questions = {
        index: Watched(functools.partial(function, *arguments)) for index, arguments in each.items()
    }
    try:
        return answers(questions, seconds)
    finally:
        for watched in questions.values():
            watched.stop()


# --------------------------------------------------------------------------- the document


def document() -> dict[str, Any]:
    """Ask in three rounds: the machine and its driver, every GPU, every pair of GPUs."""
    began = time.monotonic()
    # Kept alive: while one process has NVML open, the driver does not put GPUs to sleep between
    # our questions, which without persistence mode costs seconds each time.
    first = {"driver": Watched(driver, keep=True), "host": Watched(host)}
    try:
        whole = answers(first, SECONDS["init"])
        about = whole["driver"]
        count = 0 if is_missing(about) or is_missing(about["gpu_count"]) else about["gpu_count"]
        alone = asked_of_all(gpu, {i: (i,) for i in range(count)}, SECONDS["gpu"])
        present = [i for i in range(count) if not is_missing(alone[i])]
        others = {i: (i, [j for j in present if j != i]) for i in present}
        together = asked_of_all(pairs, others, SECONDS["pairs"])
    finally:
        for watched in first.values():
            watched.stop()
    sections = host_section(whole["host"])
    return {
        "schema": 1,
        "probe": globals().get("__sha256__", missing("absent")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - began, 3),
        **{name: sections[name] for name, _ in HOST_FACTS},
        "driver": {**driver_section(about), **sections["module"]},
        **{
            section: [gpu_section(alone[i], section, i) for i in range(count)]
            for section in ("gpus", "nvlink", "numa", "fabric")
        },
        "p2p": {kind: matrix(together, kind, count) for kind, _ in P2P_INDEXES},
        "pcie": matrix(together, "pcie", count),
        "errors": list(errors(whole, alone, together)),
    }


def host_section(machine: Any) -> dict[str, Any]:
    """Return the machine's facts by name, all missing alike if its files could not be read."""
    if not is_missing(machine):
        return dict(machine)
    return {
        **{name: machine for name, _ in HOST_FACTS},
        "module": {name: machine for name, _ in MODULE_FACTS},
    }


def driver_section(about: Any) -> dict[str, Any]:
    """Return the driver's facts by name, all missing alike if NVML could not be initialised."""
    if not is_missing(about):
        return {"init": "ok", **about}
    return {"init": about, **{name: about for name, _ in DRIVER_FACTS}}


def gpu_section(answer: Any, section: str, index: int) -> Any:
    """Return one section about one GPU; a GPU that did not answer keeps its place in each."""
    if not is_missing(answer):
        return answer[section]
    return {"index": index, **answer} if section == "gpus" else answer


def matrix(together: Mapping[int, Any], kind: str, count: int) -> list[list[Any]]:
    """Return one kind of answer for every pair, row by row; null for a GPU with itself."""

    def cell(row: int, column: int) -> Any:
        if row == column:
            return None
        answers = together.get(row, missing("no_gpu"))
        # JSON turned the numbers of GPUs into strings on the way through the pipe.
        answer = answers if is_missing(answers) else answers.get(str(column), missing("no_gpu"))
        return answer if is_missing(answer) else answer[kind]

    return [[cell(row, column) for column in range(count)] for row in range(count)]


def errors(
    whole: Mapping[str, Any], alone: Mapping[int, Any], together: Mapping[int, Any]
) -> Iterator[dict[str, Any]]:
    """Yield every question that had no answer at all, with what it was about."""
    asked_about = {
        **whole,
        **{"gpus[%d]" % index: answer for index, answer in alone.items()},
        **{"p2p[%d]" % index: answer for index, answer in together.items()},
    }
    for about, answer in asked_about.items():
        if is_missing(answer):
            yield {"about": about, **answer}


def main() -> None:
    """Print the document and end, whatever forked processes are still stuck."""
    with contextlib.suppress(ImportError):
        import pynvml  # noqa: F401  # compiled once, not in every forked process
    sys.stdout.write(json.dumps(document(), separators=(",", ":")) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
