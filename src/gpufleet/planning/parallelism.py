"""
Divide a replica over GPUs, and over as few nodes of one kind as possible. Pure.

GPUs that exchange data in every layer are placed together in one NVLink island. These are the GPUs
of a tensor-parallel group. If each GPU has whole experts, they are the GPUs of all engines of the
replica.

A multi-node replica is divided into equal shares. Each node has whole engines, or an equal part of
one engine. Each node also has whole groups, or an equal part of one group. The node's number
therefore determines the position of its ranks, and vLLM receives only this number (`--node-rank`,
`--data-parallel-start-rank`).

A group spans nodes only if the operator set the group's size, and if the group does not fit on
fewer nodes even over PCIe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from gpufleet.settings.serving_settings import Served


@dataclass(frozen=True)
class Kind:
    """The properties of nodes that determine a model's division."""

    gpu: str
    """Product name in NVML."""
    memory_mib: int
    """Memory of one GPU according to NVML, which is more than CUDA gives to processes."""
    compute_capability: tuple[int, int]
    islands: tuple[int, ...]
    """The number of GPUs in each NVLink island, largest first."""
    vllm: str
    device: str = "cuda"
    more_groups: tuple[tuple[int, int], ...] = ()
    """
    (size, number of NVLink groups) for each size with more groups than fit inside the islands.
    """

    def groups(self, size: int) -> int:
        """
        Return the number of NVLink groups of `size` GPUs on a node of this kind.

        >>> Kind("NVIDIA A100 80GB PCIe", 81920, (8, 0), (3, 1), "0.32.0").groups(2)
        1
        """
        by_islands = sum(island // size for island in self.islands)
        return max(by_islands, dict(self.more_groups).get(size, 0))

    @cached_property
    def gpus(self) -> int:
        """Return the number of GPUs on a node of this kind."""
        return sum(self.islands)

    def __hash__(self) -> int:
        """Return the cached hash, because the plan of a large fleet uses it constantly."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.gpu, self.memory_mib, self.islands, self.vllm, self.device))

    def __str__(self) -> str:
        """
        Format the kind for a table's cell.

        >>> str(Kind("NVIDIA L4", 23034, (8, 9), (1, 1), "0.32.0"))
        '2 x NVIDIA L4, no NVLink'
        """
        largest = self.islands[0] if self.islands else 0
        if largest <= 1:
            joined = ", no NVLink" if self.gpus > 1 else ""
        elif largest == self.gpus:
            joined = ", all on NVLink"
        else:
            joined = f", NVLink islands of {' + '.join(map(str, self.islands))}"
        return f"{self.gpus} x {self.gpu}{joined}"


@dataclass(frozen=True)
class Division:
    """The division of a replica over GPUs and nodes. The fields have the names of vLLM's flags."""

    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    nodes: int = 1
    """The number of nodes, each with the same number of GPUs."""

    @cached_property
    def gpus(self) -> int:
        """Return the number of GPUs of a replica, on all its nodes."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @cached_property
    def group(self) -> int:
        """
        Return the number of GPUs that wait for each other in every layer.

        These are the GPUs of a tensor-parallel group. With expert parallelism, they are the GPUs of
        all engines, because every layer sends tokens to experts on other GPUs.
        """
        return (
            self.gpus if self.expert_parallel and self.data_parallel > 1 else self.tensor_parallel
        )

    @cached_property
    def share(self) -> int:
        """Return the number of GPUs on each node."""
        return self.gpus // self.nodes

    @cached_property
    def unit(self) -> int:
        """
        Return the number of GPUs that NVLink must join on a node.

        These are a whole group, or the group's part on the node.
        """
        return min(self.group, self.share)

    @cached_property
    def units(self) -> int:
        """Return the number of units on one node."""
        return self.share // self.unit

    @property
    def spans_nodes(self) -> bool:
        """
        Return whether a group is larger than a node's share.

        If this is true, every layer waits for the network.
        """
        return self.group > self.share

    @property
    def width_reason(self) -> str:
        """
        Return the reason for a group's width.

        >>> Division(16).width_reason
        'TP 16'
        >>> Division(1, data_parallel=32, expert_parallel=True).width_reason
        'DP 32 with EP'
        """
        return (
            f"TP {self.tensor_parallel}"
            if self.group == self.tensor_parallel
            else f"DP {self.data_parallel} with EP"
        )

    def __str__(self) -> str:
        """
        Format the division for a sentence.

        >>> str(Division(4)), str(Division(8, 2, nodes=2)), str(Division(1, 1, 8, True))
        ('TP 4', 'TP 8 x PP 2', 'TP 1 x DP 8 with EP')
        """
        others = (("PP", self.pipeline_parallel), ("DP", self.data_parallel))
        words = [
            f"TP {self.tensor_parallel}",
            *(f"{name} {size}" for name, size in others if size > 1),
        ]
        return " x ".join(words) + (" with EP" if self.expert_parallel else "")


def spread(division: Division, served: Served, kind: Kind) -> Division:
    """
    Return the division over as few nodes as possible, if it does not fit on one node.

    The division is returned unchanged in these cases:

    - It fits on one node.
    - It is not allowed to span nodes.
    - No number of nodes holds it in equal shares.
    - A group would be split over more nodes than necessary.

    In the last three cases, `parts_per_node` is 0.
    """
    if not served.span_nodes or parts_per_node(division, served, kind):
        return division
    found = next(_spreads(division, served, kind), division)
    if found.spans_nodes and not served.allow_pcie:
        # PCIe is faster than a network: a group that fits on fewer nodes over PCIe is not split.
        beside = served.model_copy(update={"allow_pcie": True})
        if parts_per_node(division, beside, kind) or next(
            _spreads(division, beside, kind)
        ).nodes < (found.nodes):
            return division
    return found


def _spreads(division: Division, served: Served, kind: Kind) -> Iterator[Division]:
    """Yield the division over each number of nodes that can hold it, smallest number first."""
    engine = division.tensor_parallel * division.pipeline_parallel
    for nodes in range(2, division.gpus + 1):
        if division.gpus % nodes:
            continue
        found = replace(division, nodes=nodes)
        even = _is_even(found.share, engine) and _is_even(found.share, division.tensor_parallel)
        if even and parts_per_node(found, served, kind):
            yield found


def _is_even(share: int, part: int) -> bool:
    return share % part == 0 or part % share == 0


def parts_per_node(division: Division, served: Served, kind: Kind) -> int:
    """Return the number of replicas' parts that fit on an empty node."""
    groups = kind.groups(division.unit)
    if served.allow_pcie:
        groups = max(groups, kind.gpus // division.unit)
    return groups // max(1, division.units)


def replica_capacity(division: Division, served: Served, kind: Kind, nodes: int) -> int:
    """
    Return the number of replicas that fit on `nodes` empty nodes of a kind.

    >>> pairs = Kind("NVIDIA A100 80GB PCIe", 81920, (8, 0), (2, 2), "0.32.0")
    >>> two_nodes = Division(2, pipeline_parallel=2, nodes=2)
    >>> replica_capacity(two_nodes, Served(model="/srv/m"), pairs, 3)
    3
    """
    if nodes < division.nodes:
        return 0
    # A replica's parts are on distinct nodes. If each part is placed on the emptiest node, the room
    # that is left over is too small for one more replica.
    return parts_per_node(division, served, kind) * nodes // division.nodes
