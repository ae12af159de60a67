"""A recording of a real machine: refused where there is none, and without what identifies it.

Whoever records a machine publishes the recording. So serial numbers, UUIDs, names, MAC and network
addresses are replaced, each by the same stand-in wherever it occurs: that two GPUs differ, or that
a link's other end is a certain GPU, still shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.node.topology import value_or

# What identifies a machine, by the key that holds it anywhere in the document, and the stand-in
# for the n-th of its kind. Addresses are those that RFC 5737 and RFC 3849 keep for documents.
STAND_INS: dict[str, Callable[[int], str]] = {
    "hostname": lambda n: f"gpu-{n:02d}",
    "machine_id": lambda n: f"{n:032x}",
    "boot_id": lambda n: f"00000000-0000-4000-8000-{n:012x}",
    "uuid": lambda n: f"GPU-00000000-0000-4000-8000-{n:012x}",
    "cluster_uuid": lambda n: f"{n:032x}",
    "serial": lambda n: f"{n:013d}",
    "chassis_serial": lambda n: f"{n:013d}",
    "ib_guid": lambda n: f"{n:032x}",
    "mac": lambda n: f"02:00:00:00:{n >> 8:02x}:{n & 255:02x}",
    "ipv4": lambda n: f"192.0.2.{n % 256}",
    "networks": lambda n: f"192.0.2.{n % 256}/24",
    "ipv6": lambda n: f"2001:db8::{n:x}",
}

# Values that say "none" and identify nothing.
NOBODY = re.compile(r"(GPU-)?[0:.-]*")

# A kernel's command line names disks, consoles, servers, sometimes secrets: only this is kept.
ABOUT_GPUS = re.compile(r"(?<!\S)(?:iommu|intel_iommu|amd_iommu|pci|nvidia\S*|nouveau\S*)=\S*")

# In running text a shorter name would match by chance.
SHORTEST_IN_TEXT = 4

# Where these lie in running text: the kernel's command line, log lines, the module's signer.
ADDRESSES = (
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)"), "192.0.2.1"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE), "02:00:00:00:00:01"),
    (
        re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE),
        "00000000-0000-4000-8000-000000000000",
    ),
)


def with_gpus(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document; raises `FleetError` if the driver and its GPUs do not answer."""
    if value_or(document["driver"]["version"]) and any("name" in gpu for gpu in document["gpus"]):
        return document
    init = document["driver"]["init"]
    why = "the driver lists none" if init == "ok" else init["missing"].replace("_", " ")
    raise FleetError(
        f"nothing was recorded: no NVIDIA GPU answers on this machine ({why}). Run it on a machine "
        "where `nvidia-smi` lists one"
    )


def name(document: Mapping[str, Any]) -> str:
    """
    Return what a recording is called: its GPUs and its driver.

    >>> name({"driver": {"version": "570.1"}, "gpus": [{"name": "NVIDIA H200"}] * 8})
    'nvidia-h200-x8-570.1'
    """
    names = [gpu["name"] for gpu in document["gpus"] if "name" in gpu]
    slug = re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-")
    return f"{slug}-x{len(names)}-{document['driver']['version']}"


def anonymous(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with stand-ins for everything that identifies the machine."""
    stand_ins: dict[str, str] = {}
    for kind, stand_in in STAND_INS.items():
        values = {value for key, value in _texts(document) if key == kind}
        # By length first: stand-ins keep their numbers when they are replaced again.
        ordered = sorted(values - set(stand_ins), key=lambda value: (len(value), value))
        numbered = [value for value in ordered if not NOBODY.fullmatch(value)]
        stand_ins |= {value: stand_in(n) for n, value in enumerate(numbered, 1)}
    replaced: dict[str, Any] = _replaced(dict(document), None, stand_ins)
    cmdline = value_or(replaced["system"]["cmdline"])
    if cmdline is not None:
        replaced["system"]["cmdline"] = " ".join(ABOUT_GPUS.findall(cmdline))
    # What is served there, under which names and with which arguments, is nobody's business.
    return {**replaced, "stages": [], "models": {}}


def _texts(value: Any, key: str | None = None) -> Iterator[tuple[str | None, str]]:
    if isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _texts(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str):
        yield key, value


def _replaced(value: Any, key: str | None, stand_ins: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {inner: _replaced(item, inner, stand_ins) for inner, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, key, stand_ins) for item in value]
    if not isinstance(value, str):
        return value
    if value in stand_ins:
        return stand_ins[value]
    if key in STAND_INS:
        return value
    for old in sorted(stand_ins, key=len, reverse=True):
        if len(old) >= SHORTEST_IN_TEXT:
            value = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w-])", stand_ins[old], value)
    for pattern, stand_in in ADDRESSES if " " in value else ():
        value = pattern.sub(stand_in, value)
    return value
