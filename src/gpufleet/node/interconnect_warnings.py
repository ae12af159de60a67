"""Warn about problems of a node's interconnect, as sentences. Pure.

Each function checks one aspect of an `Interconnect`. docs/plan/topology.md has a table of all
checks.
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
    Return the number of links from each GPU to NVSwitches, or None if GPUs are wired directly.

    `widths` has the number of NVLinks of each pair. A pair that is connected through switches has
    as many links as the GPU with fewer links.

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
    """Warn of MIG instances. CUDA allows no peer access between them, even on the same GPU."""
    if node.mig:
        yield (
            f"{named(node.mig)} {'is' if len(node.mig) == 1 else 'are'} partitioned into MIG "
            "instances. MIG instances have no peer access to each other or to other GPUs, so "
            "tensor parallelism cannot use them. For tensor parallelism, switch MIG off "
            "(`nvidia-smi -mig 0 -i GPU`) and reset the GPU"
        )


def _uneven(node: Interconnect) -> Iterator[str]:
    """
    Warn of islands whose pairs have different numbers of links.

    Either links are down, or the board is wired this way. On a mesh (DGX-1V), pairs differ by
    design, but all GPUs use the same number of links.
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
                        f"GPU {gpu} has {count} NVLinks, but other GPUs of island "
                        f"{ranges(island)} have {max(links.values())}: a link is down and slows "
                        "every all-reduce of the island. Check `nvidia-smi nvlink -s -i "
                        f"{gpu}`, then reset the GPUs of the island. If the link stays down, have "
                        "the board serviced"
                    )
        elif len(set(used.values())) == 1:
            wired_so.append(island)
        elif _is_half_a_cube(node, island):
            halves.append(island)
        else:
            fewest = [gpu for gpu in island if used[gpu] == min(used.values())]
            yield (
                f"pairs of island {ranges(island)} differ ({differ}), and its GPUs do not all use "
                f"the same number of links. {named(fewest)} "
                f"{'uses' if len(fewest) == 1 else 'use'} the fewest: a link may be down. Check "
                "`nvidia-smi nvlink -s`"
            )
    if wired_so:
        found = {width for island in wired_so for width in node.widths(island).values()}
        yield (
            f"NVLink pairs differ ({words(found)}) in "
            f"{_groups(wired_so)}, and every GPU uses as many links as its neighbours. The board "
            "is wired this way, and an all-reduce runs at the speed of the pair with the fewest "
            "links"
        )

    for island in halves:
        yield (
            f"NVLink pairs differ (NV1 and NV2) in {ranges(island)}. Each half of a board with "
            "eight V100 is wired this way: its other links lead to GPUs that are not in this "
            "machine. An all-reduce runs at the speed of the pair with the fewest links"
        )


def _is_half_a_cube(node: Interconnect, island: tuple[int, ...]) -> bool:
    """
    Return whether an island is half of a DGX-1V, and has no NVLink to any other GPU.

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
    """
    Warn of an island with fewer links than an island of the same size with the same cards.

    Then a link of a bridge is down.
    """
    pairs = {island: max(node.widths(island).values()) for island in node.islands if island[1:]}
    alike = {island: _kind(node, island) for island in pairs}
    for island, width in pairs.items():
        best = max(each for other, each in pairs.items() if alike[other] == alike[island])
        if width < best:
            unless = "" if island[0] in node.models else ", unless its cards are a different model"
            yield (
                f"island {ranges(island)} has NV{width}, but another island of the same size has "
                f"NV{best}: a link is down or a bridge is missing{unless}. Check `nvidia-smi "
                "nvlink -s`"
            )


def _kind(node: Interconnect, island: tuple[int, ...]) -> list[str]:
    return sorted(node.models.get(gpu, "") for gpu in island)


def _off_nvlink(node: Interconnect) -> Iterator[str]:
    """
    Warn of a GPU without NVLink beside three or more GPUs with NVLink.

    Bridges between pairs of cards do not explain such a difference.
    """
    island = max(node.islands, key=len, default=())
    models = {node.models.get(gpu) for gpu in island}
    alone = [
        gpu
        for gpu in sorted(set(node.gpus) - node.mig)
        if not any(gpu in pair for pair in node.nvlink) and {node.models.get(gpu)} == models
    ]
    if alone and len(island) > max(2, len(alone)):
        unless = "" if node.models else ", or the model is different"
        is_one = len(alone) == 1
        yield (
            f"no NVLink connects {named(alone)} to any other GPU, but {named(island)} are "
            f"connected by {words(node.widths(island).values())}. The NVLinks of {named(alone)} "
            f"are down, or {'the GPU is' if is_one else 'the GPUs are'} in MIG mode{unless}. Check "
            f"`nvidia-smi nvlink -s -i {ranges(alone)}`, then reset the node's GPUs or reboot the "
            "node. If the links stay down, have the board serviced"
        )


def _no_nvlink_at_all(node: Interconnect) -> Iterator[str]:
    """Warn of GPUs on boards that always have NVLink, if no NVLink is found."""
    boards = [gpu for gpu in node.gpus if is_always_wired(node.models.get(gpu, ""))]
    if len(boards) > 1 and not node.nvlink and not node.mig:
        yield (
            f"{named(boards)} are boards that are only sold with NVLink, but NVLink connects no "
            "two of them. Either nvidia-fabricmanager does not run, or NVLink is down, or a "
            "hypervisor passes the GPUs to this machine without NVLink. Check `systemctl status "
            "nvidia-fabricmanager` and `nvidia-smi nvlink -s`"
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
                f"NVLink connects {size} GPUs ({ranges(island)}). A tensor-parallel size of "
                f"{2 * fits} does not fit. A size of {fits} fits, and leaves {size - fits} of "
                "these GPUs unused"
            )


def _several_cliques(node: Interconnect) -> Iterator[str]:
    for component in _components(node):
        inside = [island for island in node.islands if set(island) <= set(component)]
        if apart := _dead_pair(node, component):
            yield _without_a_pair(node, component, apart)
        elif len(inside) > 1:
            yield (
                f"NVLink reaches all of GPUs {ranges(component)} but does not connect every pair. "
                "Tensor parallelism communicates between all pairs, so these GPUs form "
                f"{len(inside)} islands ({_groups(inside)})"
            )


def _dead_pair(node: Interconnect, component: tuple[int, ...]) -> Pair | None:
    """
    Return the pair without NVLink if it is the only one among four or more GPUs, or None.

    No board is wired this way, so the link is down.
    """
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
        f". Until then, GPUs {_groups(halves[0])} can each run a tensor-parallel size of "
        f"{size // 2}, but the plan only uses whole islands ({_groups(node.islands)}), so it "
        "places one such group"
        if halves
        else ""
    )
    return (
        f"NVLink connects every pair of GPUs {ranges(component)} except {apart[0]} and "
        f"{apart[1]}, but tensor parallelism communicates between all pairs. The link between "
        f"{apart[0]} and {apart[1]} is down: check `nvidia-smi nvlink -s -i "
        f"{apart[0]},{apart[1]}`, then reset both GPUs or reseat the bridge{twice}"
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
    """
    Warn that a tensor-parallel size above `max_tp` uses PCIe, and yield which part of PCIe it uses.
    """
    if len(node.gpus) < 2 * node.max_tp or not node.tiers:
        return
    tier = next(tier for tier in reversed(PCIE) if tier in node.tiers)
    words = {
        "SYS": "PCIe and the link between NUMA nodes",
        "NODE": "PCIe and several host bridges",
        "PHB": "PCIe and the CPU's host bridge",
    }
    above = "without NVLink, tensor parallelism" if node.max_tp == 1 else ""
    above = above or f"a tensor-parallel size above {node.max_tp} does not only use NVLink, but"
    sentence = f"{above} crosses {words.get(tier, 'PCIe switches')} (up to {tier})"
    near = [
        f"{name}: {_groups(groups)}"
        for name, groups in node.tiers.items()
        if name != tier and max(map(len, groups)) > node.max_tp
    ]
    yield (
        f"{sentence}, and every layer waits for this traffic. gpufleet places a replica this way "
        "only if `allow_pcie: true` is set"
        + (f" (groups of near GPUs: {'; '.join(near)})" if near else "")
    )


def _all_as_far(node: Interconnect) -> Iterator[str]:
    """
    Warn if all pairs are SYS, even within a NUMA node, because nvidia-smi cannot see their bridges.
    """
    if len(node.gpus) > 2 and set(node.classes.values()) == {"SYS"} == set(node.tiers):
        groups: dict[int, list[int]] = {}
        for gpu, numa in sorted(node.numa.items()):
            groups.setdefault(numa, []).append(gpu)
        if node.numa.keys() != set(node.gpus) or max(map(len, groups.values())) == 1:
            return
        if len(groups) == 1:
            yield (
                "the PCIe distance of every pair is SYS, although all GPUs are next to NUMA node "
                f"{next(iter(groups))}. On this node the distance does not show which GPUs are "
                "nearer, so gpufleet treats all GPUs of the NUMA node as one group"
            )
        else:
            yield (
                "the PCIe distance of every pair is SYS, even between GPUs that are next to the "
                "same NUMA node. On this node the distance does not show which GPUs are nearer, "
                f"so gpufleet groups GPUs by NUMA node ({_numa(groups)})"
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
            f"no NIC is near {named(far)} (the nearest is SYS), so traffic from "
            f"{'this GPU' if len(far) == 1 else 'these GPUs'} to other nodes crosses the link "
            f"between NUMA nodes. Place replicas that span several nodes on {named(near)}"
        )
    elif far and set(far) <= node.c2c:
        groups = {
            numa: [gpu for gpu in node.gpus if node.numa.get(gpu) == numa]
            for numa in set(node.numa.values())
        }
        yield (
            "the distance from every GPU to every NIC is SYS, because the GPU of a Grace "
            "superchip is connected to its CPU by NVLink-C2C, which is not a PCIe path. So the "
            "distance does not show how near a NIC is. Use NUMA nodes instead"
            + (f" (GPUs {_numa(groups)})" if groups else "")
        )
    elif far:
        yield (
            "no NIC is near any GPU (the nearest is SYS), so traffic to other nodes crosses the "
            "link between NUMA nodes"
        )


def _geforce(node: Interconnect) -> Iterator[str]:
    cards = [gpu for gpu in node.gpus if "GeForce" in node.models.get(gpu, "")]
    if len(cards) > 1:
        yield (
            f"GPUs {ranges(cards)} are GeForce cards, and NVIDIA's driver allows no peer access "
            "over PCIe between GeForce cards: set NCCL_P2P_DISABLE=1 and vLLM's "
            "--disable-custom-all-reduce. Set them especially with a patched driver that reports "
            "peer access, because such drivers have given wrong results"
        )


def named(gpus: Collection[int]) -> str:
    return f"GPU{'' if len(gpus) == 1 else 's'} {ranges(gpus)}"


def words(widths: Iterable[int]) -> str:
    return " and ".join(f"NV{width}" for width in sorted(set(widths)))


def _groups(groups: Iterable[Iterable[int]]) -> str:
    return " | ".join(ranges(group) for group in groups)
