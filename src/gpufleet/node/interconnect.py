"""What joins a node's GPUs, and how far tensor parallelism may go on it.  Pure.

One value, `Interconnect`, from either source: the probe's document or the matrix of `nvidia-smi
topo -m`. Everything that `gpufleet topology` prints is said here (docs/plan/topology.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.formatting import ranges
from gpufleet.node.nic_affinity import nearest_by_class, nic_classes
from gpufleet.node.smi_topology import PCIE, TopoMatrix
from gpufleet.node.topology import LINK_UP, Node, islands, node_from_probe, nvlink_width, value_or

Pair = tuple[int, int]


@dataclass(frozen=True)
class Interconnect:
    """
    The GPUs of node `name` and what lies between them.

    `classes` has every pair (i < j): "NV18" or how near they are on PCIe, "PIX" to "SYS". `nics`
    has the PCIe class from each NIC to each GPU. `models` and `numa` lack the GPUs of which the
    source does not tell. `remarks` are sentences about what the source itself says is wrong.
    """

    name: str
    gpus: tuple[int, ...]
    classes: Mapping[Pair, str]
    models: Mapping[int, str] = field(default_factory=dict)
    numa: Mapping[int, int] = field(default_factory=dict)
    nics: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @cached_property
    def nvlink(self) -> dict[Pair, int]:
        """How many NVLinks join each pair that has any."""
        return {pair: int(name[2:]) for pair, name in self.classes.items() if name[:2] == "NV"}

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs in groups in which NVLink joins every pair, the largest first."""
        return islands(self.gpus, self.nvlink)

    @cached_property
    def max_tp(self) -> int:
        """
        The largest tensor-parallel size that stays on NVLink: a power of two, 1 without NVLink.

        A power of two, because vLLM divides a model's attention heads by it.
        """
        largest = max(map(len, self.islands), default=1)
        return 1 << (largest.bit_length() - 1)

    @cached_property
    def tiers(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """
        For each PCIe class that occurs, the groups whose pairs are that near or nearer.

        NVLink counts as nearest. Without NVLink they are what to place within.
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
        """Each GPU's nearest NICs with their class."""
        return nearest_by_class(self.nics)

    @cached_property
    def why(self) -> str:
        """The reason for `max_tp`, a sentence."""
        if not self.gpus:
            return "no GPU answers"
        if self.max_tp == 1:
            return "there is one GPU" if len(self.gpus) == 1 else "no two GPUs have NVLink"
        island = self.islands[0]
        size = len(island)
        less = f", and {self.max_tp} is the largest power of two in {size}"
        return (
            f"GPUs {ranges(island)} are an NVLink island of {size} "
            f"({_words(self.widths(island).values())}){less if self.max_tp < size else ''}"
        )

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know before placing anything, in sentences."""
        found: list[str] = [*self.remarks]
        for check in (_uneven, _unlike, _not_a_power_of_two, _several_cliques):
            found += check(self)
        for check in (_leaves_nvlink, _all_as_far, _far_from_nics, _geforce):
            found += check(self)
        return tuple(found)

    def widths(self, gpus: Iterable[int]) -> dict[Pair, int]:
        """The NVLinks of every pair among `gpus`."""
        return {pair: self.nvlink.get(pair, 0) for pair in combinations(sorted(gpus), 2)}

    def as_json(self) -> dict[str, Any]:
        """Return what `gpufleet topology --json` prints; docs/plan/topology.md has the keys."""
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
    """Return what a matrix of `nvidia-smi topo -m` says of node `name`."""
    return Interconnect(
        name=name,
        gpus=matrix.gpus,
        classes=matrix.classes,
        models=matrix.names,
        numa=matrix.numa,
        nics=matrix.nics,
    )


def from_probe(name: str, document: Mapping[str, Any]) -> Interconnect:
    """
    Return what the probe of node `name` found.

    Raises `FleetError` if the document is of another schema, or is not whole.
    """
    try:
        node = node_from_probe(name, document)
        nics = nic_classes(document)
        remarks = [*_silent(node, document), *_not_granted(node, document), *_one_sided(document)]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise FleetError(
            f"{name}: its probe is not whole ({type(error).__name__}: {error}): record it again "
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
        remarks=tuple(remarks),
    )


def switch_links(widths: Mapping[Pair, int]) -> dict[int, int] | None:
    """
    Return each GPU's links into a switch, if `widths` are those of GPUs on NVSwitches.

    Through switches a pair has as many links as the one with fewer. Else None: wired directly.

    >>> spokes({(0, 1): 17, (0, 2): 17, (1, 2): 18})
    {0: 17, 1: 18, 2: 18}
    """
    most: dict[int, int] = {}
    for pair, width in widths.items():
        for gpu in pair:
            most[gpu] = max(width, most.get(gpu, 0))
    fits = all(width == min(most[i], most[j]) for (i, j), width in widths.items())
    return dict(sorted(most.items())) if fits else None


def _rank(name: str) -> int:
    return PCIE.index(name) if name in PCIE else -1


def _silent(node: Node, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield which GPUs are not in the picture; what to do about it, the checks say."""
    init = document["driver"]["init"]
    if init != "ok":
        why = init["missing"].replace("_", " ")
        yield f"no GPU answers, the driver does not start ({why}): `gpufleet check` says what to do"
    answering = {gpu.index for gpu in node.gpus}
    for facts in document["gpus"]:
        if facts["index"] not in answering:
            why = facts.get("missing", "it tells only half of itself").replace("_", " ")
            yield (
                f"GPU {facts['index']} does not answer ({why}) and is in no island: `gpufleet "
                "check` says what to do"
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
            f"how near {_named(unread)} {'is' if len(unread) == 1 else 'are'} to others on PCIe "
            "could not be read: what is not known counts as SYS, the farthest"
        )


def _not_granted(node: Node, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield GPUs with NVLinks that are up and that the driver lets nobody use."""
    gpus = [gpu.index for gpu in node.gpus]
    refused = [
        pair
        for pair in combinations(gpus, 2)
        if pair not in node.nvlink and nvlink_width(document, *pair)
    ]
    if refused:
        between = ranges({gpu for pair in refused for gpu in pair})
        yield (
            f"NVLinks between GPUs {between} are up, and the driver grants no peer access over "
            "them, so they join nothing: see that nvidia-fabricmanager runs in the driver's "
            "version and that MIG mode is off"
        )


def _one_sided(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield pairs of a probe that are wired directly and of which one end sees fewer links."""
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
                f"GPU {many} sees {seen[many, few]} NVLinks to GPU {few}, which sees "
                f"{seen[few, many]}: the lower number counts; reset both GPUs or reboot the node"
            )


# -- warnings --------------------------------------------------------------------------------------


def _uneven(node: Interconnect) -> Iterator[str]:
    """
    Islands whose pairs differ: links that are down, or boards that are wired so.

    On a mesh (DGX-1V) every GPU uses as many links as any other, and pairs differ by design.
    """
    wired_so = []
    for island in node.islands:
        widths = node.widths(island)
        if len(set(widths.values())) < 2:
            continue
        words = _words(widths.values())
        links = switch_links(widths)
        used = {gpu: sum(n for pair, n in node.nvlink.items() if gpu in pair) for gpu in island}
        if links is not None:
            for gpu, count in links.items():
                if count < max(links.values()):
                    yield (
                        f"GPU {gpu} has {count} NVLinks where others of island {ranges(island)} "
                        f"have {max(links.values())}: a link is down and slows every all-reduce "
                        f"of the island; see `nvidia-smi nvlink -s -i {gpu}`, then reset the "
                        "island's GPUs, and have the board serviced if the link stays down"
                    )
        elif len(set(used.values())) == 1:
            wired_so.append(island)
        else:
            fewest = [gpu for gpu in island if used[gpu] == min(used.values())]
            yield (
                f"pairs of island {ranges(island)} differ ({words}), and not all of its GPUs use "
                f"as many links, the fewest of them by {_named(fewest)}: one may be down; see "
                "`nvidia-smi nvlink -s`"
            )
    if wired_so:
        found = {width for island in wired_so for width in node.widths(island).values()}
        yield (
            f"NVLink pairs differ ({_words(found)}) in "
            f"{_groups(wired_so)}, and every GPU uses as many links as its neighbours: the board "
            "is wired so, an all-reduce goes at the pace of the narrowest"
        )


def _unlike(node: Interconnect) -> Iterator[str]:
    """Islands of one size and different widths: a bridge of which a link is down."""
    pairs = {island: max(node.widths(island).values()) for island in node.islands if island[1:]}
    for island, width in pairs.items():
        best = max(each for other, each in pairs.items() if len(other) == len(island))
        if width < best:
            yield (
                f"island {ranges(island)} has NV{width} where another of its size has NV{best}: "
                "a link is down or a bridge is missing; see `nvidia-smi nvlink -s`"
            )


def _not_a_power_of_two(node: Interconnect) -> Iterator[str]:
    for island in node.islands:
        size = len(island)
        fits = 1 << (size.bit_length() - 1)
        if fits < size:
            yield (
                f"NVLink joins {size} GPUs ({ranges(island)}): tensor parallel {2 * fits} does "
                f"not fit, {fits} does and leaves {size - fits} of them over"
            )


def _several_cliques(node: Interconnect) -> Iterator[str]:
    for component in _components(node):
        inside = [island for island in node.islands if set(island) <= set(component)]
        if len(inside) > 1:
            yield (
                f"NVLink reaches all of GPUs {ranges(component)} and joins not every pair: they "
                f"are {len(inside)} islands ({_groups(inside)}), because tensor parallelism talks "
                "between all pairs"
            )


def _components(node: Interconnect) -> Iterator[tuple[int, ...]]:
    left = set(node.gpus)
    while left:
        reached, new = set(), {min(left)}
        while new:
            reached |= new
            new = {gpu for pair in node.nvlink if set(pair) & new for gpu in pair} - reached
        left -= reached
        yield tuple(sorted(reached))


def _leaves_nvlink(node: Interconnect) -> Iterator[str]:
    """What the next larger tensor-parallel size would talk over."""
    if len(node.gpus) < 2 * node.max_tp:
        return
    tier = next(tier for tier in reversed(PCIE) if tier in node.tiers)
    words = {
        "SYS": "PCIe and the link between NUMA nodes",
        "NODE": "PCIe and several host bridges",
        "PHB": "PCIe and the CPU's host bridge",
    }
    above = "without NVLink, tensor parallelism" if node.max_tp == 1 else ""
    above = above or f"tensor parallelism above {node.max_tp} leaves NVLink and"
    sentence = f"{above} crosses {words.get(tier, 'PCIe switches')} ({tier} at the farthest)"
    near = [
        f"{name}: {_groups(groups)}"
        for name, groups in node.tiers.items()
        if name != tier and max(map(len, groups)) > node.max_tp
    ]
    yield (
        f"{sentence}, and every layer waits for that; only `allow_pcie: true` places it so"
        + (f" (nearest groups, {'; '.join(near)})" if near else "")
    )


def _all_as_far(node: Interconnect) -> Iterator[str]:
    """All SYS on one NUMA node: what nvidia-smi says of boards whose bridges it cannot see."""
    if len(node.gpus) > 2 and set(node.classes.values()) == {"SYS"} == set(node.tiers):
        nodes = set(node.numa.values())
        if len(nodes) == 1 and node.numa.keys() == set(node.gpus):
            yield (
                f"every pair is SYS, yet all GPUs are next to NUMA node {nodes.pop()}: PCIe "
                "distance does not tell here which GPUs are nearer, the NUMA node is one group"
            )


def _far_from_nics(node: Interconnect) -> Iterator[str]:
    if not node.nics:
        return
    far = [gpu for gpu in node.gpus if node.nearest_nics.get(gpu, [("", "SYS")])[0][1] == "SYS"]
    near = [gpu for gpu in node.gpus if gpu not in far]
    if far and near:
        yield (
            f"no NIC is near {_named(far)} (SYS at best): traffic from there to other nodes "
            f"crosses the link between NUMA nodes; place what spans nodes on {_named(near)}"
        )
    elif far:
        yield "no NIC is near any GPU (SYS at best): what spans nodes crosses NUMA nodes first"


def _geforce(node: Interconnect) -> Iterator[str]:
    cards = [gpu for gpu in node.gpus if "GeForce" in node.models.get(gpu, "")]
    if len(cards) > 1:
        yield (
            f"GPUs {ranges(cards)} are GeForce, for which NVIDIA's driver grants no peer access "
            "over PCIe: set NCCL_P2P_DISABLE=1 and vLLM's --disable-custom-all-reduce, above all "
            "under a patched driver that says it does: those have given wrong results"
        )


def _named(gpus: Collection[int]) -> str:
    return f"GPU{'' if len(gpus) == 1 else 's'} {ranges(gpus)}"


def _words(widths: Iterable[int]) -> str:
    return " and ".join(f"NV{width}" for width in sorted(set(widths)))


def _groups(groups: Iterable[Iterable[int]]) -> str:
    return " | ".join(ranges(group) for group in groups)
