"""Compute the distance from each GPU to each NIC from sysfs, because NVML does not report it. Pure.

The functions take the probe's document. A sysfs path lists the bridges from the root of the PCIe
tree down to the device:

    /sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0
                 host bridge  root port    a switch     its port     the device

The common part of two paths shows how far up in the tree the traffic between the two devices goes.
The classes of distances are those of `nvidia-smi topo -m`, whose legend defines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from gpufleet.node.smi_topology import PCIE
from gpufleet.node.topology import value_or


def nearest_nics(document: Mapping[str, Any]) -> dict[int, list[tuple[str, str]]]:
    """
    Return the names of each GPU's nearest NICs, with their class.

    NICs of equal distance are all listed. A GPU that does not answer, or whose PCI position is
    unknown, has no NICs.
    """
    return nearest_by_class(nic_classes(document))


def nearest_by_class(classes: Mapping[str, Mapping[int, str]]) -> dict[int, list[tuple[str, str]]]:
    """
    Return each GPU's nearest NICs from {NIC: {GPU index: class}}.

    >>> nearest_by_class({"mlx5_0": {0: "PIX", 1: "SYS"}, "mlx5_1": {0: "NODE", 1: "SYS"}})
    {0: [('mlx5_0', 'PIX')], 1: [('mlx5_0', 'SYS'), ('mlx5_1', 'SYS')]}
    """
    near: dict[int, list[tuple[str, str]]] = {}
    for nic, gpus in classes.items():
        for gpu, found in gpus.items():
            best = near.get(gpu, [(nic, found)])[0][1]
            if PCIE.index(found) < PCIE.index(best):
                near[gpu] = [(nic, found)]
            elif found == best:
                near.setdefault(gpu, []).append((nic, found))
    return dict(sorted(near.items()))


def nic_classes(document: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Return {NIC: {GPU index: class}} for a probe's RDMA devices on the PCI bus."""
    functions = {each["bus_id"]: each for each in value_or(document["pci"], [])}
    gpus = {
        gpu["index"]: pci_location(
            functions.get(value_or(gpu.get("pci"), {}).get("bus_id"), {}),
            value_or(document["numa"][at], {}).get("node"),
        )
        for at, gpu in enumerate(document["gpus"])
        if value_or(gpu.get("pci")) is not None
    }
    nics = value_or(value_or(document["nics"], {}).get("infiniband"), [])
    found: dict[str, dict[int, str]] = {}
    for nic in nics:
        pci = value_or(nic["pci"])
        if pci is None:
            continue  # a software device (rxe, siw): it is nowhere on the bus
        path, numa = pci_location(pci, None)
        found[nic["name"]] = {
            index: pci_distance(path, numa, *there) for index, there in gpus.items() if there[0]
        }
    return found


def pci_location(function: Mapping[str, Any], numa: Any) -> tuple[str, int | None]:
    """Return a PCI function's sysfs path ("" if unknown) and NUMA node (-1 without NUMA)."""
    return value_or(function.get("path"), ""), value_or(function.get("numa_node"), value_or(numa))


def pci_distance(path: str, numa: int | None, other_path: str, other_numa: int | None) -> str:
    """
    Return the class of two PCI functions from their sysfs paths and NUMA nodes.

    If a position is unknown, the distance counts as the farthest, as in `topology`.

    >>> switch = "/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0"
    >>> one, other = f"{switch}/0000:18:00.0/0000:19:00.0", f"{switch}/0000:18:01.0/0000:1a:00.0"
    >>> pci_distance(one, 0, other, 0)
    'PIX'
    """
    one, other = _steps(path), _steps(other_path)
    shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )
    if shared > 1:
        # If there is at most one more step from the last common bridge to each device, both devices
        # are on ports of one switch (or are functions of one card).
        more = max(len(one), len(other)) - 1 - shared
        return "PIX" if more <= 1 else "PXB"
    if shared == 1:
        return "PHB"
    return "NODE" if numa is not None and numa == other_numa else "SYS"


def _steps(path: str) -> list[str]:
    """Return the parts of a path from the host bridge on, or [] if the path has no host bridge."""
    steps = path.split("/")
    at = next((at for at, step in enumerate(steps) if step.startswith("pci")), len(steps))
    return steps[at:]
