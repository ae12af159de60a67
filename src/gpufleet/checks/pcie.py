"""Check the width, speed and error counts of the GPUs' PCIe links. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

from gpufleet.checks.finding import POWER_CYCLE, STOP, Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import (
    CannotTell,
    GpuReading,
    Reading,
    Unread,
    cached_answer,
    expectation,
)

# The PCIe replays per lane and minute that a healthy link may have, by generation. They are one
# wrong bit in 10^12 (PCI Express Base Specification) at 2.5, 5, 8, 16, 32 and 64 Gbit/s. DCGM uses
# the same limits.
REPLAYS_A_LANE_AND_MINUTE = {1: 0.15, 2: 0.3, 3: 0.48, 4: 0.96, 5: 1.92, 6: 3.84}

WIDEST = 32  # lanes; PCI Express Base Specification
PERFORMANCE_STATE_FULL = 0  # nvmlPstates_t: P0


RESEAT = Step(
    Action.SERVICE, "have the GPU reseated; if this does not help, have its riser or board replaced"
)


def pcie_width(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the GPU uses all of its PCIe lanes.

    "All" is the declared number. If none is declared, it is the number of siblings' GPUs in the
    same slot, or of most other GPUs of the node. Without a GPU to compare with, a GPU with fewer
    lanes than the device supports is only a warning, because the slot may have no more lanes.
    """
    width = gpu.get("pcie_width")
    if not 0 < width <= WIDEST:
        raise Unread(f"{width} lanes is not a PCIe width")
    node = gpu.node
    bus_id = gpu.known("pci", "bus_id")
    slot = (width for twin in node.twins for at, width in _slots(twin) if at == bus_id)
    expected = expectation(node.settings.gpus.pcie_width, "gpus.pcie_width", slot)
    if expected is None or not expected.certain:
        beside = expectation(None, "", (other.known("pcie_width") for other in _like(gpu)))
        if beside and beside.certain and width < beside.value:
            yield _narrow(gpu, width, beside.value, "the node's other GPUs", Severity.BLOCK)
            return
        expected = None
    if expected and width < expected.value:
        yield _narrow(gpu, width, expected.value, expected.source, Severity.BLOCK)
    elif expected is None and width < (most := gpu.get("pcie_width_max")):
        # Grace CPUs communicate with their GPUs over NVLink-C2C, so the PCIe lanes matter little.
        severity = Severity.INFO if gpu.known("c2c_links") else Severity.WARN
        yield _narrow(gpu, width, most, "the device", severity)


@cached_answer
def _slots(node: Reading) -> tuple[tuple[Any, Any], ...]:
    """Return the PCI address and the number of lanes of each GPU of the node."""
    return tuple((gpu.known("pci", "bus_id"), gpu.known("pcie_width")) for gpu in node.gpus)


def _narrow(gpu: GpuReading, width: int, wanted: int, source: str, severity: Severity) -> Problem:
    by_design = Step(
        Action.CONFIGURE, f"if the slot has only {width} lanes: declare gpus.pcie_width: {width}"
    )
    at = gpu.known("pci", "bus_id", default="")
    return Problem(
        severity,
        f"{width} PCIe lanes",
        f"{wanted} lanes",
        source,
        (
            Step(Action.LOOK, f"`lspci -vv -s {at} | grep LnkSta:`"),
            *(() if severity == Severity.BLOCK else (by_design,)),
            STOP,
            POWER_CYCLE,
            RESEAT,
        ),
        gpu.index,
    )


def _like(gpu: GpuReading) -> list[GpuReading]:
    """Return the node's other GPUs of the same model."""
    name = gpu.known("name")
    return [
        other for other in gpu.node.gpus if other.index != gpu.index and other.known("name") == name
    ]


def pcie_generation(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that a GPU at full clocks uses the fastest PCIe generation that the GPU and its slot
    support.

    An idle GPU uses a lower generation to save power, which is no fault.
    """
    generation, most = gpu.get("pcie_generation"), gpu.get("pcie_generation_max")
    if generation < 1 or most < 1:
        raise Unread(f"generation {generation} of {most} is not a PCIe generation")
    if generation >= most:
        return
    state = gpu.get("performance_state")
    if state != PERFORMANCE_STATE_FULL or not gpu.get("processes"):
        raise CannotTell(
            f"the link runs at generation {generation} of {most}, which is normal for idle GPUs"
        )
    yield Problem(
        Severity.WARN,
        f"PCIe generation {generation} while the GPU works",
        f"generation {most}",
        "the device",
        (
            Step(Action.LOOK, "`dmesg | grep -iE 'AER|pcieport'`: errors lower the speed"),
            STOP,
            POWER_CYCLE,
            RESEAT,
        ),
        gpu.index,
    )


def pcie_replays(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the PCIe link repeats no more packets than its specified bit error rate explains.

    The counter may have started later than the node. The check divides it by the time since boot,
    so the true rate may be higher than the rate that is compared.
    """
    replays = gpu.get("pcie_replays")
    if replays < 0:
        raise Unread(f"{replays} is not a valid number of replays")
    if not replays:
        return
    lanes = gpu.get("pcie_width_max")
    generation = gpu.get("pcie_generation_max")
    rate = REPLAYS_A_LANE_AND_MINUTE.get(generation, max(REPLAYS_A_LANE_AND_MINUTE.values()))
    allowed = ceil(lanes * rate)
    minutes = max(gpu.node.get("system", "uptime_seconds") / 60, 1)
    if replays > allowed * minutes:
        yield Problem(
            Severity.WARN,
            f"{replays} PCIe replays in {minutes / 60:.1f} h, {replays / minutes:.0f} a minute",
            f"{allowed} per minute at most",
            f"PCI Express bit error rate, {lanes} lanes of generation {generation}",
            (
                Step(
                    Action.LOOK,
                    "`nvidia-smi -q -d PCI` twice, to see whether `Replays Since Reset` grows",
                ),
                STOP,
                POWER_CYCLE,
                RESEAT,
            ),
            gpu.index,
        )


OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "pcie-width": pcie_width,
    "pcie-generation": pcie_generation,
    "pcie-replays": pcie_replays,
}
