"""
Define which numbers of a probe are compared, the allowed differences, and the severities. Pure.

`checks/outliers.py` compares the numbers in the tables `JUDGED_OF_GPU` and `JUDGED_OF_NODE`.
`checks/other_facts.py` lists all other numbers in a probe.

A difference that comes from the design, the environment or the operator's choice is a remark: for
example, more memory, or a GPU that is warmer while it idles. Only missing GPU memory is `block`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpufleet.checks.finding import Severity
from gpufleet.checks.probe_facts import GpuReading, Reading, is_missing, lookup

GIB = 1 << 30
FULL = 0  # nvmlPstates_t: P0
UP = "up"  # the operstate of a network device that has a link

INFO, WARN, BLOCK = Severity.INFO, Severity.WARN, Severity.BLOCK


class Reference(Enum):
    """What a value is compared with. The first reference that applies decides."""

    MATES = "the node's other GPUs of its model"
    SLOT = "sibling nodes' GPUs in the same slot"
    TWINS = "sibling nodes with the same hardware"
    CATALOGUE = "the value that CUDA reports for this product"
    LIMIT = "a limit"


@dataclass(frozen=True)
class Step:
    """
    A severity, with the difference from which it applies.

    The step applies if the difference is more than `share` of the usual value, and more than
    `least`. `least` has the unit of the number that is compared.
    """

    severity: Severity
    share: float = 0.0
    least: float = 0.0

    def allowed(self, usual: float) -> float:
        """Return the largest difference for which this step does not yet apply."""
        return max(self.share * abs(usual), self.least)


@dataclass(frozen=True)
class Fact:
    """
    One number that is compared.

    - `path` is the position of the number in the probe's document.
    - `words` is the text for reports, with `{}` for the value.
    - `read` is a function that reads the number from a GPU. For a node, it returns the number of
      each
    device ("" is the whole node).
    - `low` and `high` are the steps for values that are too low and too high, the mildest step
      first.
    Without steps, a difference in that direction is no problem.
    - `spread` is True if the number differs between healthy GPUs. The mildest step then applies to
      the
    difference from the nearest other GPU.
    - `names` is True if the value is a name. Then any different value is an outlier.
    - `among` returns a value for a GPU. Only GPUs with the same value are compared. A GPU for which
      it
    returns None is not compared.
    - `asked_by` is another check that needs the number. That check reports it if the number is
      missing.
    """

    path: str
    words: str
    read: Callable[[Any], Any]
    against: tuple[Reference, ...]
    source: str
    low: tuple[Step, ...] = ()
    high: tuple[Step, ...] = ()
    show: Callable[[Any], str] = str
    among: Callable[[GpuReading], Any] = lambda _: ""
    spread: bool = False
    names: bool = False
    asked_by: str | None = None


def _told(*path: str) -> Callable[[GpuReading], Any]:
    return lambda gpu: lookup(gpu.facts, path, None, None)


def _numa(key: str) -> Callable[[GpuReading], Any]:
    return lambda gpu: lookup(gpu.node.document["numa"][gpu.at], (key,), None, None)


def _nvlink_count(gpu: GpuReading) -> Any:
    return lookup(gpu.node.document["nvlink"][gpu.at], ("count",), None, None)


def _is_idle(gpu: GpuReading) -> Any:
    """
    Return "" for an idle GPU, and None for a busy GPU, on which heat is not a symptom of a fault.
    """
    return "" if gpu.known("processes") == [] else None


def _idle_at_full_clocks(gpu: GpuReading) -> Any:
    """
    Return "" for an idle GPU at full clocks, or else None, because the PCIe link of any other GPU
    may save power.
    """
    return _is_idle(gpu) if gpu.known("performance_state") == FULL else None


def _above_0(name: str) -> Callable[[GpuReading], Any]:
    """
    Return a reader of a number. It returns None for a number below 1, which another check reports.
    """
    return lambda gpu: value if (value := gpu.known(name, default=0)) > 0 else None


def _part(gpu: GpuReading) -> Any:
    part = gpu.known("part", default="")
    return str(part)


def _ecc(gpu: GpuReading) -> Any:
    return gpu.known("ecc_mode", "current", default="")


def _celsius(value: Any) -> str:
    return f"{value:.0f} °C"


def _watts(value: Any) -> str:
    return f"{value / 1000:.0f} W"


def _mhz(value: Any) -> str:
    return f"{value} MHz"


def _memory(value: Any) -> str:
    return f"{value / GIB:.1f} GiB"


def _mib(value: Any) -> str:
    return f"{value / 1024:.1f} GiB"


_MATES, _SLOT, _TWINS = (Reference.MATES,), (Reference.SLOT,), (Reference.TWINS,)
_MATES_AND_TWINS = (Reference.MATES, Reference.TWINS)
_LESS = (Step(WARN),)
_OTHER = (Step(INFO),)
_EXACT = "equal for all boards of one product; no tolerance"
_BOARD = "part of a board's design; no tolerance; compared only within one part number"
# On GDDR, ECC takes 1/16 of a GPU's memory, so only GPUs with the same ECC mode are compared. The
# memory that drivers take differs by less than 1 % between branches (recordings). Xid 168 means
# "reduced memory".
_MEMORY = "drivers of two branches report totals within 2 % of each other"
# On SXM boards, the same air cools two rows of GPUs one after the other, so a GPU is compared with
# the nearest value.
_HEAT = "gpufleet's own limit, because no vendor publishes one"

JUDGED_OF_GPU: tuple[Fact, ...] = (
    Fact(
        "gpus.*.memory.total", "{} of memory", _told("memory", "total"),
        (*_MATES_AND_TWINS, Reference.CATALOGUE), _MEMORY,
        low=(Step(WARN, 0.02), Step(BLOCK, 0.10)), high=(Step(INFO, 0.02),),
        show=_memory, among=_ecc, asked_by="gpu-answers",
    ),
    Fact(
        "gpus.*.pcie_generation", "PCIe generation {} at full clocks", _above_0("pcie_generation"),
        _MATES, "at full clocks (P0) a link does not save power; no tolerance",
        low=_LESS, among=_idle_at_full_clocks, asked_by="pcie-generation",
    ),
    Fact(
        "gpus.*.pcie_generation_max", "at most PCIe generation {}", _above_0("pcie_generation_max"),
        (Reference.MATES, Reference.SLOT), _EXACT, low=_LESS, asked_by="pcie-generation",
    ),
    Fact(
        "gpus.*.pcie_width_max", "at most {} PCIe lanes", _above_0("pcie_width_max"),
        (Reference.MATES, Reference.SLOT), _EXACT, low=_LESS,
    ),
    Fact(
        "gpus.*.temperature_celsius", "{} while the GPU "
        "idles", _told("temperature_celsius"), _MATES,
        _HEAT, low=(Step(INFO, least=4),), high=(Step(INFO, least=4), Step(WARN, least=20)),
        show=_celsius, among=_is_idle, spread=True, asked_by="temperature",
    ),
    Fact(
        "gpus.*.temperature_memory_celsius", "{} in its memory while the GPU idles",
        _told("temperature_memory_celsius"), _MATES, _HEAT,
        low=(Step(INFO, least=4),), high=(Step(INFO, least=4), Step(WARN, least=20)),
        show=_celsius, among=_is_idle, spread=True, asked_by="temperature",
    ),
    Fact(
        "gpus.*.power_draw_milliwatts", "{} while the GPU "
        "idles", _told("power_draw_milliwatts"), _MATES,
        _HEAT, low=(Step(INFO, 0.25, 10_000),),
        high=(Step(INFO, 0.25, 10_000), Step(WARN, 1.0, 30_000)),
        show=_watts, among=_is_idle, spread=True,
    ),
    Fact(
        "gpus.*.power_limit_milliwatts", "a power limit of {}", _told("power_limit_milliwatts"),
        _MATES, "1 W, because NVML rounds; the check power-limit judges lower values",
        high=(Step(INFO, least=1000),), show=_watts, asked_by="power-limit",
        among=lambda gpu: None if gpu.node.settings.gpus.power_limit_watts else _part(gpu),
    ),
    Fact(
        "gpus.*.power_default_limit_milliwatts", "a power limit of {} as delivered",
        _told("power_default_limit_milliwatts"), _MATES_AND_TWINS, _BOARD, asked_by="power-limit",
        low=(Step(WARN, least=1000),), high=(Step(INFO, least=1000),), show=_watts, among=_part,
    ),
    Fact(
        "gpus.*.power_limits_milliwatts.max", "{} as the highest power limit",
        _told("power_limits_milliwatts", "max"), _MATES_AND_TWINS, _BOARD,
        low=(Step(WARN, least=1000),), high=(Step(INFO, least=1000),), show=_watts, among=_part,
    ),
    Fact(
        "gpus.*.power_limits_milliwatts.min", "{} as the lowest power limit",
        _told("power_limits_milliwatts", "min"), _MATES, _BOARD,
        low=(Step(INFO, least=1000),), high=(Step(INFO, least=1000),), show=_watts, among=_part,
    ),
    *(
        Fact(
            f"gpus.*.temperature_{limit}_celsius", f"{{}} as its {limit.replace('_', ' ')} limit",
            _told(f"temperature_{limit}_celsius"), _MATES, _BOARD,
            low=_OTHER, high=_OTHER, show=_celsius, among=_part, asked_by="temperature",
        )
        for limit in ("shutdown", "slowdown", "memory_max", "gpu_max")
    ),
    *(
        Fact(
            f"gpus.*.{fact}.{domain}", f"{{}} as its {words} {called} clock", _told(fact, domain),
            _MATES, _BOARD, low=_LESS, high=_OTHER, show=_mhz, among=_part,
        )
        for fact, words in (
            ("clocks_max_mhz", "highest"), ("default_application_clocks_mhz", "delivered"),
        )
        for domain, called in (("sm", "SM"), ("memory", "memory"))
    ),
    Fact(
        "gpus.*.c2c_links", "{} C2C links to its CPU", _told("c2c_links"), _MATES_AND_TWINS,
        _EXACT, low=_LESS,
    ),
    Fact(
        "nvlink.*.count", "{} NVLinks on its board", _nvlink_count, _MATES_AND_TWINS,
        _EXACT, low=_LESS, asked_by="nvlink-links",
    ),
    Fact(
        "gpus.*.addressing_mode", "addressing mode {}", _told("addressing_mode"),
        _MATES_AND_TWINS, "the driver's choice for all GPUs of a node", low=_OTHER, names=True,
    ),
    Fact(
        "numa.*.node", "NUMA node {}", _numa("node"), _SLOT,
        "the board's wiring; no tolerance", low=(Step(WARN),), names=True,
    ),
    Fact(
        "numa.*.gpu_memory_node", "NUMA node {} for its own memory", _numa("gpu_memory_node"),
        _SLOT, "Linux numbers these nodes in the order in which the driver loads",
        low=_OTHER, names=True,
    ),
)  # fmt: skip


def _of_node(*path: str) -> Callable[[Reading], Mapping[str, Any]]:
    def read(node: Reading) -> Mapping[str, Any]:
        return {"": lookup(node.document, path, None, None)}

    return read


def _of_net(key: str, *, with_link: bool) -> Callable[[Reading], Mapping[str, Any]]:
    """Return a reader of one number of each network device that belongs to a PCI function."""

    def read(node: Reading) -> Mapping[str, Any]:
        return {
            device["name"]: lookup(device, (key,), None, None)
            for device in node.known("nics", "net", default=[])
            if not is_missing(device["pci"]) and (not with_link or device["state"] == UP)
        }

    return read


def _nic_numa(node: Reading) -> Mapping[str, Any]:
    devices = [
        *node.known("nics", "net", default=[]),
        *node.known("nics", "infiniband", default=[]),
    ]
    return {each["name"]: lookup(each, ("pci", "numa_node"), None, None) for each in devices}


def _disk_sizes(node: Reading) -> Mapping[str, Any]:
    disks = node.known("system", "disks", default={})
    return {path: lookup(disk, ("size_mib",), None, None) for path, disk in disks.items()}


def _clock_error(node: Reading) -> Mapping[str, Any]:
    """
    Return the largest possible error of the clock, or None if the clock is not synchronised. The
    check `clock` reports that.
    """
    if not node.known("system", "clock", "synchronized"):
        return {"": None}
    return {"": node.known("system", "clock", "max_error_us")}


def _slots(node: Reading) -> Mapping[str, Any]:
    """Return the PCI addresses of the GPUs as one text, or None if an address is unknown."""
    places = [gpu.known("pci", "bus_id") for gpu in node.gpus]
    if None in places or node.silent_gpus or not places:
        return {"": None}
    return {"": ", ".join(sorted(map(str, places)))}


def _distances(node: Reading) -> Mapping[str, Any]:
    """Return the PCIe distance (10 PIX ... 50 SYS) of each pair of GPUs, by their PCI addresses."""
    found: dict[str, Any] = {}
    for one in node.gpus:
        for other in node.gpus:
            ends = [gpu.known("pci", "bus_id") for gpu in (one, other)]
            if one.at < other.at and None not in ends:
                value = node.known("pcie", one.at, other.at)
                found["-".join(sorted(map(str, ends)))] = value
    return found


_DISTANCES = {0: "one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

JUDGED_OF_NODE: tuple[Fact, ...] = (
    Fact(
        "cpus", "{} CPUs", _of_node("cpus"), _TWINS, _EXACT, low=_LESS, high=_OTHER,
    ),
    Fact(
        "memory_mib", "{} of memory", _of_node("memory_mib"), _TWINS,
        "2 %, because kernels reserve different amounts; one of 32 DIMMs is 3 % of the memory",
        low=(Step(WARN, 0.02),), high=(Step(INFO, 0.02),), show=_mib,
    ),
    Fact(
        "pci.*.bus_id", "GPUs at {}", _slots, _TWINS,
        "one more PCIe device renumbers the buses behind it", low=_OTHER, names=True,
    ),
    Fact(
        "pcie.*.*", "PCIe distance {}", _distances, _TWINS,
        "the board's wiring; no tolerance", low=_OTHER, high=_LESS,
        show=lambda value: _DISTANCES.get(value, str(value)),
    ),
    Fact(
        "nics.net.*.speed", "{}", _of_net("speed", with_link=True), _TWINS,
        "the negotiated speed; no tolerance", low=_LESS, high=_OTHER,
        show=lambda value: f"{value} Mbit/s",
    ),
    Fact(
        "nics.net.*.mtu", "an MTU of {}", _of_net("mtu", with_link=False), _TWINS,
        "a packet that is larger than the other end accepts is lost", low=_LESS, high=_LESS,
    ),
    Fact(
        "nics.*.pci.numa_node", "NUMA node {}", _nic_numa, _TWINS,
        "a card may be in a different slot", low=_OTHER, names=True,
    ),
    Fact(
        "system.disks.*.size_mib", "a disk of {}", _disk_sizes, _TWINS,
        "10 %, because disks of one class differ in size",
        low=(Step(INFO, 0.1),), high=(Step(INFO, 0.1),), show=_mib,
    ),
    Fact(
        "system.clock.max_error_us", "a clock that may be wrong by {}", _clock_error,
        (Reference.LIMIT,),
        # From one correction to the next, the kernel increases the possible error by 500 ppm
        # (MAXFREQ, linux/timex.h). systemd-timesyncd waits up to 2048 s, which makes 1.02 s.
        (
            "a clock drifts by up to 500 ppm over 2048 s, the longest interval of "
            "systemd-timesyncd; at four times that error systemd-timesyncd got no answer"
        ),
        high=(Step(INFO, least=1_100_000), Step(WARN, least=4_100_000)),
        show=lambda value: f"{value / 1e6:.1f} s",
    ),
)  # fmt: skip
