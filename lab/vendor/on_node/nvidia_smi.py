#!/usr/bin/python3 -I
"""A stand-in for nvidia-smi: NVML's values of the driver and of every GPU.

Runs on the node: standard library only, Python 3.8. It knows -L, the setters of SETTERS and CHANGES
with and without -i INDEX, --query-gpu with the names below, and shows a short list otherwise; it
fails in the words and with the status of the real one where NVML does not open. Unlike the real one
it resets GPUs that are in use.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION = "@VERSION@"

MISMATCH, NOT_LOADED = 18, 9
SAID = {
    MISMATCH: "Failed to initialize NVML: Driver/library version mismatch\n"
    f"NVML library version: {VERSION.rpartition('.')[0]}",
    NOT_LOADED: "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n",
}
STATE = Path(os.environ.get("GPUFLEET_NVML_STATE", "/etc/gpufleet-lab/nvml.conf.state"))
"""Changes by setters of the simulated NVML."""
SETTERS = {
    "-pm": ("nvmlDeviceSetPersistenceMode", 1),
    "-pl": ("nvmlDeviceSetPowerManagementLimit", 1000),
    "-mig": ("nvmlDeviceSetMigMode", 1),
    "-c": ("nvmlDeviceSetComputeMode", 1),
    "-e": ("nvmlDeviceSetEccMode", 1),
}
"""Options with a number: the function, and the factor of the number."""
_UNLOCKED = {"clocks.reasons": 1}
CHANGES = {
    "-rgc": _UNLOCKED,
    "-rmc": _UNLOCKED,
    "-rac": _UNLOCKED,
    "-r": {"recovery_action": 0, "remap.pending": 0},
}
"""Options without a number, and the profile keys that they change."""
BUFFER = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


class Nvml:
    """The opened library."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        code = self.library.nvmlInit_v2()
        if code != 0:
            print(SAID.get(code, f"Failed to initialize NVML: error {code}"))  # noqa: T201
            sys.exit(code)

    def text(self, function: str, *arguments: Any) -> str:
        """Return the text that a function writes, or N/A."""
        value = ctypes.create_string_buffer(BUFFER)
        failed = getattr(self.library, function)(*arguments, value, BUFFER)
        return "[N/A]" if failed else value.value.decode()

    def number(self, function: str, *arguments: Any) -> str:
        """Return the number that a function writes, or N/A."""
        value = ctypes.c_uint()
        failed = getattr(self.library, function)(*arguments, ctypes.byref(value))
        return "[N/A]" if failed else str(value.value)

    def gpus(self) -> list[ctypes.c_void_p]:
        """Return the handle of every GPU."""
        handles = []
        for index in range(int(self.number("nvmlDeviceGetCount_v2"))):
            handle = ctypes.c_void_p()
            self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            handles.append(handle)
        return handles


def queries(nvml: Nvml) -> dict[str, Callable[[Any], str]]:
    """Return a function for each name of --query-gpu."""
    modes = {"0": "Disabled", "1": "Enabled"}

    def persistence(gpu: Any) -> str:
        mode = nvml.number("nvmlDeviceGetPersistenceMode", gpu)
        return modes.get(mode, mode)

    return {
        "driver_version": lambda _: nvml.text("nvmlSystemGetDriverVersion"),
        "index": lambda gpu: nvml.number("nvmlDeviceGetIndex", gpu),
        "name": lambda gpu: nvml.text("nvmlDeviceGetName", gpu),
        "uuid": lambda gpu: nvml.text("nvmlDeviceGetUUID", gpu),
        "persistence_mode": persistence,
    }


def change(nvml: Nvml, arguments: list[str]) -> None:
    """Apply the options to one GPU or to all."""
    words = iter(arguments)
    only = None
    wanted = []
    for word in words:
        if word == "-i":
            only = int(next(words))
        elif word in SETTERS:
            wanted.append((word, int(next(words))))
        elif word in CHANGES:
            wanted.append((word, 0))
        else:
            sys.exit("Invalid combination of input arguments.")
    for index, gpu in enumerate(nvml.gpus()):
        for word, number in wanted if only in (None, index) else ():
            if word in CHANGES:
                with STATE.open("a") as state:
                    changed = CHANGES[word].items()
                    state.writelines(f"gpu.{index}.{key} = {value}\n" for key, value in changed)
                continue
            name, times = SETTERS[word]
            more = [ctypes.byref(ctypes.c_uint())] if word == "-mig" else []
            failed = getattr(nvml.library, name)(gpu, number * times, *more)
            if failed:
                sys.exit(f"{word}: NVML error {failed}")


def main() -> None:
    """Run one command line."""
    nvml = Nvml()
    known = queries(nvml)
    arguments = sys.argv[1:]
    if {*arguments} & {*SETTERS, *CHANGES}:
        change(nvml, arguments)
        return
    if arguments == ["-L"]:
        form, names = "GPU {}: {} (UUID: {})", ["index", "name", "uuid"]
    else:
        asked = [each.partition("=")[2] for each in arguments if each.startswith("--query-gpu=")]
        names = asked[0].split(",") if asked else ["index", "name", "driver_version"]
        form = ", ".join(["{}"] * len(names))
        unknown = [name for name in names if name not in known]
        if unknown:
            sys.exit(f'Field "{unknown[0]}" is not a valid field to query.')
    for gpu in nvml.gpus():
        print(form.format(*(known[name](gpu) for name in names)))  # noqa: T201


if __name__ == "__main__":
    main()
