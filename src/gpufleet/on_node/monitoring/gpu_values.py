"""RUNS ON THE NODE: read NVML's current values of each GPU, on nodes without DCGM.

Only a few values are read, because the program runs every minute. The probe's tables have all
values that describe the hardware.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

from gpufleet.on_node.common.answers import is_missing, read
from gpufleet.on_node.common.nvml import Ask, first_of, get, start_nvml, text
from gpufleet.on_node.probe.nvml_gpus import checked_count, pci

# 0x02000028 selects nvmlMemory_v2, which does not count the driver's own reserve as used (nvml.h).
MEMORY = first_of(get("MemoryInfo", 0x02000028), get("MemoryInfo"))
UTILIZATION = get("UtilizationRates")
REMAPPED = get("RemappedRows", keys=("corrected", "uncorrected", "pending", "failed"))


def memory(part: str) -> Ask:
    """Return a function that reads a part of a GPU's memory, in bytes."""
    return lambda nvml, gpu: getattr(MEMORY(nvml, gpu), part)


def remap_state(part: str) -> Ask:
    """Return a function that reads a state of the row remapper, 0 or 1."""
    return lambda nvml, gpu: int(bool(REMAPPED(nvml, gpu)[part]))


VALUES: Tuple[Tuple[str, Ask], ...] = (
    ("temperature_celsius", first_of(get("TemperatureV", 0), get("Temperature", 0))),
    ("memory_used_bytes", memory("used")),
    ("memory_free_bytes", memory("free")),
    ("power_watts", lambda nvml, gpu: get("PowerUsage")(nvml, gpu) / 1000),
    ("utilization_ratio", lambda nvml, gpu: UTILIZATION(nvml, gpu).gpu / 100),
    # 1 is NVML_CLOCK_SM. NVML returns MHz (nvml.h).
    ("sm_clock_hertz", lambda nvml, gpu: get("ClockInfo", 1)(nvml, gpu) * 1000000),
    # Arguments: 1 is uncorrected errors, 0 is the counter since the driver was loaded.
    ("ecc_uncorrected_total", get("TotalEccErrors", 1, 0)),
    ("row_remap_pending", remap_state("pending")),
    ("row_remap_failure", remap_state("failed")),
)
# Reasons of values that a board does not have, which are not failures (nvmlReturn_t 3 and 13). For
# example, GeForce has no ECC and no row remapper, and some boards do not measure power.
NOT_THERE = {"not_supported", "function_not_found"}


def count() -> int:
    """Return the number of GPUs from NVML. Raises NVML's error if it cannot be initialised."""
    return checked_count(start_nvml().nvmlDeviceGetCount())


def gpu(index: int) -> Dict[str, Any]:
    """
    Return one GPU's `uuid`, its `bus_id`, its available `values`, and `failed`.

    `failed` has the names of values that the board should have but that could not be read. Raises
    NVML's error if NVML returns no handle or no UUID.
    """
    nvml = start_nvml()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    answers: List[Tuple[str, Any]] = [(name, read(ask, nvml, handle)) for name, ask in VALUES]
    uuid = text(get("UUID"))(nvml, handle)
    return {
        "uuid": uuid,
        "bus_id": pci(nvml, handle)["bus_id"],
        "values": {name: answer for name, answer in answers if is_number(answer)},
        "failed": list(failed_fields(answers)),
    }


def is_number(answer: Any) -> bool:
    """Return whether an answer is a number and not the placeholder of a missing value."""
    return isinstance(answer, (int, float)) and not is_missing(answer)


def failed_fields(answers: List[Tuple[str, Any]]) -> Iterator[str]:
    """Yield the names of values that could not be read although the board may support them."""
    for name, answer in answers:
        if not is_number(answer) and not (is_missing(answer) and answer["missing"] in NOT_THERE):
            yield name
