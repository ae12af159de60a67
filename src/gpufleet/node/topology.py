"""Describe the GPUs of a node and the NVLinks between them. Pure.

The module converts the document of `on_node/probe/probe.py` (docs/reference/probe.md) to values for
the planner. A GPU that does not answer is not in `Node.gpus`. The checks report such GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from gpufleet.errors import FleetError
from gpufleet.node.cordon import Cordon, cordon_of
from gpufleet.node.probe_document import document_problem
from gpufleet.remote.answer_forms import refuse_malformed

# The values of nvmlGpuTopologyLevel_t (nvml.h), with the classes of `nvidia-smi topo -m`. Two GPUs
# on one board (internal, 0) are as near as two GPUs behind one switch.
PCIE_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

# nvmlIntNvLinkDeviceType_t, nvml.h.
REMOTE_GPU = 0
REMOTE_CPU = 1  # POWER9, Grace
REMOTE_SWITCH = 2

# Values of nvmlEnableState_t that nvmlDeviceGetNvLinkState returns. An idle link is asleep to save
# power. A third value means "active, traffic disabled", and such a link cannot be used. So every
# state except these two counts as down.
LINK_ACTIVE = 1
LINK_ASLEEP = 2
LINK_UP = (LINK_ACTIVE, LINK_ASLEEP)
P2P_OK = 0  # nvmlGpuP2PStatus_t

FABRIC_COMPLETED = 3  # nvmlGpuFabricState_t: the GPU has joined


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` is NVML's index, and `uuid` is the value for CUDA_VISIBLE_DEVICES."""

    index: int
    uuid: str
    name: str
    bus_id: str  # as sysfs writes it: 0000:18:00.0
    memory_mib: int
    compute_capability: tuple[int, int]
    numa_node: int | None  # of the CPUs next to it; None: unknown, or the node has but one


class Domain(NamedTuple):
    """
    A group of GPUs that NVLink connects across nodes, for example in a rack (nvmlGpuFabricInfo_t).
    """

    cluster: str
    """The UUID of the NVLink domain, as 32 hexadecimal digits."""
    clique: int
    """The number of the part of the domain in which all GPUs reach each other."""

    def __str__(self) -> str:
        """
        Return the domain as part of a sentence.

        >>> str(Domain("8f1d2c3b4a5e6f708192a3b4c5d6e7f8", 32766))
        'NVLink clique 32766 of cluster 8f1d2c3b4a5e6f708192a3b4c5d6e7f8'
        """
        return f"NVLink clique {self.clique} of cluster {self.cluster}"


@dataclass(frozen=True)
class Node:
    """
    The GPUs of one machine and the links between them.

    `nvlink` has the number of links of every pair (i < j) that NVLink connects. `pcie` has the PCIe
    distance of every pair ("PIX", "PXB", "PHB", "NODE" or "SYS"). An unknown distance counts as
    "SYS", the farthest. `address` is the IPv4 address of the net device with the default route.
    `unfit` has the GPUs that are not in `gpus` because checks found them unfit, with the names of
    these checks. `domain` is the group of GPUs of several nodes to which the node's GPUs belong, or
    None if there is none or if it is unknown. A node with a `cordon` gets no new replicas.
    """

    name: str
    driver: str | None
    cuda: tuple[int, int] | None  # the newest CUDA that the driver runs
    gpus: tuple[Gpu, ...]
    nvlink: Mapping[tuple[int, int], int]
    pcie: Mapping[tuple[int, int], str]
    address: str | None = None
    unfit: Mapping[int, str] = field(default_factory=dict)
    domain: Domain | None = None
    cordon: Cordon | None = None

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """
        The indices of the GPUs, in groups in which NVLink connects every pair.

        Each GPU is in one group. The groups are not connected components, because tensor
        parallelism communicates between all pairs. The first group is the largest possible one. The
        next group is the largest possible one of the remaining GPUs, and so on. If several groups
        are equally large, the one with the lowest indices is chosen. A GPU without NVLink is a
        group of its own.
        """
        return islands((gpu.index for gpu in self.gpus), self.nvlink)


def islands(gpus: Iterable[int], links: Collection[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """
    Partition `gpus` into cliques of the graph whose edges are `links` (pairs i < j).

    >>> islands(range(4), {(0, 1), (2, 3)})
    ((0, 1), (2, 3))
    """
    left = set(gpus)
    found = []
    while left:
        neighbours = {
            gpu: {other for other in left if (min(gpu, other), max(gpu, other)) in links}
            for gpu in left
        }
        largest = min(maximal_cliques(neighbours), key=lambda clique: (-len(clique), clique))
        found.append(largest)
        left.difference_update(largest)
    return tuple(found)


def maximal_cliques(neighbours: Mapping[int, Collection[int]]) -> Iterator[tuple[int, ...]]:
    """
    Yield every group in which all members are neighbours, and to which no GPU can be added.

    This is Bron and Kerbosch's exact algorithm (1973) with Tomita's choice of pivot. A node has at
    most 16 GPUs, so these ten lines replace a graph library.
    """

    def extend(clique: set[int], candidates: set[int], done: set[int]) -> Iterator[tuple[int, ...]]:
        if not candidates and not done:
            yield tuple(sorted(clique))
            return
        # Every maximal clique has the pivot or a GPU that is not its neighbour.
        pivot = max(candidates | done, key=lambda gpu: len(candidates & set(neighbours[gpu])))
        for gpu in candidates - set(neighbours[pivot]):
            near = set(neighbours[gpu])
            yield from extend(clique | {gpu}, candidates & near, done & near)
            candidates = candidates - {gpu}
            done = done | {gpu}

    yield from extend(set(), set(neighbours), set())


def node_from_probe(name: str, document: Mapping[str, Any]) -> Node:
    """
    Parse the probe of node `name`.

    Raises `FleetError` if a different version of the probe wrote `document`, or if it is
    incomplete. GPUs that do not answer, or lack a fact that planning needs, are omitted. A pair
    with active links does not count as connected if the driver refuses peer access.
    """
    if wrong := document_problem(document):
        raise FleetError(f"{name}: the probe {wrong}")
    with refuse_malformed(name):
        return _whole_node(name, document)


def _whole_node(name: str, document: Mapping[str, Any]) -> Node:
    driver = document["driver"]
    gpus = tuple(
        _gpu(facts, document["numa"][at])
        for at, facts in enumerate(document["gpus"])
        if _tells_enough(facts)
    )
    pairs = list(combinations((gpu.index for gpu in gpus), 2))
    widths = nvlink_widths(document, pairs)
    refused = {pair for pair in pairs if widths[pair] and peer_access_refused(document, *pair)}
    return Node(
        name=name,
        driver=value_or(driver["version"]),
        cuda=_cuda(value_or(driver["cuda"])),
        gpus=gpus,
        nvlink={pair: links for pair, links in widths.items() if links and pair not in refused},
        pcie={(i, j): PCIE_LEVELS.get(value_or(document["pcie"][i][j]), "SYS") for i, j in pairs},
        address=_address(document["nics"]),
        domain=_domain(document),
        cordon=cordon_of(document),
    )


def value_or(value: Any, otherwise: Any = None) -> Any:
    """Return a value of the probe's document, or `otherwise` if the probe could not read it."""
    return otherwise if isinstance(value, Mapping) and "missing" in value else value


def nvlink_width(document: Mapping[str, Any], i: int, j: int) -> int:
    """Return the number of NVLinks between two GPUs of a probe."""
    return nvlink_widths(document, [(i, j)])[i, j]


def nvlink_widths(
    document: Mapping[str, Any], pairs: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """
    Return the number of NVLinks of each pair of GPUs, which nvidia-smi shows as NV<n>.

    Links that end directly at the other GPU count. Through NVSwitches, a pair has as many links as
    the GPU with fewer links to them. If the two GPUs report different numbers, the lower number is
    used, because a link that only one end sees is down.
    """
    ends: dict[int, _Ends] = {}

    def from_to(i: int, j: int) -> tuple[int, int]:
        if i not in ends:
            ends[i] = _ends(document, i)
        bus_id = document["gpus"][j]["pci"]["bus_id"]
        granted = document["p2p"]["nvlink"][i][j] == P2P_OK
        return ends[i].gpus.count(bus_id), ends[i].switched or (ends[i].unseen if granted else 0)

    return {(i, j): sum(map(min, from_to(i, j), from_to(j, i))) for i, j in pairs}


@dataclass(frozen=True)
class _Ends:
    """Where the active links of one GPU end."""

    gpus: list[Any]
    """The PCI address of the GPU at the other end, for each link that ends at a GPU."""
    switched: int
    """The number of links that are known to end at NVSwitches."""
    unseen: int
    """
    The number of links that may end at NVSwitches.

    They count only if the driver grants the pair of GPUs peer access.
    """


def _ends(document: Mapping[str, Any], i: int) -> _Ends:
    """
    Return where the active links of GPU i end.

    There are three kinds of evidence for links to NVSwitches, the most certain first. Each link may
    report its other end. The driver may report the number of these links (field 147). In a virtual
    machine that does not see the switches, the other ends are unknown, but the driver grants the
    two GPUs peer access over NVLink.
    """
    about = value_or(document["nvlink"][i], {})
    up = [link for link in value_or(about.get("links"), []) if link["state"] in LINK_UP]
    ends = [value_or(link["remote_type"]) for link in up]
    elsewhere = sum(end not in {REMOTE_GPU, REMOTE_CPU} for end in ends)
    counted = value_or(about.get("switch_links"), 0)
    return _Ends(
        gpus=[link["remote_pci"] for link in up if link["remote_type"] == REMOTE_GPU],
        switched=ends.count(REMOTE_SWITCH) or min(counted, elsewhere),
        unseen=elsewhere,
    )


def peer_access_refused(document: Mapping[str, Any], i: int, j: int) -> bool:
    """
    Return whether the driver refuses peer access over NVLink between two GPUs.

    If the answer is unknown, access counts as granted.
    """
    status = document["p2p"]["nvlink"]
    return any(value_or(answer, P2P_OK) != P2P_OK for answer in (status[i][j], status[j][i]))


def _tells_enough(facts: Mapping[str, Any]) -> bool:
    """Return whether a GPU reports the facts that planning needs."""
    needed = ("uuid", "name", "pci", "memory", "compute_capability")
    return all(value_or(facts.get(name)) is not None for name in needed)


def _gpu(facts: Mapping[str, Any], numa: Mapping[str, Any]) -> Gpu:
    major, minor = facts["compute_capability"]
    return Gpu(
        index=facts["index"],
        uuid=str(facts["uuid"]),
        name=str(facts["name"]),
        bus_id=str(facts["pci"]["bus_id"]),
        memory_mib=facts["memory"]["total"] >> 20,
        compute_capability=(int(major), int(minor)),
        numa_node=_numa_node(numa),
    )


def _numa_node(numa: Mapping[str, Any]) -> int | None:
    """
    Return the NUMA node of a GPU, or None.

    Linux' value is used if there is one (-1 means none). Otherwise NVML's value is used if it is a
    single node.
    """
    node = value_or(numa["node"], -1)
    if node >= 0:
        return int(node)
    nodes = value_or(numa["memory_nodes"], "")
    return int(nodes) if nodes.isdecimal() else None


def _cuda(version: int | None) -> tuple[int, int] | None:
    """Return CUDA's version from NVML's number, which is 12080 for CUDA 12.8."""
    return None if version is None else (version // 1000, version % 1000 // 10)


def _domain(document: Mapping[str, Any]) -> Domain | None:
    """
    Return the NVLink domain that the node's GPUs have joined, or None if there is not exactly one.

    Checks report a GPU outside the domain as unfit. A board whose switches connect only its own
    GPUs reports a cluster of zeros, which does not count as a domain.
    """
    joined = (value_or(each, {}) for each in document["fabric"])
    found = {
        (value_or(each.get("cluster_uuid"), ""), value_or(each.get("clique")))
        for each in joined
        if value_or(each.get("state")) == FABRIC_COMPLETED
    }
    cluster, clique = found.pop() if len(found) == 1 else ("", None)
    return None if clique is None or not cluster.strip("0-") else Domain(cluster, clique)


def _address(nics: Any) -> str | None:
    """Return the IPv4 address of the net device with the default route, or None."""
    nics = value_or(nics, {})
    route = value_or(nics.get("default_route"))
    addresses = [
        value_or(net["ipv4"]) for net in value_or(nics.get("net"), []) if net["name"] == route
    ]
    return addresses[0] if addresses else None
