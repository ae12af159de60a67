"""
Choose the GPUs of a node for a group, and the next node. Pure.

A group is placed in one NVLink island. Of the islands with enough free GPUs, gpufleet chooses the
one with the fewest free GPUs, so that large islands stay whole. Inside the island, GPUs of one NUMA
node are preferred, then GPUs behind one NIC, then the GPUs with the lowest indices. If NVLink joins
GPUs of two islands (a bridge with a dead pair, a cube mesh), the chosen group leaves room for as
many further groups of its size as possible. If no island has room and `allow_pcie` is set, gpufleet
tries larger and larger parts of the PCIe tree.

The groups that a node's hardware allows are computed once and cached for all equal nodes
(`Layout`), because a fleet of thousands of nodes has few different layouts.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gpufleet.node.topology import Domain, Node, islands
from gpufleet.planning.parallelism import Division, Kind

# NVML's names for the nearest common ancestor of two GPUs, nearest first: one switch, several
# switches, one host bridge, one NUMA node, anything else.
PCIE_TIERS = ("PIX", "PXB", "PHB", "NODE", "SYS")

NearNics = Mapping[int, Collection[tuple[str, str]]]
"""The nearest NICs of each GPU, each with the class of the PCIe path between them.

`nic_affinity.nearest_nics` returns this mapping.
"""

Mask = int
"""A set of GPUs: bit n is the GPU with NVML index n."""


def mask(gpus: Iterable[int]) -> Mask:
    """Return the GPUs as bits. Duplicates count once."""
    found = 0
    for gpu in gpus:
        found |= 1 << gpu
    return found


def indices(gpus: Mask) -> tuple[int, ...]:
    """
    Return the GPUs' indices, ascending.

    >>> indices(0b10010)
    (1, 4)
    """
    return tuple(index for index in range(gpus.bit_length()) if gpus >> index & 1)


class Layout:
    """The hardware of equal nodes, and the groups of GPUs that are possible on it."""

    def __init__(self, node: Node, nics: NearNics) -> None:
        """Create the layout of `node`, which all nodes with the same `key` share."""
        self.gpus = tuple(sorted(gpu.index for gpu in node.gpus))
        self.islands = islands(self.gpus, node.nvlink)
        self._nvlink = node.nvlink
        self._pcie = node.pcie
        self._islands = tuple(map(mask, self.islands))
        self._joined: dict[Mask, Mask] = _neighbours(self.gpus, node.nvlink)
        self._crossed = any(
            self._joined[1 << gpu] & ~mask(island) for island in self.islands for gpu in island
        )
        self._most: dict[tuple[int, Mask], int] = {}
        self._numa_nodes = _masks({gpu.index: gpu.numa_node for gpu in node.gpus})
        self._behind = _masks(
            {gpu: tuple(sorted(name for name, _ in near)) for gpu, near in nics.items()}
        )
        self._far = mask(gpu for gpu, near in nics.items() if all(at == "SYS" for _, at in near))
        self._tiers: list[tuple[Mask, ...]] = []
        self._found: dict[tuple[Mask, int, int, bool, bool], tuple[int, ...]] = {}

    @staticmethod
    def key(node: Node, nics: NearNics) -> tuple[object, ...]:
        """Return a key that is equal for all nodes with the same layout."""
        return (
            tuple((gpu.index, gpu.numa_node) for gpu in node.gpus),
            frozenset(node.nvlink.items()),
            frozenset(node.pcie.items()),
            tuple(sorted((gpu, tuple(near)) for gpu, near in nics.items())),
        )

    def group(self, free: Mask, division: Division, *, pcie: bool) -> tuple[int, ...]:
        """
        Return the GPUs from `free` for one node's part of a replica, or () if there is no room.

        The GPUs are in the order of their ranks: one tensor-parallel group after another, and by
        index inside each group.
        """
        spans = division.nodes > 1
        key = (free, division.unit, division.units, pcie, spans)
        if key not in self._found:
            self._found[key] = self._group(free, division, pcie, spans)
        return self._found[key]

    def _group(self, free: Mask, division: Division, pcie: bool, spans: bool) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for _ in range(division.units):
            unit = self._unit(free, division.unit, pcie, spans)
            if not unit:
                return ()
            found += unit
            free &= ~mask(unit)
        return found

    def _unit(self, free: Mask, size: int, pcie: bool, spans: bool) -> tuple[int, ...]:
        for parts in self._partitions(pcie):
            found: tuple[int, ...] = ()
            pool = 0
            if spans:  # stages that talk to other nodes belong on GPUs near a NIC
                pool = _best_fit(free & ~self._far, parts, size)
            if pool := pool or _best_fit(free, parts, size):
                near = _best_fit(pool, self._numa_nodes, size) or pool
                found = indices(_best_fit(near, self._behind, size) or near)[:size]
            if self._crossed and parts is self._islands:
                found = self._sparing(free, size, found)
            if found:
                return found
        return ()

    def _sparing(self, free: Mask, size: int, found: tuple[int, ...]) -> tuple[int, ...]:
        """
        Return a group that leaves room for as many further groups as possible.

        If `found` is such a group, it is returned. Otherwise, the first such group is returned.
        """
        most = self.most_groups(size, free)
        if not most or (found and self.most_groups(size, free & ~mask(found)) == most - 1):
            return found
        groups = self._groups(0, free, size)
        return next(indices(gpus) for gpus in groups if self._spares(size, free, gpus, most))

    def _spares(self, size: int, free: Mask, gpus: Mask, most: int) -> bool:
        return self.most_groups(size, free & ~gpus) == most - 1

    def _groups(self, group: Mask, near: Mask, size: int) -> Iterator[Mask]:
        """
        Yield `group` with each choice of `size` more GPUs from `near` of which NVLink joins every
        pair.
        """
        if not size:
            yield group
        while size and near:
            gpu = near & -near
            near ^= gpu
            yield from self._groups(group | gpu, near & self._joined[gpu], size - 1)

    def most_groups(self, size: int, free: Mask | None = None) -> int:
        """
        Return the maximum number of disjoint groups of `size` GPUs, each fully linked by NVLink.

        `free` are the GPUs to use. None means all GPUs. The number is exact because it includes
        groups whose links cross islands.
        """
        left = mask(self.gpus) if free is None else free
        if not self._crossed:
            return sum((left & island).bit_count() // size for island in self._islands)
        if left.bit_count() < size:
            return 0
        key = (size, left)
        if key not in self._most:
            gpu = left & -left
            rest = left ^ gpu
            # The GPU with the lowest index is in a group, or in none. Stop when the number of GPUs
            # allows no more groups. Otherwise the search takes seconds for sixteen GPUs.
            most, bound = 0, left.bit_count() // size
            for group in self._groups(gpu, rest & self._joined[gpu], size - 1):
                most = max(most, 1 + self.most_groups(size, left & ~group))
                if most == bound:
                    break
            self._most[key] = most if most == bound else max(most, self.most_groups(size, rest))
        return self._most[key]

    @property
    def more_groups(self) -> dict[int, int]:
        """
        Return {size: number of groups} for each size with more groups than fit inside the islands.
        """
        sizes = range(2, max(map(len, self.islands), default=1) + 1) if self._crossed else ()
        return {
            size: most
            for size in sizes
            if (most := self.most_groups(size)) > sum(len(each) // size for each in self.islands)
        }

    def may_hold(self, gpus: tuple[int, ...], division: Division, *, pcie: bool) -> bool:
        """
        Return whether these GPUs, in the order of their ranks, can be a node's part of a replica.
        """
        size = division.unit
        if len(gpus) != size * division.units:
            return False
        units = [mask(gpus[start : start + size]) for start in range(0, len(gpus), size)]
        parts = [part for parts in self._partitions(pcie) for part in parts]
        return all(
            any(unit & part == unit for part in parts) or any(self._groups(0, unit, size))
            for unit in units
        )

    def largest(self, *, pcie: bool) -> int:
        """Return the number of GPUs of the largest possible group, as if all GPUs were free."""
        return max(
            (part.bit_count() for parts in self._partitions(pcie) for part in parts), default=0
        )

    def slowest_link(self, gpus: tuple[int, ...]) -> str:
        """Return the link of the slowest pair of GPUs, for example `NVLink (NV18)`."""
        pairs = [(one, other) for one in gpus for other in gpus if one < other]
        links = min(self._nvlink.get(pair, 0) for pair in pairs)
        if links:
            return f"NVLink (NV{links})"
        return (
            f"PCIe ({PCIE_TIERS[max(self._tier(*pair) for pair in pairs)]}, allowed by "
            "`allow_pcie`)"
        )

    def _partitions(self, pcie: bool) -> Iterator[tuple[Mask, ...]]:
        """Yield the ways to divide the node's GPUs into parts that may hold a group, best first."""
        yield self._islands
        if pcie:
            if not self._tiers:
                self._tiers = [self._pcie_parts(tier) for tier in range(len(PCIE_TIERS))]
            yield from self._tiers

    def _pcie_parts(self, tier: int) -> tuple[Mask, ...]:
        """
        Return the sets of GPUs whose paths meet at `PCIE_TIERS[tier]` or nearer. The sets do not
        overlap.
        """
        parts: list[set[int]] = []
        for gpu in self.gpus:
            near = [part for part in parts if any(self._tier(gpu, at) <= tier for at in part)]
            parts = [part for part in parts if part not in near] + [{gpu}.union(*near)]
        return tuple(mask(part) for part in sorted(parts, key=min))

    def _tier(self, one: int, other: int) -> int:
        # An unknown link counts as the slowest: a group on it is possible, but chosen last.
        found = self._pcie.get((min(one, other), max(one, other)), "SYS")
        return PCIE_TIERS.index(found) if found in PCIE_TIERS else len(PCIE_TIERS) - 1


def _neighbours(gpus: Iterable[int], links: Collection[tuple[int, int]]) -> dict[Mask, Mask]:
    """Return the NVLink neighbours of each GPU."""
    found = {1 << gpu: 0 for gpu in gpus}
    for one, other in links:
        if 1 << one in found and 1 << other in found:
            found[1 << one] |= 1 << other
            found[1 << other] |= 1 << one
    return found


def _masks(labels: Mapping[int, object]) -> tuple[Mask, ...]:
    """Return the sets of GPUs with the same label, as bits."""
    alike: dict[object, list[int]] = defaultdict(list)
    for gpu, label in labels.items():
        alike[label].append(gpu)
    return tuple(map(mask, alike.values()))


def _best_fit(free: Mask, parts: Iterable[Mask], size: int) -> Mask:
    """
    Return the free GPUs of the part that has the fewest, but at least `size`. 0 if there is none.
    """
    pools = [pool for part in parts if (pool := free & part).bit_count() >= size]
    return min(pools, key=lambda pool: (pool.bit_count(), indices(pool)), default=0)


class NodeCapacity:
    """One node and its unassigned GPUs."""

    __slots__ = (
        "_held_shares",
        "_indices",
        "_needed",
        "_shares",
        "_uuids",
        "changes",
        "free",
        "groups",
        "held",
        "kind",
        "layout",
        "name",
        "node",
        "open",
        "order",
    )

    def __init__(
        self,
        node: Node,
        kind: Kind,
        layout: Layout,
        order: int,
        groups: frozenset[str] = frozenset(),
    ) -> None:
        """
        Create the capacity with all GPUs free. `order` is the node's index among all nodes by name.
        """
        self.node = node
        self.groups = groups
        self.name = node.name
        self.kind = kind
        self.layout = layout
        self.order = order
        self.free: Mask = mask(layout.gpus)
        self.open: Mask = self.free
        """The free GPUs that are not held for a running replica."""
        self.held: dict[tuple[str, int], Mask] = {}
        """GPUs of running replicas that are not placed yet; other replicas get these GPUs last."""
        self._needed: set[tuple[str, int]] = set()
        # Shares are in thousandths of a GPU (planning/gpu_shares.py). `_shares` has the shares of
        # placed replicas, by GPU. `_held_shares` has the shares of held replicas.
        self._shares: dict[int, dict[tuple[str, int], int]] = {}
        self._held_shares: dict[tuple[str, int], int] = {}
        self.changes = 0
        """Number of times that GPUs were assigned, held or released."""
        self._uuids: dict[int, str] = {}
        self._indices: dict[str, int] = {}

    @property
    def uuids(self) -> Mapping[int, str]:
        """Return the GPUs' UUIDs by index."""
        if not self._uuids:
            self._uuids = {gpu.index: gpu.uuid for gpu in self.node.gpus}
        return self._uuids

    @property
    def indices(self) -> Mapping[str, int]:
        """Return the GPUs' indices by UUID."""
        if not self._indices:
            self._indices = {gpu.uuid: gpu.index for gpu in self.node.gpus}
        return self._indices

    def take(self, gpus: Iterable[int]) -> None:
        """Assign GPUs to a stage."""
        self.changes += 1
        taken = mask(gpus)
        self.free &= ~taken
        self.open &= ~taken

    def hold(
        self, replica: tuple[str, int], gpus: Iterable[int], *, needed: bool, share: int = 0
    ) -> None:
        """
        Hold the GPUs of a running replica that may stay.

        `needed` says what happens if another replica displaces this replica: it moves if `needed`
        is true, and stops otherwise. `share` is in thousandths of the GPU; 0 means whole GPUs.
        """
        self.changes += 1
        if needed:
            self._needed.add(replica)
        if share:
            self._held_shares[replica] = share
        self.held[replica] = mask(gpus)
        self.open &= ~self.held[replica]

    def release(self, replica: tuple[str, int]) -> None:
        """Release the GPUs that a replica holds."""
        self.changes += 1
        self._held_shares.pop(replica, None)
        if self.held.pop(replica, None) is not None:
            self.open = self.free
            for gpus in self.held.values():
                self.open &= ~gpus

    def group(self, division: Division, *, pcie: bool, displace: bool) -> tuple[int, ...]:
        """
        Return the GPUs for a replica's part on this node, or () if there is no room.

        If `displace` is true, the part may also use GPUs that are held for other replicas.
        """
        found = self.layout.group(self.open, division, pcie=pcie)
        if found or not displace:
            return found
        # Displace as few replicas as possible: first replicas that need no other place, then the
        # smallest replicas, then the replica of a model with the highest number.
        allowed = self.open
        for _, gpus in self._cheapest_first():
            allowed |= gpus & self.free
            if found := self.layout.group(allowed, division, pcie=pcie):
                return found
        return ()

    def _cheapest_first(self) -> list[tuple[tuple[str, int], Mask]]:
        return sorted(
            self.held.items(),
            key=lambda held: (
                held[0] in self._needed,
                held[1].bit_count(),
                held[0][0],
                -held[0][1],
            ),
        )

    def displaced(self, gpus: tuple[int, ...]) -> list[tuple[str, int]]:
        """Return the held replicas that use any of `gpus`."""
        taken = mask(gpus)
        return [replica for replica, held in self.held.items() if held & taken]

    def cost(self, gpus: tuple[int, ...]) -> tuple[int, int]:
        """Return how many replicas on `gpus` would move, and how many would stop."""
        return self.cost_of(self.displaced(gpus))

    def cost_of(self, displaced: Collection[tuple[str, int]]) -> tuple[int, int]:
        """Return how many of these replicas would move, and how many would stop."""
        needed = sum(replica in self._needed for replica in displaced)
        return needed, len(displaced) - needed

    # Shares of a GPU

    def take_share(self, replica: tuple[str, int], gpu: int, share: int) -> None:
        """Assign a share of a GPU, in thousandths, to a replica.

        A replica that uses whole GPUs can then no longer use the GPU.
        """
        self.take((gpu,))
        self._shares.setdefault(gpu, {})[replica] = share

    def shares_on(self, gpu: int) -> Mapping[tuple[str, int], int]:
        """Return the assigned shares of a GPU, by replica, in thousandths."""
        return self._shares.get(gpu, {})

    def share_used(self, gpu: int) -> int:
        """Return the sum of a GPU's shares, including held shares, in thousandths."""
        held = (replica for replica, gpus in self.held.items() if gpus >> gpu & 1)
        return sum(self.shares_on(gpu).values()) + sum(
            self._held_shares.get(replica, 0) for replica in held
        )

    def shares_of(self, held: Iterable[tuple[str, int]]) -> int:
        """Return the sum of held replicas' shares of GPUs, in thousandths."""
        return sum(self._held_shares.get(each, 1000 * self.held[each].bit_count()) for each in held)

    def has_share(self, gpu: int, share: int, model: str, most: int) -> bool:
        """Return whether a share of the GPU can be assigned to a model. Held shares are ignored."""
        taken = self.shares_on(gpu)
        return (
            bool(taken or self.free >> gpu & 1)
            and sum(taken.values()) + share <= most
            and all(name != model for name, _ in taken)
        )

    def displaced_by_share(
        self, gpu: int, share: int, model: str, most: int
    ) -> list[tuple[str, int]] | None:
        """
        Return the held replicas that a model's share on a GPU displaces, or None if there is no
        room.
        """
        if not self.has_share(gpu, share, model, most):
            return None
        held = [replica for replica, gpus in self._cheapest_first() if gpus >> gpu & 1]
        whole = [replica for replica in held if replica not in self._held_shares]
        shared = [replica for replica in held if replica in self._held_shares]
        found = whole + [replica for replica in shared if replica[0] == model]
        left = most - share - sum(self.shares_on(gpu).values())
        staying = [replica for replica in shared if replica not in found]
        while staying and sum(self._held_shares[each] for each in staying) > left:
            found.append(staying.pop(0))
        return found


Part = tuple[NodeCapacity, tuple[int, ...]]
"""A node and the GPUs that a replica gets there, in the order of ranks."""


_Entry = tuple[tuple[int, ...], NodeCapacity, Division]


class Picker:
    """
    Picks the nodes and GPUs of one model's next replica.

    The picker compares nodes by these criteria, in this order: the most preferred group, the fewest
    replicas of the model, the most free GPUs, the first name. A multi-node replica gets the first
    nodes of one kind in one NVLink domain. If no domain has room, the replica gets the first nodes
    of one kind.

    While the picker is used, the number of free GPUs can only decrease. A node without room is
    therefore never checked again. A node whose free GPUs have changed is put back into the queue.
    Each choice therefore checks one or two nodes instead of all nodes.
    """

    def __init__(
        self,
        rooms: Iterable[tuple[NodeCapacity, Division]],
        on: Counter[str],
        *,
        pcie: bool,
        displace: bool = False,
        prefer: Sequence[str] = (),
    ) -> None:
        """
        Create a picker for nodes, each with the division of a replica on it.

        `on` has the number of the model's replicas on each node, and the caller updates it.
        `prefer` are groups of nodes in order of preference; all other nodes follow.
        """
        self._prefer = prefer
        self._on = on
        self._pcie = pcie
        self._displace = displace
        # In this order: single nodes; nodes that NVLink joins; any nodes of one kind.
        alone: list[_Entry] = []
        joined: dict[tuple[Kind, Domain], list[_Entry]] = defaultdict(list)
        alike: dict[Kind, list[_Entry]] = defaultdict(list)
        for room, division in rooms:
            free = room.free if displace else room.open
            if free.bit_count() < division.share:
                continue
            entry = (self._key(room, division), room, division)
            if division.nodes == 1:
                alone.append(entry)
                continue
            alike[room.kind].append(entry)
            if room.node.domain:
                joined[room.kind, room.node.domain].append(entry)
        # The smallest domain that suffices, so that large ones stay whole.
        self._lines = [
            alone,
            *sorted(
                joined.values(),
                key=lambda line: (self._rank(line[0][1]), len(line), line[0][1].order),
            ),
            *sorted(alike.values(), key=lambda line: min(self._rank(room) for _, room, _ in line)),
        ]
        for line in self._lines:
            heapq.heapify(line)

    def next(self) -> tuple[Division, list[Part]] | None:
        """
        Return the next replica's parts, or None if there is no room. The caller assigns the GPUs.
        """
        for line in self._lines:
            used: list[_Entry] = []
            parts: list[Part] = []
            while line:
                room, division, gpus = self._first(line)
                if not gpus:
                    break
                parts.append((room, gpus))
                if len(parts) < division.nodes:
                    used.append(heapq.heappop(line))
                    continue
                for entry in used:
                    heapq.heappush(line, entry)
                return division, parts
            for entry in used:
                heapq.heappush(line, entry)
        return None

    def _first(self, line: list[_Entry]) -> tuple[NodeCapacity, Division, tuple[int, ...]]:
        """
        Return the first node with room for a group, and keep it in the queue.

        The GPUs are empty if no node has room.
        """
        while True:
            key, room, division = line[0]
            now = self._key(room, division)
            if now != key:
                heapq.heapreplace(line, (now, room, division))
                continue
            gpus = room.group(division, pcie=self._pcie, displace=self._displace)
            if gpus:
                return room, division, gpus
            heapq.heappop(line)
            if not line:
                return room, division, ()

    def _key(self, room: NodeCapacity, division: Division) -> tuple[int, ...]:
        """
        Return the sort key of a node. The last number of the key is unique, so no two keys are
        equal.
        """
        rank = self._rank(room)
        if not self._displace:
            return rank, self._on[room.name], -room.open.bit_count(), room.order
        gpus = room.group(division, pcie=self._pcie, displace=True)
        return *room.cost(gpus), rank, self._on[room.name], -room.free.bit_count(), room.order

    def _rank(self, room: NodeCapacity) -> int:
        return group_rank(room, self._prefer)


def group_rank(room: NodeCapacity, prefer: Sequence[str]) -> int:
    """
    Return the index in `prefer` of the first group that contains the node.

    If no group contains the node, the result is the length of `prefer`.
    """
    groups = enumerate(prefer)
    return next((at for at, group in groups if group in room.groups), len(prefer))
