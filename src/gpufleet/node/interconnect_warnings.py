"""Return warnings about a node's interconnect as sentences. Pure.

Each function checks one aspect of an `Interconnect` (table in docs/plan/topology.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from gpufleet.catalog.nvlink_boards import is_always_wired
from gpufleet.formatting import ranges
from gpufleet.node.smi_topology import PCIE

if TYPE_CHECKING:
    from gpufleet.node.interconnect import Interconnect, Pair


def warnings_of(node: Interconnect) -> Iterator[str]:
    """Yield every warning about the links between a node's GPUs."""
    for check in (_mig, _uneven, _unlike, _off_nvlink, _no_nvlink_at_all, _not_a_power_of_two):
        yield from check(node)
    for check in (_several_cliques, _leaves_nvlink, _all_as_far, _far_from_nics, _geforce):
        yield from check(node)


def switch_links(widths: Mapping[Pair, int]) -> dict[int, int] | None:
    """
    Return each GPU's links into NVSwitches, or None if `widths` shows direct wiring.

    Through switches a pair has as many links as the GPU with fewer links.

    >>> switch_links({(0, 1): 17, (0, 2): 17, (1, 2): 18})
    {0: 17, 1: 18, 2: 18}
    """
    most: dict[int, int] = {}
    for pair, width in widths.items():
        for gpu in pair:
            most[gpu] = max(width, most.get(gpu, 0))
    fits = all(width == min(most[i], most[j]) for (i, j), width in widths.items())
    return dict(sorted(most.items())) if fits else None


def _mig(node: Interconnect) -> Iterator[str]:
    """Warn of MIG instances: CUDA grants them no peer access, even on the same GPU."""
    if node.mig:
        yield (
            f"{named(node.mig)} {'is' if len(node.mig) == 1 else 'are'} partitioned into MIG "
            "instances, which have no peer access to each other or to other GPUs: no tensor "
            "parallelism over "
            "them; for it switch MIG off (`nvidia-smi -mig 0 -i GPU`) and reset the GPU"
        )


def _uneven(node: Interconnect) -> Iterator[str]:
    """
    Warn of islands whose pairs differ, because links are down or the boards are wired like this.

    On a mesh (DGX-1V) all GPUs use equally many links, and pairs differ by design.
    """
    wired_so, halves = [], []
    for island in node.islands:
        widths = node.widths(island)
        if len(set(widths.values())) < 2:
            continue
        differ = words(widths.values())
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
        elif _is_half_a_cube(node, island):
            halves.append(island)
        else:
            fewest = [gpu for gpu in island if used[gpu] == min(used.values())]
            yield (
                f"pairs of island {ranges(island)} differ ({differ}), and not all of its GPUs use "
                f"as many links, the fewest of them by {named(fewest)}: one may be down; see "
                "`nvidia-smi nvlink -s`"
            )
    if wired_so:
        found = {width for island in wired_so for width in node.widths(island).values()}
        yield (
            f"NVLink pairs differ ({words(found)}) in "
            f"{_groups(wired_so)}, and every GPU uses as many links as its neighbours: the board "
            "is wired this way, and an all-reduce runs at the pace of the narrowest pair"
        )

    for island in halves:
        yield (
            f"NVLink pairs differ (NV1 and NV2) in {ranges(island)}, as in each half of a mesh of "
            "eight V100, whose other links lead to GPUs that are not in this machine: the board "
            "is wired this way, and an all-reduce runs at the pace of the narrowest pair"
        )


def _is_half_a_cube(node: Interconnect, island: tuple[int, ...]) -> bool:
    """
    Return whether an island is half a DGX-1V, without NVLink to any other GPU.

    Every pair of the four GPUs has a link, and the consecutive pairs of a path through all four
    have a second link (NVIDIA's DGX-1 system architecture white paper). The ends of that path use
    four links, and the other GPUs five.
    """
    widths = node.widths(island)
    double = [gpu for pair, width in widths.items() if width == 2 for gpu in pair]
    return (
        len(island) == 4
        and island in _components(node)
        and all("V100" in node.models.get(gpu, "V100") for gpu in island)
        and sorted(widths.values()) == [1, 1, 1, 2, 2, 2]
        and sorted(map(double.count, island)) == [1, 1, 2, 2]
    )


def _unlike(node: Interconnect) -> Iterator[str]:
    """Warn of islands with equal sizes and cards but different widths: a bridge's link is down."""
    pairs = {island: max(node.widths(island).values()) for island in node.islands if island[1:]}
    alike = {island: _kind(node, island) for island in pairs}
    for island, width in pairs.items():
        best = max(each for other, each in pairs.items() if alike[other] == alike[island])
        if width < best:
            unless = "" if island[0] in node.models else ", unless its cards are of another model"
            yield (
                f"island {ranges(island)} has NV{width} where another of its size has NV{best}: "
                f"a link is down or a bridge is missing{unless}; see `nvidia-smi nvlink -s`"
            )


def _kind(node: Interconnect, island: tuple[int, ...]) -> list[str]:
    return sorted(node.models.get(gpu, "") for gpu in island)


def _off_nvlink(node: Interconnect) -> Iterator[str]:
    """Warn of a GPU without NVLink beside three or more linked ones, which no bridge explains."""
    island = max(node.islands, key=len, default=())
    models = {node.models.get(gpu) for gpu in island}
    alone = [
        gpu
        for gpu in sorted(set(node.gpus) - node.mig)
        if not any(gpu in pair for pair in node.nvlink) and {node.models.get(gpu)} == models
    ]
    if alone and len(island) > max(2, len(alone)):
        unless = "" if node.models else ", or of another kind"
        is_one = len(alone) == 1
        yield (
            f"no NVLink joins {named(alone)} to any other, and {named(island)} are joined by "
            f"{words(node.widths(island).values())}: {'its' if is_one else 'their'} NVLinks are "
            f"down, or {'it is' if is_one else 'they are'} in MIG mode{unless}; see `nvidia-smi "
            f"nvlink -s -i {ranges(alone)}`, then reset the node's GPUs or reboot it, and have the "
            "board serviced if they stay down"
        )


def _no_nvlink_at_all(node: Interconnect) -> Iterator[str]:
    """Warn of boards that always have NVLink but show none."""
    boards = [gpu for gpu in node.gpus if is_always_wired(node.models.get(gpu, ""))]
    if len(boards) > 1 and not node.nvlink and not node.mig:
        yield (
            f"{named(boards)} are boards that are sold with NVLink only, and it joins no two of "
            "them: nvidia-fabricmanager does not run, NVLink is down, or a hypervisor gave this "
            "machine GPUs without it; see `systemctl status nvidia-fabricmanager` and `nvidia-smi "
            "nvlink -s`"
        )


def _not_a_power_of_two(node: Interconnect) -> Iterator[str]:
    told = {
        gpu for component in _components(node) if _dead_pair(node, component) for gpu in component
    }
    for island in node.islands:
        if set(island) <= told:
            continue
        size = len(island)
        fits = 1 << (size.bit_length() - 1)
        if fits < size:
            yield (
                f"NVLink joins {size} GPUs ({ranges(island)}): tensor parallel {2 * fits} does "
                f"not fit, {fits} does and leaves {size - fits} of them unused"
            )


def _several_cliques(node: Interconnect) -> Iterator[str]:
    for component in _components(node):
        inside = [island for island in node.islands if set(island) <= set(component)]
        if apart := _dead_pair(node, component):
            yield _without_a_pair(node, component, apart)
        elif len(inside) > 1:
            yield (
                f"NVLink reaches all of GPUs {ranges(component)} but does not join every pair: "
                f"they are {len(inside)} islands ({_groups(inside)}), because tensor parallelism "
                "talks between all pairs"
            )


def _dead_pair(node: Interconnect, component: tuple[int, ...]) -> Pair | None:
    """Return the only pair of four or more GPUs without NVLink, or None; no board is wired so."""
    apart = [pair for pair in combinations(component, 2) if pair not in node.nvlink]
    return apart[0] if len(apart) == 1 and len(component) > 3 else None


def _without_a_pair(node: Interconnect, component: tuple[int, ...], apart: Pair) -> str:
    size = 1 << (len(component).bit_length() - 1)
    halves = [
        (half, rest)
        for half in combinations(component, size // 2)
        if len(rest := tuple(gpu for gpu in component if gpu not in half)) == size // 2
        and not any(set(apart) <= set(group) for group in (half, rest))
    ]
    twice = (
        f"; until then GPUs {_groups(halves[0])} each carry tensor parallel {size // 2}, of which "
        f"the plan, which keeps to islands, places one ({_groups(node.islands)})"
        if halves
        else ""
    )
    return (
        f"of GPUs {ranges(component)} NVLink joins every pair but {apart[0]} and {apart[1]}, and "
        f"tensor parallelism talks between all pairs: their link is down; see `nvidia-smi nvlink "
        f"-s -i {apart[0]},{apart[1]}`, then reset both or reseat the bridge{twice}"
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
    """Yield the link that the next larger tensor-parallel size would use."""
    if len(node.gpus) < 2 * node.max_tp or not node.tiers:
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
    """Warn if all pairs are SYS, even in a NUMA node: nvidia-smi cannot see their bridges."""
    if len(node.gpus) > 2 and set(node.classes.values()) == {"SYS"} == set(node.tiers):
        groups: dict[int, list[int]] = {}
        for gpu, numa in sorted(node.numa.items()):
            groups.setdefault(numa, []).append(gpu)
        if node.numa.keys() != set(node.gpus) or max(map(len, groups.values())) == 1:
            return
        if len(groups) == 1:
            yield (
                f"every pair is SYS, yet all GPUs are next to NUMA node {next(iter(groups))}: "
                "here PCIe distance does not show which GPUs are nearer, so the NUMA node is one "
                "group"
            )
        else:
            yield (
                "every pair is SYS, also those next to one NUMA node: here PCIe distance does "
                "not show which GPUs are nearer, so the NUMA nodes are the groups "
                f"({_numa(groups)})"
            )


def _numa(groups: Mapping[int, Iterable[int]]) -> str:
    return " | ".join(f"{ranges(gpus)} at node {numa}" for numa, gpus in sorted(groups.items()))


def _far_from_nics(node: Interconnect) -> Iterator[str]:
    if not node.nics:
        return
    far = [gpu for gpu in node.gpus if node.nearest_nics.get(gpu, [("", "SYS")])[0][1] == "SYS"]
    near = [gpu for gpu in node.gpus if gpu not in far]
    if far and near:
        yield (
            f"no NIC is near {named(far)} (SYS at best): traffic from there to other nodes "
            "crosses the link between NUMA nodes; place replicas over several nodes on "
            f"{named(near)}"
        )
    elif far and set(far) <= node.c2c:
        groups = {
            numa: [gpu for gpu in node.gpus if node.numa.get(gpu) == numa]
            for numa in set(node.numa.values())
        }
        yield (
            "every NIC is SYS from every GPU because a Grace's GPU is connected to its CPU by "
            "NVLink-C2C, which is not a PCIe path: the class does not show how near a NIC is; "
            "use NUMA nodes instead" + (f" (GPUs {_numa(groups)})" if groups else "")
        )
    elif far:
        yield (
            "no NIC is near any GPU (SYS at best): traffic to other nodes crosses NUMA nodes first"
        )


def _geforce(node: Interconnect) -> Iterator[str]:
    cards = [gpu for gpu in node.gpus if "GeForce" in node.models.get(gpu, "")]
    if len(cards) > 1:
        yield (
            f"GPUs {ranges(cards)} are GeForce, for which NVIDIA's driver grants no peer access "
            "over PCIe: set NCCL_P2P_DISABLE=1 and vLLM's --disable-custom-all-reduce, above all "
            "with a patched driver that reports peer access: such drivers have given wrong "
            "results"
        )


def named(gpus: Collection[int]) -> str:
    return f"GPU{'' if len(gpus) == 1 else 's'} {ranges(gpus)}"


def words(widths: Iterable[int]) -> str:
    return " and ".join(f"NV{width}" for width in sorted(set(widths)))


def _groups(groups: Iterable[Iterable[int]]) -> str:
    return " | ".join(ranges(group) for group in groups)
