"""
Describe the links between a node's GPUs, and the tensor-parallel sizes that the links allow. Pure.

An `Interconnect` is built from a probe's document or from the matrix of `nvidia-smi topo -m`.
`gpufleet topology` (docs/plan/topology.md) prints it, with the warnings of `interconnect_warnings`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.formatting import ranges
from gpufleet.node.interconnect_warnings import named, warnings_of, words
from gpufleet.node.nic_affinity import nearest_by_class, nic_classes
from gpufleet.node.smi_topology import PCIE, TopoMatrix
from gpufleet.node.topology import LINK_UP, Node, islands, node_from_probe, nvlink_width, value_or

Pair = tuple[int, int]


@dataclass(frozen=True)
class Interconnect:
    """
    The GPUs of node `name` and the links between them.

    `classes` maps every pair (i < j) to its number of NVLinks, such as "NV18", or else to its PCIe
    distance, from "PIX" (nearest) to "SYS". `nics` has the PCIe class from each NIC to each GPU.
    `models` and `numa` do not have GPUs for which the source has no value. `mig` has the GPUs with
    MIG instances. `c2c` has the GPUs that are connected to their CPU by NVLink-C2C. `remarks` are
    sentences about problems that the source reports.
    """

    name: str
    gpus: tuple[int, ...]
    classes: Mapping[Pair, str]
    models: Mapping[int, str] = field(default_factory=dict)
    numa: Mapping[int, int] = field(default_factory=dict)
    nics: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    mig: frozenset[int] = frozenset()
    c2c: frozenset[int] = frozenset()
    remarks: tuple[str, ...] = ()

    @cached_property
    def nvlink(self) -> dict[Pair, int]:
        """
        Return the number of NVLinks of each pair that NVLink connects.

        GPUs with MIG instances are omitted.
        """
        return {
            pair: int(name[2:])
            for pair, name in self.classes.items()
            if name[:2] == "NV" and not self.mig & set(pair)
        }

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """
        Return groups of GPUs in which NVLink connects every pair. The largest group comes first.
        """
        return islands(self.gpus, self.nvlink)

    @cached_property
    def max_tp(self) -> int:
        """
        Return the largest tensor-parallel size that uses only NVLink, or 1 if there is no NVLink.

        The size is a power of two, because the number of a model's attention heads must be
        divisible by it.
        """
        largest = max(map(len, self.islands), default=1)
        return 1 << (largest.bit_length() - 1)

    @cached_property
    def tiers(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """
        Return groups of near GPUs for each PCIe class that occurs.

        All pairs of a group have the distance of the class, or are nearer. NVLink counts as the
        nearest. If there is no NVLink, replicas are placed within these groups.
        """
        return {
            tier: islands(
                self.gpus, {pair for pair, name in self.classes.items() if _rank(name) <= rank}
            )
            for rank, tier in enumerate(PCIE)
            if tier in self.classes.values()
        }

    @cached_property
    def nearest_nics(self) -> dict[int, list[tuple[str, str]]]:
        """Return each GPU's nearest NICs with their PCIe class."""
        return nearest_by_class(self.nics)

    @cached_property
    def why(self) -> str:
        """Return the reason for `max_tp` as a sentence."""
        if not self.gpus:
            return "no GPU answers"
        if self.max_tp == 1:
            if len(self.gpus) == 1:
                return "there is one GPU"
            return (
                "MIG instances have no peer access to each other"
                if self.mig
                else "no two GPUs have NVLink"
            )
        island = self.islands[0]
        size = len(island)
        less = f", and {self.max_tp} is the largest power of two that is not above {size}"
        return (
            f"GPUs {ranges(island)} are an NVLink island of {size} "
            f"({words(self.widths(island).values())}){less if self.max_tp < size else ''}"
        )

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the operator as sentences."""
        return (*self.remarks, *warnings_of(self))

    def widths(self, gpus: Iterable[int]) -> dict[Pair, int]:
        """Return the number of NVLinks of every pair among `gpus`."""
        return {pair: self.nvlink.get(pair, 0) for pair in combinations(sorted(gpus), 2)}

    def as_json(self) -> dict[str, Any]:
        """
        Return the document of `gpufleet topology --json`. docs/plan/topology.md describes its keys.
        """
        return {
            "node": self.name,
            "gpus": list(self.gpus),
            "islands": [list(island) for island in self.islands],
            "max_tp": self.max_tp,
            "why": self.why,
            "pairs": {f"{i}-{j}": name for (i, j), name in self.classes.items()},
            "tiers": {tier: [list(group) for group in self.tiers[tier]] for tier in self.tiers},
            "models": {str(gpu): model for gpu, model in self.models.items()},
            "numa": {str(gpu): node for gpu, node in self.numa.items()},
            "nics": {
                nic: {str(gpu): name for gpu, name in gpus.items()}
                for nic, gpus in self.nics.items()
            },
            "nearest_nics": {
                str(gpu): [{"nic": nic, "class": name} for nic, name in found]
                for gpu, found in self.nearest_nics.items()
            },
            "warnings": list(self.warnings),
        }


def from_matrix(name: str, matrix: TopoMatrix) -> Interconnect:
    """Return the interconnect of node `name` from a matrix of `nvidia-smi topo -m`."""
    return Interconnect(
        name=name,
        gpus=matrix.gpus,
        classes=matrix.classes,
        models=matrix.names,
        numa=matrix.numa,
        nics=matrix.nics,
        mig=matrix.mig,
        # A GPU's memory is a NUMA node only if the CPU reaches the GPU by C2C.
        c2c=frozenset(matrix.gpu_memory) | _superchips(matrix.names),
        remarks=matrix.remarks,
    )


def from_probe(name: str, document: Mapping[str, Any]) -> Interconnect:
    """
    Return the interconnect of node `name` from its probe.

    Raises `FleetError` if the document has a different schema or is incomplete.
    """
    try:
        node = node_from_probe(name, document)
        nics = nic_classes(document)
        remarks = [
            *_gpus_without_answer(node, document),
            *_not_granted(node, document),
            *_one_sided(document),
        ]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise FleetError(
            f"{name}: the probe is incomplete ({type(error).__name__}: {error}): record it again "
            "with `gpufleet probe INVENTORY --json`"
        ) from None
    gpus = tuple(gpu.index for gpu in node.gpus)
    return Interconnect(
        name=name,
        gpus=gpus,
        classes={
            pair: f"NV{node.nvlink[pair]}" if pair in node.nvlink else node.pcie[pair]
            for pair in combinations(gpus, 2)
        },
        models={gpu.index: gpu.name for gpu in node.gpus},
        numa={gpu.index: gpu.numa_node for gpu in node.gpus if gpu.numa_node is not None},
        nics={
            nic: {gpu: found[gpu] for gpu in gpus if gpu in found} for nic, found in nics.items()
        },
        mig=frozenset(
            gpu
            for gpu in gpus
            if value_or(value_or(document["gpus"][gpu].get("mig_mode"), {}).get("current")) == 1
        ),
        c2c=_superchips({gpu.index: gpu.name for gpu in node.gpus}),
        remarks=tuple(remarks),
    )


def _superchips(models: Mapping[int, str]) -> frozenset[int]:
    """Return the GPUs that share a board with a Grace CPU: GH200, GB200, GB300, GB10."""
    return frozenset(gpu for gpu, name in models.items() if re.search(r"\bG[HB]\d{2,3}\b", name))


def _rank(name: str) -> int:
    return PCIE.index(name) if name in PCIE else -1


def _gpus_without_answer(node: Node, document: Mapping[str, Any]) -> Iterator[str]:
    """
    Yield sentences about GPUs that are missing in the topology.

    `gpufleet check` reports the remedies.
    """
    init = document["driver"]["init"]
    if init != "ok":
        why = init["missing"].replace("_", " ")
        yield f"no GPU answers, because the driver does not start ({why}): see `gpufleet check`"
    answering = {gpu.index for gpu in node.gpus}
    for facts in document["gpus"]:
        if facts["index"] not in answering:
            why = facts.get("missing", "some of its facts are missing").replace("_", " ")
            yield (
                f"GPU {facts['index']} does not answer ({why}), so it is in no NVLink island: see "
                "`gpufleet check`"
            )
    unread = [
        gpu.index
        for gpu in node.gpus
        if any(
            value_or(document["pcie"][gpu.index][other]) is None
            for other in answering - {gpu.index}
        )
    ]
    if unread:
        yield (
            f"the PCIe distance of {named(unread)} to other GPUs could not be read. gpufleet "
            "treats an unknown distance as SYS, the farthest"
        )


def _not_granted(node: Node, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about GPUs with active NVLinks but without the driver's peer access."""
    gpus = [gpu.index for gpu in node.gpus]
    refused = [
        pair
        for pair in combinations(gpus, 2)
        if pair not in node.nvlink and nvlink_width(document, *pair)
    ]
    if refused:
        between = ranges({gpu for pair in refused for gpu in pair})
        yield (
            f"NVLinks between GPUs {between} are up, but the driver allows no peer access over "
            "these links, so they are not used: check that nvidia-fabricmanager runs in the same "
            "version as the driver, and that MIG mode is off"
        )


def _one_sided(document: Mapping[str, Any]) -> Iterator[str]:
    """
    Yield sentences about directly wired pairs whose two ends report different numbers of links.
    """
    at = {
        value_or(gpu.get("pci"), {}).get("bus_id"): place
        for place, gpu in enumerate(document["gpus"])
        if "missing" not in gpu
    }
    seen = Counter(
        (place, at[link["remote_pci"]])
        for place in at.values()
        for link in value_or(value_or(document["nvlink"][place], {}).get("links"), [])
        if link["state"] in LINK_UP and value_or(link["remote_pci"]) in at
    )
    for i, j in combinations(sorted(at.values()), 2):
        if seen[i, j] != seen[j, i]:
            few, many = sorted((i, j), key=lambda end: seen[end, i + j - end])
            yield (
                f"GPU {many} reports {seen[many, few]} NVLinks to GPU {few}, but GPU {few} reports "
                f"{seen[few, many]} to GPU {many}. gpufleet uses the lower number. Reset both "
                "GPUs or reboot the node"
            )
