"""Read a hardware profile, from the same lines as the simulated NVML.

`lab/nvml/profile.c` has the same rule: of all matching lines, the last one counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lab import nvml

# Architectures in NVML's numbers (nvmlDeviceArchitecture_t, nvml.h).
TURING, AMPERE, ADA, HOPPER, BLACKWELL = 6, 7, 8, 9, 10


@dataclass(frozen=True)
class Profile:
    """One kind of hardware, by its file in lab/profiles/: `Profile.of("h100x8")`."""

    name: str
    lines: tuple[tuple[str, str], ...]  # (key, value), in the file's order

    @classmethod
    def of(cls, name: str) -> Profile:
        """Return the profile `name`. Raises `FleetError` if there is none."""
        return cls(name, tuple(_pairs(nvml.profile(name).read_text().splitlines())))

    def of_node(self, node: str) -> Profile:
        """
        Return the profile with UUIDs of its own for a node, so that all GPUs of a lab are
        different.
        """
        own = hashlib.sha256(node.encode()).hexdigest()[:4]
        lines = (
            (key, re.sub(r"(?<=^GPU-.{8}-)\w{4}", own, value) if key.endswith(".uuid") else value)
            for key, value in self.lines
        )
        return Profile(self.name, tuple(lines))

    def text(self, key: str, otherwise: str = "") -> str:
        """Return a value of the whole machine."""
        return self._values.get(key, (0, ""))[1] or otherwise

    def number(self, key: str, otherwise: int = 0) -> int:
        """Return a number of the whole machine, decimal or hexadecimal."""
        return int(self.text(key) or str(otherwise), 0)

    def gpu(self, index: int, key: str, otherwise: str = "") -> str:
        """Return a value of one GPU, from its own line or from the line for all GPUs."""
        lines = (self._values.get(f"gpu.{which}.{key}", (-1, "")) for which in (index, "*"))
        return max(lines)[1] or otherwise

    @property
    def count(self) -> int:
        """Return the machine's number of GPUs."""
        return self.number("count")

    @property
    def driver(self) -> str:
        """Return the driver's version, for example "570.124.06"."""
        return self.text("system.driver")

    @property
    def branch(self) -> int:
        """Return the driver's branch, for example 570."""
        return int(self.driver.partition(".")[0])

    @property
    def architecture(self) -> int:
        """Return NVML's number of the first GPU's architecture."""
        return int(self.gpu(0, "arch"))

    @property
    def data_centre(self) -> bool:
        """Return whether the boards are made for servers; GeForce is brand 5."""
        return self.gpu(0, "brand") != "5"

    @property
    def contains_errors(self) -> bool:
        """
        Return whether an uncorrectable memory error ends only the program it hits.

        NVIDIA calls this "error containment". GA100, GH100 and GB10x have it, and GA10x and AD10x
        do not (NVIDIA GPU Memory Error Management). So all boards with HBM have it.
        """
        return self.remaps and int(self.gpu(0, "mem.bus_width")) >= 4096

    @property
    def remaps(self) -> bool:
        """Return whether the boards remap rows (Ampere and later); others retire pages."""
        return bool(self.gpu(0, "remap.unc"))

    @property
    def retires(self) -> bool:
        """Return whether the boards retire pages (Volta, Turing)."""
        return bool(self.gpu(0, "retired.dbe"))

    @property
    def has_ecc(self) -> bool:
        """Return whether memory errors are counted, that is, ECC is on."""
        return self.gpu(0, "ecc.mode") == "1"

    @property
    def linked(self) -> bool:
        """Return whether NVLink joins the GPUs."""
        return bool(self.gpu(0, "nvlink.to"))

    @property
    def switched(self) -> bool:
        """Return whether all links end at NVSwitches."""
        return self.gpu(0, "nvlink.to") == "switch"

    @property
    def managed(self) -> bool:
        """Return whether this machine's own fabric manager runs the switches, unlike in a rack."""
        return self.switched and not self.gpu(0, "platform.chassis")

    @property
    def registers(self) -> bool:
        """
        Return whether the GPUs register with an NVLink fabric: Hopper and later, behind switches.
        """
        return self.switched and self.gpu(0, "fabric.state") == "3"

    @property
    def pci_switches(self) -> int:
        """Return the number of NVSwitches that are PCI functions, which is 0 from NVLink 5 on."""
        return int(self.gpu(0, "nvlink.switches") or 0) if self.managed else 0

    @cached_property
    def _values(self) -> dict[str, tuple[int, str]]:
        return {key: (place, value) for place, (key, value) in enumerate(self.lines)}


def _pairs(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        if "=" in line and not line.lstrip().startswith("#"):
            key, _, value = line.partition("=")
            yield key.strip(), value.strip()


def expanded(ranges: str) -> set[int]:
    """Return the numbers of a list in Linux' format: "0-1,8" is {0, 1, 8}."""
    numbers: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
