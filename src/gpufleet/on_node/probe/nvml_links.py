"""RUNS ON THE NODE: read NVML's values of each NVLink and of each pair of GPUs."""

from __future__ import annotations

from typing import Any, Iterable

from gpufleet.on_node.common.answers import is_missing, read, to_json_types
from gpufleet.on_node.common.nvml import field, start_nvml, sysfs_bus_id

NO_LINK = {"invalid_argument", "function_not_found", "not_supported"}
# More links than any GPU has. NVML itself reports the end (18 links from R525 on, 36 from R610 on).
LINKS_MAX = 64

NVLINK_5 = 7  # NVML's enumeration of NVLink versions; 6 is NVLink 4

# nvmlNvLinkErrorCounter_t, for NVLink up to version 4. Later boards have the counters in numbered
# fields (nvml.h).
ERROR_COUNTERS = (("replay", 0), ("recovery", 1), ("crc_flit", 2), ("crc_data", 3), ("ecc", 4))
ERROR_FIELDS = (
    ("receive", 208),
    ("integrity", 211),
    ("recovery_ok", 213),
    ("recovery_failed", 214),
)
RATE_FIELDS = (("effective_ber", 220), ("symbol_ber", 222))

# nvmlGpuP2PCapsIndex_t, as numbers, because the binding's NVML_P2P_CAPS_INDEX_READ is a tuple.
P2P_INDEXES = (("read", 0), ("write", 1), ("nvlink", 2))


def links_of(nvml: Any, gpu: Any) -> dict[str, Any]:
    """
    Return the number of a GPU's NVLinks, how many of them reach a switch, and each link's state.
    """
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
    fifth = any(not is_missing(link["version"]) and link["version"] >= NVLINK_5 for link in links)
    for each in links:
        each["errors"] = (errors_of_nvlink_5 if fifth else errors)(nvml, gpu, each["link"])
    return {
        "count": read(field, nvml, gpu, 91),
        "switch_links": read(field, nvml, gpu, 147),
        "links": links or states[0],
    }


def link(nvml: Any, gpu: Any, number: int, state: Any) -> dict[str, Any]:
    """Return the state of one NVLink, and the device at its other end."""
    return {
        "link": number,
        "state": state,
        "version": read(nvml.nvmlDeviceGetNvLinkVersion, gpu, number),
        "remote_type": read(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, gpu, number),
        "remote_pci": read(lambda: remote_bus_id(nvml, gpu, number)),
        "speed_mbps": read(field, nvml, gpu, 164, number),
    }


def errors(nvml: Any, gpu: Any, number: int) -> dict[str, Any]:
    """Return the error counters of an NVLink of version 4 or older."""
    return {
        name: read(nvml.nvmlDeviceGetNvLinkErrorCounter, gpu, number, counter)
        for name, counter in ERROR_COUNTERS
    }


def errors_of_nvlink_5(nvml: Any, gpu: Any, number: int) -> dict[str, Any]:
    """Return the error counters and bit error rates of an NVLink of version 5 or newer."""
    return {
        **{name: read(field, nvml, gpu, id_, number) for name, id_ in ERROR_FIELDS},
        **{name: read(bit_errors, nvml, gpu, id_, number) for name, id_ in RATE_FIELDS},
    }


def bit_errors(nvml: Any, gpu: Any, number: int, link: int) -> float:
    """
    Return a bit error rate.

    The driver returns m * 10**-e as one number, with m in bits 8 to 11 and e in bits 0 to 7.
    """
    packed = int(field(nvml, gpu, number, link))
    return float("%de-%d" % (packed >> 8 & 0xF, packed & 0xFF))


def remote_bus_id(nvml: Any, gpu: Any, number: int) -> str:
    """
    Return the PCI function at the other end of a link.

    If NVML does not know the function, the result is "ffffffff:ff:ff.0".
    """
    return sysfs_bus_id(to_json_types(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, number).busId))


def pairs(index: int, others: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the connection of one GPU to each of the others."""
    nvml = start_nvml()
    here = nvml.nvmlDeviceGetHandleByIndex(index)
    return {other: read(pair, nvml, here, other) for other in others}


def pair(nvml: Any, here: Any, other: int) -> dict[str, Any]:
    """
    Return the P2P status of a pair of GPUs by kind, and the pair's common PCIe ancestor.

    The ancestor is a number from 10 (PIX) to 50 (SYS).
    """
    there = nvml.nvmlDeviceGetHandleByIndex(other)
    return {
        "pcie": read(nvml.nvmlDeviceGetTopologyCommonAncestor, here, there),
        **{kind: read(nvml.nvmlDeviceGetP2PStatus, here, there, n) for kind, n in P2P_INDEXES},
    }
