#!/usr/bin/python3 -I
"""A stand-in for DCGM's host engine: what NVML says, over TCP to those who ask.

Runs on the node: standard library only, Python 3.8.  It takes the real program's options, logs
what the real one logs at its start, and listens where the real one does.  The protocol is its
own: a line asks, a line of JSON answers.  "readings" is answered by what was read last; "watch
INTERVAL WINDOW WINDOW", in milliseconds, by something no older than the interval, with what
happened in the windows, the first for Xids, the second for clock events.

What it does as the real one does was read in the sources of DCGM 4.5.3 and 4.6.0
(dcgmlib/src/DcgmCacheManager.cpp), never tried with it:

* GPUs are counted once, at the start.  One that NVML does not list any more is lost: each of its
  fields is blank until NVML lists its UUID again.
* NVML stays open.  What is installed later is not seen before a restart.
* An Xid is an event of NVML (the real one reads 79, 119 and 120 from /dev/kmsg; here all are
  events).  The last one is kept until the engine ends.  After a 119 it asks the driver no more.
* A call of NVML that does not return stops all reading.  Who wants something new waits as long.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pwd
import socketserver
import sys
import threading
import time
from collections import deque
from typing import Any, Callable  # noqa: UP035  # Python 3.8 subscripts no other

VERSION = "@VERSION@"
PORT = 5555
DEVICE = "/dev/nvidiactl"

MIB = 1 << 20
ALL_LINKS = 0xFFFFFFFF  # the scope of a field that counts what all NVLinks of a GPU do
LINKS = 36  # more than any board has
LIVE = 1.0  # seconds between looks for events and lost GPUs, as in DCGM's event thread
FATAL_XIDS = (119,)  # ReadEnvForFatalXids
KMSG_XIDS = (79, 119, 120)  # DcgmKmsgReader.cpp: by PCI address, so of a lost GPU, too
KEPT = 3600.0  # seconds that samples and events are remembered; no window is longer
PATIENCE = 60.0  # seconds that a client waits for something new, DCGM's limit for a request

# nvml.h: return codes, nvmlTemperatureThresholds_t, nvmlClockType_t, event types, value types
SUCCESS = 0
FUNCTION_NOT_FOUND = 13
SHUTDOWN, SLOWDOWN, MEMORY_MAX, GPU_MAX = 0, 1, 2, 3
SM_CLOCK, MEMORY_CLOCK = 1, 2
XID_CRITICAL = 8
UNSIGNED_INT, SIGNED_INT = 1, 5

# dcgm_structs.h: dcgmFabricManagerStatus_t, for states of NVML's fabric 0 to 3
FABRIC_SUCCESS, FABRIC_FAILURE, FABRIC_UNRECOGNIZED, FABRIC_NVML_TOO_OLD = 3, 4, 5, 6

Reading = Callable[["Nvml", Any], "float | None"]


class Memory(ctypes.Structure):
    """nvmlMemory_v2_t, in bytes."""

    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


class Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class PciInfo(ctypes.Structure):
    """nvmlPciInfo_t of nvmlDeviceGetPciInfo_v3."""

    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "ids", "subsystem")),
        ("bus_id", ctypes.c_char * 32),
    ]


class Histogram(ctypes.Structure):
    """nvmlRowRemapperHistogramValues_t: banks by their number of remaining spare rows."""

    _fields_ = [(name, ctypes.c_uint) for name in ("max", "high", "partial", "low", "none")]


class Margin(ctypes.Structure):
    """nvmlMarginTemperature_v1_t, in °C."""

    _fields_ = [("version", ctypes.c_uint), ("left", ctypes.c_int)]


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    ]


class EventData(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = [
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Value(ctypes.Union):
    """nvmlValue_t, with the types that the simulated NVML uses."""

    _fields_ = [
        ("unsigned", ctypes.c_uint),
        ("signed", ctypes.c_int),
        ("long", ctypes.c_ulonglong),
    ]


class FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("result", ctypes.c_uint),
        ("value", Value),
    ]


def versioned(structure: type, version: int) -> Any:
    """Return a structure that begins with its size and version, as NVML requires."""
    filled = structure()
    filled.version = ctypes.sizeof(structure) | version << 24
    return filled


class Nvml:
    """NVML, open until the program ends; a failing call returns None, DCGM's blank value."""

    def __init__(self) -> None:
        """Open NVML. Raises `OSError` if that fails."""
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        code = self.library.nvmlInit_v2()
        if code != SUCCESS:
            raise OSError(f"NVML does not start: error {code}")

    def result(self, function: str, *arguments: Any) -> int:
        """Call `function` and return its code."""
        found = getattr(self.library, function, None)
        return FUNCTION_NOT_FOUND if found is None else int(found(*arguments))

    def call(self, function: str, *arguments: Any) -> bool:
        """Call `function` and return whether it exists and succeeded."""
        return self.result(function, *arguments) == SUCCESS

    def number(self, function: str, *arguments: Any, kind: Any = ctypes.c_uint) -> float | None:
        """Return the number that `function` writes to its last argument."""
        value = kind()
        return value.value if self.call(function, *arguments, ctypes.byref(value)) else None

    def numbers(self, function: str, handle: Any, count: int) -> list[float | None]:
        """Return the numbers that `function` writes to its last `count` arguments."""
        values = [ctypes.c_uint() for _ in range(count)]
        known = self.call(function, handle, *map(ctypes.byref, values))
        return [value.value if known else None for value in values]

    def text(self, function: str, *arguments: Any) -> str:
        """Return the text that `function` writes to its buffer."""
        value = ctypes.create_string_buffer(96)  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
        said = self.call(function, *arguments, value, 96)
        return value.value.decode(errors="replace") if said else ""

    def filled(self, function: str, handle: Any, structure: Any) -> Any:
        """Return `structure` filled by `function`, or None."""
        return structure if self.call(function, handle, ctypes.byref(structure)) else None

    def field(self, handle: Any, number: int, scope: int = 0) -> float | None:
        """Return one of NVML's field values."""
        asked = FieldValue(field=number, scope=scope)
        if not self.call("nvmlDeviceGetFieldValues", handle, 1, ctypes.byref(asked)):
            return None
        if asked.result != SUCCESS:
            return None
        if asked.type == UNSIGNED_INT:
            return int(asked.value.unsigned)
        return int(asked.value.signed if asked.type == SIGNED_INT else asked.value.long)

    def handles(self) -> dict[str, Any]:
        """Return the handle of each GPU that NVML lists with a UUID, by UUID."""
        found = {}
        for index in range(int(self.number("nvmlDeviceGetCount_v2") or 0)):
            handle = ctypes.c_void_p()
            if self.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)):
                uuid = self.text("nvmlDeviceGetUUID", handle)
                if uuid:
                    found[uuid] = handle
        return found


# ---- what each field is read from ----------------------------------------------------------------


def number(function: str, *arguments: Any, kind: Any = ctypes.c_uint, per: int = 0) -> Reading:
    """
    Return a reading of a call's number, divided by `per` if NVML's unit is smaller than DCGM's.
    """

    def read(nvml: Nvml, handle: Any) -> float | None:
        value = nvml.number(function, handle, *arguments, kind=kind)
        return value / per if value is not None and per else value

    return read


def one_of(function: str, count: int, place: int) -> Reading:
    """Return a reading of one of the numbers of a call."""
    return lambda nvml, handle: nvml.numbers(function, handle, count)[place]


def field(identity: int, per: int = 0) -> Reading:
    """Return a reading of an NVML field, divided by `per` if NVML's unit is smaller than DCGM's."""

    def read(nvml: Nvml, handle: Any) -> float | None:
        value = nvml.field(handle, identity)
        return value / per if value is not None and per else value

    return read


def memory(part: str) -> Reading:
    """
    Return a reading of a part of the memory in MiB; used memory excludes the driver's reserve.
    """

    def read(nvml: Nvml, handle: Any) -> float | None:
        info = nvml.filled("nvmlDeviceGetMemoryInfo_v2", handle, versioned(Memory, 2))
        if info is None:
            return None
        if part == "share":
            free = info.total - info.reserved
            return float(info.used / free) if free else None
        return int(getattr(info, part)) // MIB

    return read


def use(part: str) -> Reading:
    """Return a reading of a utilisation in percent."""

    def read(nvml: Nvml, handle: Any) -> float | None:
        rates = nvml.filled("nvmlDeviceGetUtilizationRates", handle, Utilization())
        return None if rates is None else getattr(rates, part)

    return read


def margin(nvml: Nvml, handle: Any) -> float | None:
    """Return the degrees left until the board throttles itself."""
    found = nvml.filled("nvmlDeviceGetMarginTemperature", handle, versioned(Margin, 1))
    return None if found is None else int(found.left)


def banks(part: str) -> Reading:
    """Return a reading of the number of banks with a number of remaining spare rows."""

    def read(nvml: Nvml, handle: Any) -> float | None:
        found = nvml.filled("nvmlDeviceGetRowRemapperHistogram", handle, Histogram())
        return None if found is None else getattr(found, part)

    return read


def retired(cause: int) -> Reading:
    """Return a reading of retired pages, which NVML counts without room for their addresses."""

    def read(nvml: Nvml, handle: Any) -> float | None:
        count, function = ctypes.c_uint(0), "nvmlDeviceGetRetiredPages"
        code = nvml.result(function, handle, cause, ctypes.byref(count), None)
        too_small = 7
        return count.value if code in (SUCCESS, too_small) else None

    return read


def clocks_reasons(nvml: Nvml, handle: Any) -> float | None:
    """Return the reasons for lowered clocks as a bit mask."""
    wide = ctypes.c_ulonglong
    now = nvml.number("nvmlDeviceGetCurrentClocksEventReasons", handle, kind=wide)
    before_r535 = "nvmlDeviceGetCurrentClocksThrottleReasons"
    return nvml.number(before_r535, handle, kind=wide) if now is None else now


def fabric_status(nvml: Nvml, handle: Any) -> float | None:
    """Return the GPU's fabric state in DCGM's numbers."""
    info = versioned(FabricInfo, 2)
    code = nvml.result("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
    if code == FUNCTION_NOT_FOUND:
        return FABRIC_NVML_TOO_OLD
    if code != SUCCESS:
        return None
    if info.state > FABRIC_SUCCESS:
        return FABRIC_UNRECOGNIZED
    failed = info.state == FABRIC_SUCCESS and info.status != SUCCESS
    return FABRIC_FAILURE if failed else int(info.state)


def fabric(part: str) -> Reading:
    """Return a reading of a part of the fabric's information."""

    def read(nvml: Nvml, handle: Any) -> float | None:
        info = nvml.filled("nvmlDeviceGetGpuFabricInfoV", handle, versioned(FabricInfo, 2))
        return None if info is None else getattr(info, part)

    return read


def ecc(error: int, since: int) -> Reading:
    """
    Return a reading of ECC errors: corrected (0) or not (1), since driver load (0) or ever (1).
    """
    return number("nvmlDeviceGetTotalEccErrors", error, since, kind=ctypes.c_ulonglong)


def threshold(which: int) -> Reading:
    """Return a reading of a temperature threshold."""
    return number("nvmlDeviceGetTemperatureThreshold", which)


REMAPPED = "nvmlDeviceGetRemappedRows"
LIMITS = "nvmlDeviceGetPowerManagementLimitConstraints"
MILLI = 1000

# Temperatures in C, power in W, energy in mJ, clocks in MHz, memory in MiB, use in percent,
# violations in ns.  The numbers of NVML's fields are those of nvml.h (NVML_FI_DEV_*).
FIELDS: dict[str, Reading] = {
    "GPU_TEMP": number("nvmlDeviceGetTemperature", 0),
    "MEMORY_TEMP": field(82),
    "GPU_TEMP_LIMIT": margin,
    "SLOWDOWN_TEMP": threshold(SLOWDOWN),
    "SHUTDOWN_TEMP": threshold(SHUTDOWN),
    "GPU_MAX_OP_TEMP": threshold(GPU_MAX),
    "MEM_MAX_OP_TEMP": threshold(MEMORY_MAX),
    "POWER_USAGE": number("nvmlDeviceGetPowerUsage", per=MILLI),
    "POWER_USAGE_INSTANT": field(186, per=MILLI),
    "ENFORCED_POWER_LIMIT": number("nvmlDeviceGetEnforcedPowerLimit", per=MILLI),
    "POWER_MGMT_LIMIT": number("nvmlDeviceGetPowerManagementLimit", per=MILLI),
    "POWER_MGMT_LIMIT_DEF": number("nvmlDeviceGetPowerManagementDefaultLimit", per=MILLI),
    "TOTAL_ENERGY_CONSUMPTION": number(
        "nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong
    ),
    "SM_CLOCK": number("nvmlDeviceGetClockInfo", SM_CLOCK),
    "MEM_CLOCK": number("nvmlDeviceGetClockInfo", MEMORY_CLOCK),
    "MAX_SM_CLOCK": number("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
    "MAX_MEM_CLOCK": number("nvmlDeviceGetMaxClockInfo", MEMORY_CLOCK),
    "CLOCKS_EVENT_REASONS": clocks_reasons,
    "CLOCK_THROTTLE_REASONS": clocks_reasons,
    "GPU_UTIL": use("gpu"),
    "MEM_COPY_UTIL": use("memory"),
    "ENC_UTIL": one_of("nvmlDeviceGetEncoderUtilization", 2, 0),
    "DEC_UTIL": one_of("nvmlDeviceGetDecoderUtilization", 2, 0),
    "FB_TOTAL": memory("total"),
    "FB_FREE": memory("free"),
    "FB_USED": memory("used"),
    "FB_RESERVED": memory("reserved"),
    "FB_USED_PERCENT": memory("share"),
    "PSTATE": number("nvmlDeviceGetPerformanceState"),
    "FAN_SPEED": number("nvmlDeviceGetFanSpeed"),
    "PERSISTENCE_MODE": number("nvmlDeviceGetPersistenceMode"),
    "COMPUTE_MODE": number("nvmlDeviceGetComputeMode"),
    "MIG_MODE": one_of("nvmlDeviceGetMigMode", 2, 0),
    "PCIE_LINK_GEN": number("nvmlDeviceGetCurrPcieLinkGeneration"),
    "PCIE_LINK_WIDTH": number("nvmlDeviceGetCurrPcieLinkWidth"),
    "PCIE_MAX_LINK_GEN": number("nvmlDeviceGetMaxPcieLinkGeneration"),
    "PCIE_MAX_LINK_WIDTH": number("nvmlDeviceGetMaxPcieLinkWidth"),
    "PCIE_REPLAY_COUNTER": number("nvmlDeviceGetPcieReplayCounter"),
    "POWER_VIOLATION": field(74),
    "THERMAL_VIOLATION": field(75),
    "SYNC_BOOST_VIOLATION": field(76),
    "BOARD_LIMIT_VIOLATION": field(77),
    "LOW_UTIL_VIOLATION": field(78),
    "RELIABILITY_VIOLATION": field(79),
    "TOTAL_APP_CLOCKS_VIOLATION": field(80),
    "TOTAL_BASE_CLOCKS_VIOLATION": field(81),
    "CLOCKS_EVENT_REASON_SW_POWER_CAP_NS": field(74),
    "CLOCKS_EVENT_REASON_SYNC_BOOST_NS": field(76),
    "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS": field(269),
    "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": field(270),
    "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": field(271),
    "ECC_CURRENT": one_of("nvmlDeviceGetEccMode", 2, 0),
    "ECC_PENDING": one_of("nvmlDeviceGetEccMode", 2, 1),
    "ECC_SBE_VOL_TOTAL": ecc(0, 0),
    "ECC_DBE_VOL_TOTAL": ecc(1, 0),
    "ECC_SBE_AGG_TOTAL": ecc(0, 1),
    "ECC_DBE_AGG_TOTAL": ecc(1, 1),
    "RETIRED_SBE": retired(0),
    "RETIRED_DBE": retired(1),
    "RETIRED_PENDING": number("nvmlDeviceGetRetiredPagesPendingStatus"),
    "CORRECTABLE_REMAPPED_ROWS": one_of(REMAPPED, 4, 0),
    "UNCORRECTABLE_REMAPPED_ROWS": one_of(REMAPPED, 4, 1),
    "ROW_REMAP_PENDING": one_of(REMAPPED, 4, 2),
    "ROW_REMAP_FAILURE": one_of(REMAPPED, 4, 3),
    "BANKS_REMAP_ROWS_AVAIL_MAX": banks("max"),
    "BANKS_REMAP_ROWS_AVAIL_HIGH": banks("high"),
    "BANKS_REMAP_ROWS_AVAIL_PARTIAL": banks("partial"),
    "BANKS_REMAP_ROWS_AVAIL_LOW": banks("low"),
    "BANKS_REMAP_ROWS_AVAIL_NONE": banks("none"),
    "GET_GPU_RECOVERY_ACTION": field(230),
    "FABRIC_MANAGER_STATUS": fabric_status,
    "FABRIC_CLIQUE_ID": fabric("clique"),
    "FABRIC_HEALTH_MASK": fabric("health"),
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": field(38),
    "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": field(45),
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL": field(52),
    "NVLINK_RECOVERY_ERROR_COUNT_TOTAL": field(59),
}

# Of each NVLink: its state on every generation, and what NVLink 5 counts.  The real engine reads
# the counters of a GPU without naming a link, so of which links they are is not known: assumed
# here, the sum of all.
LINK_STATE = 165
LINK_COUNTERS = {
    "NVLINK_COUNT_TX_PACKETS": 201,
    "NVLINK_COUNT_TX_BYTES": 202,
    "NVLINK_COUNT_RX_PACKETS": 203,
    "NVLINK_COUNT_RX_BYTES": 204,
    "NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS": 206,
    "NVLINK_COUNT_RX_BUFFER_OVERRUN_ERRORS": 207,
    "NVLINK_COUNT_RX_ERRORS": 208,
    "NVLINK_COUNT_RX_REMOTE_ERRORS": 209,
    "NVLINK_COUNT_RX_GENERAL_ERRORS": 210,
    "NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS": 211,
    "NVLINK_COUNT_TX_DISCARDS": 212,
    "NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS": 213,
    "NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS": 214,
    "NVLINK_COUNT_LINK_RECOVERY_EVENTS": 215,
    "NVLINK_COUNT_EFFECTIVE_ERRORS": 219,
    "NVLINK_COUNT_RX_SYMBOL_ERRORS": 221,
}
TRAFFIC = (138, 139)  # KiB of data sent and received
BANDWIDTH = "NVLINK_BANDWIDTH_TOTAL"  # of both together since the last sample, in MB/s

TEXTS = {
    "DCGM_FI_DEV_SERIAL": "nvmlDeviceGetSerial",
    "DCGM_FI_DEV_VBIOS_VERSION": "nvmlDeviceGetVbiosVersion",
    "DCGM_FI_DEV_INFOROM_IMAGE_VER": "nvmlDeviceGetInforomImageVersion",
}


# ---- the engine ----------------------------------------------------------------------------------


class Gpu:
    """A GPU from the start, with its current values."""

    def __init__(self, nvml: Nvml, index: int, uuid: str, handle: Any) -> None:
        pci = nvml.filled("nvmlDeviceGetPciInfo_v3", handle, PciInfo())
        self.identity = {
            "gpu": index,
            "uuid": uuid,
            "name": nvml.text("nvmlDeviceGetName", handle),
            "pci_bus_id": pci.bus_id.decode() if pci else "",
            "texts": {name: nvml.text(function, handle) for name, function in TEXTS.items()},
        }
        self.handle = handle  # None while it is lost
        self.last_handle = handle  # what NVML's events name it by
        self.last_xid: int | None = None
        self.xids: deque[tuple[float, int]] = deque()
        self.reasons: deque[tuple[float, int]] = deque()
        self.traffic: tuple[float, float] | None = None

    def read(self, nvml: Nvml) -> tuple[dict[str, float | None], dict[str, dict[int, float]]]:
        """Return the fields of the GPU and of its links."""
        values = {name: reading(nvml, self.handle) for name, reading in FIELDS.items()}
        states = {}
        for link in range(LINKS):
            state = nvml.field(self.handle, LINK_STATE, link)
            if state is None:
                break
            states[link] = state
        for name, identity in LINK_COUNTERS.items():
            counts = [nvml.field(self.handle, identity, link) for link in states]
            known = [count for count in counts if count is not None]
            values[name] = sum(known) if known else None
        values[BANDWIDTH] = self.bandwidth(nvml)
        return values, {"NVLINK_GET_STATE": states}

    def bandwidth(self, nvml: Nvml) -> float | None:
        """Return NVLink's traffic since the last sample in MB/s, or None for the first sample."""
        parts = [nvml.field(self.handle, identity, ALL_LINKS) for identity in TRAFFIC]
        if None in parts:
            return None
        now, before = (time.monotonic(), float(sum(part or 0 for part in parts))), self.traffic
        self.traffic = now
        if before is None or now[0] == before[0]:
            return None
        return int((now[1] - before[1]) / 1024 / (now[0] - before[0]))


class Engine:
    """
    Readings of all GPUs, made by threads of their own, so that no client waits for NVML.

    Attributes:
        error: why NVML does not open; "" when it is open.
        interval: seconds from one reading to the next, the shortest that a client wants.
    """

    def __init__(self) -> None:
        self.nvml: Nvml | None = None
        self.error = "NVML was not asked yet"
        self.gpus: list[Gpu] = []
        self.driver = ""
        self.events = ctypes.c_void_p()
        self.silent = False  # a fatal Xid was seen: the driver is not asked any more
        self.interval = 30.0
        self.sample: dict[str, Any] = {}
        self.taken = float("-inf")
        self.wanted = threading.Event()
        self.changed = threading.Condition()

    def open(self) -> None:
        """Open NVML and count the GPUs, unless already done."""
        try:
            nvml = Nvml()
        except OSError as error:
            self.error = str(error)
            return
        self.driver = nvml.text("nvmlSystemGetDriverVersion")
        nvml.call("nvmlEventSetCreate", ctypes.byref(self.events))
        kind = ctypes.c_ulonglong(XID_CRITICAL)
        self.gpus = [
            Gpu(nvml, index, uuid, handle)
            for index, (uuid, handle) in enumerate(nvml.handles().items())
        ]
        for gpu in self.gpus:
            nvml.call("nvmlDeviceRegisterEvents", gpu.handle, kind, self.events)
        self.error, self.nvml = "", nvml

    def watch_events(self) -> None:
        """Look for lost GPUs and Xids, and retry to open NVML, without end."""
        while True:
            if self.nvml is None:
                self.open()
            elif not self.silent:
                self.find_lost(self.nvml)
                self.read_events(self.nvml)
            time.sleep(LIVE)

    def find_lost(self, nvml: Nvml) -> None:
        """Release the GPUs that NVML does not list, and use returned ones again."""
        listed = nvml.handles()
        for gpu in self.gpus:
            gpu.handle = listed.get(str(gpu.identity["uuid"]))
            gpu.last_handle = gpu.handle or gpu.last_handle

    def read_events(self, nvml: Nvml) -> None:
        """Record every Xid since the last call."""
        event = EventData()
        no_wait = 0
        while nvml.call("nvmlEventSetWait_v2", self.events, ctypes.byref(event), no_wait):
            xid = int(event.data)
            for gpu in self.gpus:
                if gpu.last_handle.value != event.device:
                    continue
                if gpu.handle is None and xid not in KMSG_XIDS:
                    log("Unable to convert device handle to index")  # and so it is not recorded
                    continue
                gpu.last_xid = xid
                gpu.xids.append((time.monotonic(), xid))
            if xid in FATAL_XIDS:
                self.silent = True
                log(f"XID {xid} detected. Hostengine restart required.")

    def read_on(self) -> None:
        """Read all values, then wait for the interval or for a client, without end."""
        while True:
            self.wanted.clear()
            if self.nvml is not None:
                self.read(self.nvml)
            with self.changed:
                self.taken = time.monotonic()
                self.changed.notify_all()
            self.wanted.wait(self.interval)

    def read(self, nvml: Nvml) -> None:
        """Take one sample of all GPUs."""
        sample = []
        now = time.monotonic()
        for gpu in self.gpus:
            values: dict[str, float | None] = {}
            links: dict[str, dict[int, float]] = {}
            if gpu.handle is None or self.silent:
                # Blank like all else, and from then on until the next one, too.
                gpu.last_xid = None
            else:
                values, links = gpu.read(nvml)
                reasons = values.get("CLOCKS_EVENT_REASONS")
                if reasons is not None:
                    gpu.reasons.append((now, int(reasons)))
            forget(gpu.reasons, now - KEPT)
            forget(gpu.xids, now - KEPT)
            values["XID_ERRORS"] = gpu.last_xid
            sample.append(
                {
                    **gpu.identity,
                    "values": {"DCGM_FI_DEV_" + name: value for name, value in values.items()},
                    "links": {"DCGM_FI_DEV_" + name: states for name, states in links.items()},
                }
            )
        self.sample = {
            "labels": {"DCGM_FI_DRIVER_VERSION": self.driver},
            "gpus": sample,
        }

    def readings(self, xid_window: float = 0.0, clock_window: float = 0.0) -> dict[str, Any]:
        """Return the last sample and the events in the windows, or {"error": reason}."""
        if self.error:
            return {"error": self.error}
        if not self.sample:
            return {"error": "nothing has been read yet"}
        now = time.monotonic()
        counted = [
            {
                **gpu,
                "xids": list(since(known.xids, now - xid_window)),
                "reasons": list(since(known.reasons, now - clock_window)),
            }
            for gpu, known in zip(self.sample["gpus"], self.gpus)  # noqa: B905  # Python 3.8
        ]
        return {**self.sample, "gpus": counted}

    def watched(self, interval: float, xid_window: float, clock_window: float) -> dict[str, Any]:
        """Return readings no older than the interval, waiting for NVML up to the limit."""
        self.interval = min(self.interval, interval)
        with self.changed:
            oldest = time.monotonic() - interval
            if self.taken < oldest:
                self.wanted.set()
            if not self.changed.wait_for(lambda: self.taken >= oldest, PATIENCE):
                return {"error": "NVML does not answer: request timed out"}
        return self.readings(xid_window, clock_window)


def forget(history: deque[tuple[float, int]], before: float) -> None:
    """Drop entries older than `before`."""
    while history and history[0][0] < before:
        history.popleft()


def since(history: deque[tuple[float, int]], start: float) -> list[int]:
    """Return the values from `start` on."""
    return [value for when, value in list(history) if when >= start]


def log(text: str) -> None:
    """Write a line to standard output, which systemd reads."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Client(socketserver.StreamRequestHandler):
    """One connection, with an answer to each line until the client disconnects."""

    engine: Engine

    def handle(self) -> None:
        """Answer every line until the connection ends."""
        for line in self.rfile:
            answer = answered(self.engine, line.split())
            if answer is not None:
                self.wfile.write(json.dumps(answer).encode() + b"\n")


def answered(engine: Engine, words: list[bytes]) -> dict[str, Any] | None:
    """Return the answer to one line, or None if it is not a query."""
    if words == [b"readings"]:
        return engine.watched(engine.interval, 0.0, 0.0)
    if len(words) == 4 and words[0] == b"watch":
        interval, xid_window, clock_window = (int(word) / 1000 for word in words[1:])
        return engine.watched(interval, xid_window, clock_window)
    return None


class Tcp(socketserver.ThreadingTCPServer):
    """The default TCP listener."""

    allow_reuse_address = True
    daemon_threads = True


class Unix(socketserver.ThreadingUnixStreamServer):
    """The listener of --domain-socket, which replaces TCP."""

    daemon_threads = True


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the real program's options; options without a meaning here are accepted."""
    parser = argparse.ArgumentParser(prog="nv-hostengine", allow_abbrev=False)
    parser.add_argument("-n", dest="foreground", action="store_true")
    parser.add_argument("--service-account", default="")
    parser.add_argument("-p", "--port", type=int, default=PORT)
    parser.add_argument("-b", "--bind-interface", default="127.0.0.1")
    parser.add_argument("-d", "--domain-socket", default="")
    parser.add_argument("--log-level", default="")
    parser.add_argument("-f", "--log-filename", default="")
    parser.add_argument("-v", "--version", action="version", version="Version : " + VERSION)
    parser.add_argument(
        "--embedded", action="store_true", help="ask and answer on stdin and stdout"
    )
    return parser.parse_args(argv)


def hold_gpus() -> list[int]:
    """Hold the GPUs' device, if it exists, like the real engine while it watches them."""
    return [os.open(DEVICE, os.O_RDWR)] if os.access(DEVICE, os.R_OK | os.W_OK) else []


def started() -> Engine:
    """Return an engine with running threads."""
    engine = Engine()
    engine.open()
    for work in (engine.watch_events, engine.read_on):
        threading.Thread(target=work, daemon=True).start()
    return engine


def serve_embedded() -> None:
    """Run as the engine of an exporter without a host engine, which asks on standard input."""
    engine = started()
    for line in sys.stdin.buffer:
        log(json.dumps(answered(engine, line.split())))


def main() -> None:
    """Listen until terminated."""
    options = arguments(sys.argv[1:])
    if options.embedded:
        serve_embedded()
        return
    if options.service_account:
        try:
            pwd.getpwnam(options.service_account)
        except KeyError:
            sys.exit(f"Err: service account {options.service_account} does not exist")
    address = "" if options.bind_interface == "ALL" else options.bind_interface
    server: socketserver.BaseServer
    if options.domain_socket:
        if os.path.exists(options.domain_socket):  # noqa: PTH110  # as short as can be on a node
            os.unlink(options.domain_socket)  # noqa: PTH108
        server = Unix(options.domain_socket, Client)
        where = "domain socket: " + options.domain_socket
    else:
        server = Tcp((address, options.port), Client)
        where = f"port number: {options.port}"
    held = hold_gpus()
    Client.engine = started()
    log("DCGM initialized")
    log(f"Started host engine version {VERSION} using {where}")
    try:
        server.serve_forever()
    finally:
        for device in held:
            os.close(device)


if __name__ == "__main__":
    main()
