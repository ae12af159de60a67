#!/usr/bin/python3 -I
"""A stand-in for DCGM's host engine: what NVML says, over TCP to those who ask.

Runs on the node: standard library only, Python 3.8.  It takes the real program's options, logs
what the real one logs at its start, and listens where the real one does.  The protocol is its
own: a line "readings" is answered by one line of JSON, what `readings()` returns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pwd
import socketserver
import sys
from typing import Any

VERSION = "@VERSION@"
PORT = 5555
DEVICE = "/dev/nvidiactl"

MIB = 1 << 20
SUCCESS = 0
# nvml.h: nvmlTemperatureSensors_t, nvmlTemperatureThresholds_t, nvmlClockType_t,
# nvmlMemoryErrorType_t and nvmlEccCounterType_t.
GPU_SENSOR = 0
SHUTDOWN, SLOWDOWN = 0, 1
SM_CLOCK, MEMORY_CLOCK = 1, 2
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


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


class Nvml:
    """NVML between init and shutdown; a failing call is None, as a blank value is in DCGM."""

    def __enter__(self) -> Nvml:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        code = self.library.nvmlInit_v2()
        if code != SUCCESS:
            raise OSError(f"NVML does not start: error {code}")
        return self

    def __exit__(self, *_: object) -> None:
        self.library.nvmlShutdown()

    def call(self, function: str, *arguments: Any) -> bool:
        """Call `function`; return whether it exists and succeeded."""
        found = getattr(self.library, function, None)
        return found is not None and found(*arguments) == SUCCESS

    def number(self, function: str, *arguments: Any, kind: Any = ctypes.c_uint) -> float | None:
        """Return the number that `function` writes behind its last argument."""
        value = kind()
        return value.value if self.call(function, *arguments, ctypes.byref(value)) else None

    def text(self, function: str, *arguments: Any) -> str:
        """Return the text that `function` writes into the buffer that it is given."""
        value = ctypes.create_string_buffer(96)  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
        return value.value.decode() if self.call(function, *arguments, value, 96) else ""

    def filled(self, function: str, handle: Any, structure: Any) -> Any:
        """Return `structure` as `function` fills it, or None."""
        return structure if self.call(function, handle, ctypes.byref(structure)) else None


def readings() -> dict[str, Any]:
    """Return {"labels": {DCGM field: text}, "gpus": [...]}, or {"error": why not}."""
    try:
        with Nvml() as nvml:
            count = nvml.number("nvmlDeviceGetCount_v2")
            found = [gpu(nvml, index) for index in range(int(count or 0))]
            gpus = [one for one in found if one]  # one that fell off the bus has no handle
            driver = nvml.text("nvmlSystemGetDriverVersion")
            return {"labels": {"DCGM_FI_DRIVER_VERSION": driver}, "gpus": gpus}
    except OSError as error:
        return {"error": str(error)}


def gpu(nvml: Nvml, index: int) -> dict[str, Any]:
    """Return one GPU: its identity, its values by their DCGM names; {} for a lost one."""
    handle = ctypes.c_void_p()
    if not nvml.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)):
        return {}
    pci = nvml.filled("nvmlDeviceGetPciInfo_v3", handle, PciInfo())
    values = {**gauges(nvml, handle), **counters(nvml, handle)}
    return {
        "gpu": index,
        "uuid": nvml.text("nvmlDeviceGetUUID", handle),
        "name": nvml.text("nvmlDeviceGetName", handle),
        "pci_bus_id": pci.bus_id.decode() if pci else "",
        "values": {"DCGM_FI_DEV_" + name: value for name, value in values.items()},
    }


def gauges(nvml: Nvml, handle: Any) -> dict[str, float | None]:
    """Temperatures in C, power in W, clocks in MHz, memory in MiB, use in percent."""
    memory = nvml.filled("nvmlDeviceGetMemoryInfo", handle, Memory())
    use = nvml.filled("nvmlDeviceGetUtilizationRates", handle, Utilization())
    threshold = "nvmlDeviceGetTemperatureThreshold"
    return {
        "GPU_TEMP": nvml.number("nvmlDeviceGetTemperature", handle, GPU_SENSOR),
        "SLOWDOWN_TEMP": nvml.number(threshold, handle, SLOWDOWN),
        "SHUTDOWN_TEMP": nvml.number(threshold, handle, SHUTDOWN),
        "POWER_USAGE": watts(nvml.number("nvmlDeviceGetPowerUsage", handle)),
        "ENFORCED_POWER_LIMIT": watts(nvml.number("nvmlDeviceGetEnforcedPowerLimit", handle)),
        "SM_CLOCK": nvml.number("nvmlDeviceGetClockInfo", handle, SM_CLOCK),
        "MEM_CLOCK": nvml.number("nvmlDeviceGetClockInfo", handle, MEMORY_CLOCK),
        "FB_TOTAL": memory and memory.total // MIB,
        "FB_FREE": memory and memory.free // MIB,
        "FB_USED": memory and memory.used // MIB,
        "GPU_UTIL": use and use.gpu,
        "MEM_COPY_UTIL": use and use.memory,
    }


def counters(nvml: Nvml, handle: Any) -> dict[str, float | None]:
    """Errors counted since boot or ever; energy in mJ."""

    def ecc(error: int, since: int) -> float | None:
        function = "nvmlDeviceGetTotalEccErrors"
        return nvml.number(function, handle, error, since, kind=ctypes.c_ulonglong)

    energy = "nvmlDeviceGetTotalEnergyConsumption"
    rows = [ctypes.c_uint() for _ in range(4)]
    known = nvml.call("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
    corrected, uncorrected, pending, failed = (row.value if known else None for row in rows)
    return {
        "TOTAL_ENERGY_CONSUMPTION": nvml.number(energy, handle, kind=ctypes.c_ulonglong),
        "PCIE_REPLAY_COUNTER": nvml.number("nvmlDeviceGetPcieReplayCounter", handle),
        "ECC_SBE_VOL_TOTAL": ecc(CORRECTED, VOLATILE),
        "ECC_DBE_VOL_TOTAL": ecc(UNCORRECTED, VOLATILE),
        "ECC_SBE_AGG_TOTAL": ecc(CORRECTED, AGGREGATE),
        "ECC_DBE_AGG_TOTAL": ecc(UNCORRECTED, AGGREGATE),
        "CORRECTABLE_REMAPPED_ROWS": corrected,
        "UNCORRECTABLE_REMAPPED_ROWS": uncorrected,
        "ROW_REMAP_PENDING": pending,
        "ROW_REMAP_FAILURE": failed,
    }


def watts(milliwatts: float | None) -> float | None:
    """NVML counts power in mW, DCGM in W."""
    return None if milliwatts is None else milliwatts / 1000


class Client(socketserver.StreamRequestHandler):
    """One connection: a line asks, a line answers, until the client leaves."""

    def handle(self) -> None:
        """Answer every line until the connection ends."""
        for line in self.rfile:
            if line.strip() == b"readings":
                self.wfile.write(json.dumps(readings()).encode() + b"\n")


class Tcp(socketserver.ThreadingTCPServer):
    """The default listener."""

    allow_reuse_address = True
    daemon_threads = True


class Unix(socketserver.ThreadingUnixStreamServer):
    """The listener of --domain-socket; there is no TCP then."""

    daemon_threads = True


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the real program's options; those without a meaning here are accepted."""
    parser = argparse.ArgumentParser(prog="nv-hostengine", allow_abbrev=False)
    parser.add_argument("-n", dest="foreground", action="store_true")
    parser.add_argument("--service-account", default="")
    parser.add_argument("-p", "--port", type=int, default=PORT)
    parser.add_argument("-b", "--bind-interface", default="127.0.0.1")
    parser.add_argument("-d", "--domain-socket", default="")
    parser.add_argument("--log-level", default="")
    parser.add_argument("-f", "--log-filename", default="")
    parser.add_argument("-v", "--version", action="version", version="Version : " + VERSION)
    parser.add_argument("--readings", action="store_true", help="print the readings once and end")
    return parser.parse_args(argv)


def hold_gpus() -> list[int]:
    """Hold the GPUs' device, where there is one, as the real engine does while it watches them."""
    return [os.open(DEVICE, os.O_RDWR)] if os.access(DEVICE, os.R_OK | os.W_OK) else []


def main() -> None:
    """Listen until terminated."""
    options = arguments(sys.argv[1:])
    if options.readings:
        print(json.dumps(readings()))  # noqa: T201  # the exporter's embedded engine
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
    sys.stdout.write("DCGM initialized\n")
    sys.stdout.write(f"Started host engine version {VERSION} using {where}\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    finally:
        for device in held:
            os.close(device)


if __name__ == "__main__":
    main()
