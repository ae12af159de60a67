"""Asks NVML questions through the real binding, in a process of its own.

stdin:  a JSON list of Python expressions over the binding's names, `gpu(index)` and `matrix()`
stdout: a JSON list of their answers, in order; an NVML error is {"error": code}

    python3 -I interview.py DIRECTORY_OF_PYNVML < questions.json
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

sys.path.insert(0, sys.argv[1])
import pynvml


def gpu(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def matrix() -> list[list[str]]:
    """What `nvidia-smi topo -m` prints, from NVML calls alone."""
    count = pynvml.nvmlDeviceGetCount()
    return [[_cell(one, other) for other in range(count)] for one in range(count)]


def _cell(one: int, other: int) -> str:
    if one == other:
        return "X"
    if width := _direct_links(one, other) + min(_switch_links(one), _switch_links(other)):
        return f"NV{width}"
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(gpu(one), gpu(other))
    return {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}[level]


def _active_links(index: int) -> list[tuple[int, str]]:
    """(type of the far end, its PCI address) of every active link."""
    found = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(gpu(index), link) != 1:
                continue
        except pynvml.NVMLError:
            break
        far = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu(index), link).busId
        found.append((pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu(index), link), far))
    return found


def _switch_links(index: int) -> int:
    return sum(kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH for kind, _ in _active_links(index))


def _direct_links(one: int, other: int) -> int:
    address = pynvml.nvmlDeviceGetPciInfo(gpu(other)).busId
    return sum(far == address for _, far in _active_links(one))


def fabric(index: int, structure: str) -> dict[str, Any]:
    """Fabric information in one of its forms, by the name of the binding's class."""
    info = getattr(pynvml, structure)()
    call = "nvmlDeviceGetGpuFabricInfo" + ("" if structure == "c_nvmlGpuFabricInfo_t" else "V")
    getattr(pynvml, call)(gpu(index), ctypes.byref(info))
    return plain(info)


def field(index: int, number: int, scope: int = 0) -> Any:
    """One field value as the union's member that its type names."""
    (value,) = pynvml.nvmlDeviceGetFieldValues(gpu(index), [(number, scope)])
    if value.nvmlReturn != 0:
        return {"error": value.nvmlReturn}
    return getattr(value.value, {1: "uiVal", 3: "ullVal", 5: "siVal"}[value.valueType])


def filled(call: str, structure: str, index: int) -> dict[str, Any]:
    """A structure that the caller provides and NVML fills."""
    info = getattr(pynvml, structure)()
    getattr(pynvml, call)(gpu(index), ctypes.byref(info))
    return plain(info)


def plain(value: Any) -> Any:
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, ctypes.Array):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return plain(vars(value)) if hasattr(value, "__dict__") else _mapping(value)


def _mapping(value: Any) -> Any:
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def answer(question: str) -> Any:
    try:
        return plain(eval(question, {**vars(pynvml), **globals()}))
    except pynvml.NVMLError as error:
        return {"error": error.value}
    except UnicodeDecodeError:
        return {"error": "not text"}


if __name__ == "__main__":
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        json.dump([{"error": error.value}], sys.stdout)
    else:
        json.dump([answer(question) for question in json.load(sys.stdin)], sys.stdout)
        pynvml.nvmlShutdown()
