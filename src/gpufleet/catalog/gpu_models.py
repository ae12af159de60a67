"""Return the memory that CUDA reports for a GPU, and its compute capability, by the GPU's name.

vLLM's memory budget is a share of the total memory that CUDA reports. This total is less than the
memory in the product's name (80 GB) and less than NVML's total (79.65 GiB), because the driver
reserves a part. `data/gpus.json` has measured totals, each with its source. An unknown name is
refused. It is never replaced with a similar name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpufleet.errors import FleetError

_DATA = Path(__file__).with_name("data") / "gpus.json"

LOWEST_SHARE = 0.97
"""
The lowest ratio of CUDA's total to NVML's total in the catalogue. A T4 has 14.56 of 15.00 GiB.
"""


@dataclass(frozen=True)
class Card:
    """One GPU model."""

    name: str
    """The name for `--gpu`."""
    memory_gib: float
    """The total memory that CUDA reports."""
    compute_capability: tuple[int, int]
    products: tuple[str, ...]
    """NVML's names of the GPU."""
    source: str
    """The source of the total memory."""
    aliases: tuple[str, ...] = ()
    """Other names that `--gpu` accepts."""
    shares_name: bool = False
    """Whether NVML gives the same name to cards with different memory."""


_WITH_SIZE = re.compile(r"[ -]\d+ ?GB$", re.IGNORECASE)
_COUNTED = re.compile(r"(?:(?P<first>\d+)\s*[x*]\s*)?(?P<name>.+?)(?:\s*[x*:]\s*(?P<last>\d+))?")


_OTHER_MAKER = re.compile(
    r"(?:amd|intel|google|aws|ascend|instinct|radeon|mi\d|rx[ -]?\d|gaudi|arc[ -]|max[ -]?1|tpu"
    r"|inferentia|trainium)",
    re.IGNORECASE,
)
"""Matches names of accelerators from vendors other than NVIDIA."""


def card(name: str) -> Card:
    """
    Return the GPU with this name. The name is the catalogue's or NVML's, in any case and with any
    separators.

    Raises `FleetError` with similar names if the name is unknown. Also raises `FleetError` if cards
    with different memory have this name.
    """
    found = _by_key().get(_key(name))
    if found and found.shares_name and _key(name) in map(_key, found.products):
        raise FleetError(
            f"--gpu {name}: there are cards of this name with different memory sizes: give "
            f"{found.name}, or --gpu-memory-gib with the GiB that CUDA reports"
        )
    if found:
        return found
    if (counted := _COUNTED.fullmatch(name)) and (one := _by_key().get(_key(counted["name"]))):
        raise FleetError(
            f"--gpu {name}: contains a number of GPUs and a name: write --gpu {one.name} --gpus "
            f"{counted['first'] or counted['last']}"
        )
    if _OTHER_MAKER.match(name):
        raise FleetError(
            f"--gpu {name}: is not a GPU of NVIDIA. gpufleet only plans and runs NVIDIA's GPUs, so "
            "its numbers would be wrong (`gpufleet size --gpu list` lists the known GPUs)"
        )
    cards = _cards()
    keys = {_key(one): one for one in cards}
    near = [keys[key] for key in difflib.get_close_matches(_key(name), keys, n=3, cutoff=0.5)]
    hint = f"similar names: {', '.join(near)}" if near else f"known GPUs: {', '.join(cards)}"
    raise FleetError(
        f"--gpu {name}: the memory of this GPU is unknown. Give a known GPU ({hint}; `gpufleet "
        "size --gpu list` lists all), or give --gpu-memory-gib with the GiB that CUDA reports "
        "(torch.cuda.mem_get_info()[1] / 2**30)"
    )


def namesakes(name: str) -> tuple[str, ...]:
    """
    Return the cards with different memory that may also be meant by a short name.

    >>> namesakes("A100"), namesakes("A100-80GB"), namesakes("H100")
    (('A100-40GB',), (), ())
    """
    found = _by_key().get(_key(name))
    if found is None or _key(name) != _key(found.name) or _WITH_SIZE.search(name):
        return ()
    return tuple(
        one.name
        for one in cards()
        if one is not found and _WITH_SIZE.sub("", one.name) == found.name
    )


def cuda_total_gib(product: str, nvml_bytes: int) -> float:
    """
    Return the total memory in GiB that CUDA reports for a GPU of a node, or a slightly lower value.

    `product` and `nvml_bytes` are NVML's name and NVML's total memory. If the catalogue does not
    have the product, or if the card or partition has less memory than in the catalogue, the result
    is NVML's total times `LOWEST_SHARE`. This is not more than CUDA's total.
    """
    found = product_card(product)
    if found and nvml_bytes / 2**30 >= found.memory_gib:
        return found.memory_gib
    return nvml_bytes / 2**30 * LOWEST_SHARE


def product_card(product: str) -> Card | None:
    """Return the GPU with NVML's name `product`, or None if the catalogue does not have it."""
    return _by_key().get(_key(product))


def cards() -> tuple[Card, ...]:
    """Return every GPU of the catalogue."""
    return tuple(_cards().values())


def names() -> tuple[str, ...]:
    """Return every name in the catalogue."""
    return tuple(_cards())


@cache
def _cards() -> Mapping[str, Card]:
    entries = json.loads(_DATA.read_text(encoding="utf-8"))["gpus"]
    return {
        name: Card(
            name,
            float(entry["memory_gib"]),
            (int(entry["compute_capability"][0]), int(entry["compute_capability"][1])),
            tuple(entry["products"]),
            entry["source"],
            tuple(entry.get("aliases", ())),
            entry.get("shares_name", False),
        )
        for name, entry in entries.items()
    }


@cache
def _by_key() -> Mapping[str, Card]:
    return {
        _key(name): one
        for one in _cards().values()
        for name in (one.name, *one.aliases, *one.products)
    }


def _key(name: str) -> str:
    """Return a name's key for comparison: letters and digits, without the vendor's name."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
