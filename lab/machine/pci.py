"""The PCI functions of a machine: its GPUs, NICs, NVSwitches and the bridges above them. Pure.

A profile's `path`, NUMA.HOSTBRIDGE.TREE.SWITCH, defines the distance between two GPUs. This module
converts the path to directories of sysfs: one host bridge for each (NUMA, HOSTBRIDGE), and one root
port for each TREE. If several functions have the same whole path, a switch is added below the root
port. A NIC is beside its GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from lab.machine.parts import Function
from lab.machine.profile import Profile

# PCI class codes (PCI code and ID assignment specification).
GPU_CLASS, VGA_CLASS = 0x030200, 0x030000
INFINIBAND_CLASS, ETHERNET_CLASS = 0x020700, 0x020000
BRIDGE_CLASS, OTHER_BRIDGE_CLASS = 0x060400, 0x068000

NVIDIA, MELLANOX, INTEL, BROADCOM = 0x10DE, 0x15B3, 0x8086, 0x1000

# Device ids, from the PCI id database (pci-ids.ucw.cz).
CONNECTX7, E810 = 0x1021, 0x159B
ROOT_PORT, SWITCH_PORT = 0x347A, 0xC030

# NVSwitches of A100 and of H100 boards.
NVSWITCHES = {7: 0x1AF1, 9: 0x22A3}
# Bus numbers of NVSwitches, which `lab/nvml/nvlink.c` returns for the remote end of links.
FIRST_NVSWITCH_BUS = 0xC4

# ACS control with only source validation enabled: no request or completion is redirected.
ACS_QUIET = 0x01


@dataclass
class _Slots:
    """Used bus numbers by domain, and the placed functions."""

    taken: dict[int, set[int]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    def bus(self, domain: int, first: int) -> int:
        """Take the first free bus number from `first` on, continuing from 0 after the last."""
        used = self.taken.setdefault(domain, set())
        number = next(at % 256 for at in range(first, first + 256) if at % 256 not in used)
        used.add(number)
        return number


@dataclass(frozen=True)
class _Endpoint:
    """A function to be placed: at `bus_id`, or anywhere ("") below its path's root."""

    name: str
    path: tuple[int, ...]
    domain: int
    bus_id: str
    vendor: int
    device: int
    class_code: int
    driver: str | None


def functions(
    profile: Profile, rdma: tuple[str, ...], managers: tuple[str, ...], layer: str
) -> dict[str, Function]:
    """
    Return the machine's functions by name: "gpu0", "eth0", "switch0", and bridges by bus id.

    `rdma` has the names of the devices beside the GPUs, which use `layer`; `managers` has the
    devices that manage NVSwitches.
    """
    endpoints = [
        *_gpus(profile),
        *_nics(profile, rdma, layer),
        *(_nic(name, (0, 80, 0, 0), 0, "InfiniBand") for name in managers),
        _ethernet(profile),
    ]
    if profile.text("host.virtual"):
        return dict(_flat(endpoints))
    slots = _Slots()
    for endpoint in endpoints:
        if endpoint.bus_id:
            slots.taken.setdefault(endpoint.domain, set()).add(int(endpoint.bus_id[5:7], 16))
    slots.taken.setdefault(0, set()).update(
        FIRST_NVSWITCH_BUS + number for number in range(profile.pci_switches)
    )
    _place(slots, endpoints, profile.pci_switches)
    return slots.functions


def _gpus(profile: Profile) -> Iterator[_Endpoint]:
    for index in range(profile.count):
        bus_id = profile.gpu(index, "busid").lower()
        yield _Endpoint(
            name=f"gpu{index}",
            path=_path(profile, index),
            domain=int(bus_id[:4], 16),
            bus_id=bus_id,
            vendor=NVIDIA,
            device=int(profile.gpu(index, "pci.id"), 16) >> 16,
            class_code=GPU_CLASS if profile.data_centre else VGA_CLASS,
            driver="nvidia",
        )


def _nics(profile: Profile, names: tuple[str, ...], layer: str) -> Iterator[_Endpoint]:
    """Yield one NIC beside each GPU, or every second or fourth GPU if there are fewer."""
    for number, name in enumerate(names):
        beside = number * profile.count // len(names)
        domain = int(profile.gpu(beside, "busid")[:4], 16)
        yield _nic(name, _path(profile, beside), domain, layer)


def _nic(name: str, path: tuple[int, ...], domain: int, layer: str) -> _Endpoint:
    return _Endpoint(
        name=name,
        path=path,
        domain=domain,
        bus_id="",
        vendor=MELLANOX,
        device=CONNECTX7,
        class_code=INFINIBAND_CLASS if layer == "InfiniBand" else ETHERNET_CLASS,
        driver="mlx5_core",
    )


def _ethernet(profile: Profile) -> _Endpoint:
    """Return the default route's device, on its own root port on the first socket."""
    virtual = bool(profile.text("host.virtual"))
    return _Endpoint(
        name="eth0",
        path=(_path(profile, 0)[0], 90, 0, 0),
        domain=0,
        bus_id="0000:00:05.0" if virtual else "",
        vendor=INTEL,
        device=E810,
        class_code=ETHERNET_CLASS,
        driver="ice",
    )


def _path(profile: Profile, index: int) -> tuple[int, ...]:
    return tuple(map(int, profile.gpu(index, "path").split(".")))


def _flat(endpoints: list[_Endpoint]) -> Iterator[tuple[str, Function]]:
    """
    Yield a virtual machine's functions, which are all on its one bus, without bridges and ACS.
    """
    for each in endpoints:
        yield each.name, Function(
            each.bus_id, each.vendor, each.device, each.class_code, -1, "pci0000:00",
            driver=each.driver,
        )  # fmt: skip


def _place(slots: _Slots, endpoints: list[_Endpoint], nvswitches: int) -> None:
    sharing = Counter((each.domain, each.path) for each in endpoints)
    roots: dict[tuple[int, ...], int] = {}
    above: dict[tuple[int, ...], tuple[str, ...]] = {}
    for each in endpoints:
        bridge = (each.domain, *each.path[:2])
        if bridge not in roots:
            near = int(each.bus_id[5:7], 16) if each.bus_id else 0xE8
            roots[bridge] = slots.bus(each.domain, max(near - 4, 0))
        root = f"pci{each.domain:04x}:{roots[bridge]:02x}"
        switch = (each.domain, *each.path)
        if switch not in above:
            port = _root_port(slots, root, each.path, above)
            shared = sharing[each.domain, each.path] > 1
            above[switch] = (port, _upstream(slots, root, port)) if shared else (port,)
        bridges = above[switch]
        if len(bridges) > 1:
            bridges = (*bridges, _downstream(slots, root, bridges))
        bus_id = each.bus_id
        if not bus_id:
            bus_id = f"{each.domain:04x}:{slots.bus(each.domain, roots[bridge] + 1):02x}:00.0"
        slots.functions[each.name] = Function(
            bus_id, each.vendor, each.device, each.class_code, each.path[0], root, bridges,
            each.driver,
        )  # fmt: skip
    _nvswitches(slots, nvswitches)


def _root_port(
    slots: _Slots, root: str, path: tuple[int, ...], above: dict[tuple[int, ...], tuple[str, ...]]
) -> str:
    """Return the port of this path's TREE, created unless another path of the tree has it."""
    domain = int(root[3:7], 16)
    for known, bridges in above.items():
        if known[:4] == (domain, *path[:3]):
            return bridges[0]
    used = sum(
        function.root == root and not function.above for function in slots.functions.values()
    )
    bus_id = f"{root[3:]}:{used + 1:02x}.0"
    _bridge(slots, bus_id, root, ())
    return bus_id


def _upstream(slots: _Slots, root: str, port: str) -> str:
    """Return a switch's upstream port, which has no ACS, because no traffic returns to its side."""
    domain = int(root[3:7], 16)
    bus_id = f"{root[3:7]}:{slots.bus(domain, int(root[8:], 16) + 1):02x}:00.0"
    _bridge(slots, bus_id, root, (port,), acs=None)
    return bus_id


def _downstream(slots: _Slots, root: str, above: tuple[str, ...]) -> str:
    """Return a new downstream port of a switch; they share the bus below the upstream port."""
    domain = int(root[3:7], 16)
    beside = [each.bus_id for each in slots.functions.values() if each.above == above]
    bridges = [each for each in beside if slots.functions[each].class_code == BRIDGE_CLASS]
    bus = int(bridges[0][5:7], 16) if bridges else slots.bus(domain, int(root[8:], 16) + 1)
    bus_id = f"{root[3:7]}:{bus:02x}:{len(bridges):02x}.0"
    _bridge(slots, bus_id, root, above)
    return bus_id


def _nvswitches(slots: _Slots, count: int) -> None:
    if not count:
        return
    root = f"pci0000:{slots.bus(0, FIRST_NVSWITCH_BUS - 4):02x}"
    _bridge(slots, f"{root[3:]}:01.0", root, ())
    for number in range(count):
        slots.functions[f"switch{number}"] = Function(
            f"0000:{FIRST_NVSWITCH_BUS + number:02x}:00.0", NVIDIA, 0, OTHER_BRIDGE_CLASS, 0, root,
            (f"{root[3:]}:01.0",), "nvidia-nvswitch",
        )  # fmt: skip


def _bridge(
    slots: _Slots, bus_id: str, root: str, above: tuple[str, ...], acs: int | None = ACS_QUIET
) -> None:
    """Add a root port or, below one, a port of a switch."""
    vendor, device = (BROADCOM, SWITCH_PORT) if above else (INTEL, ROOT_PORT)
    slots.functions[bus_id] = Function(
        bus_id, vendor, device, BRIDGE_CLASS, -1, root, above, "pcieport", acs
    )
