"""
Summarize a plan: count its GPUs by use, and combine equal nodes into blocks. Pure.

Two nodes are in one block if they have the same kind of GPUs, and if each runs the same parts of
the same models on the same GPUs and ports. Only the numbers of their replicas differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.formatting import count_of, join_names, node_ranges, ranges
from gpufleet.node.topology import Node, islands
from gpufleet.planning.planner import FleetPlan
from gpufleet.planning.stage import Stage


@dataclass(frozen=True)
class Totals:
    """The nodes' GPUs by use. Every GPU is counted as planned, free, reserved or unfit."""

    gpus: int = 0
    planned: int = 0
    free: int = 0
    reserved: int = 0
    """GPUs that `gpus.reserved` excludes from the plan."""
    unfit: int = 0
    largest_free_island: int = 0
    """The largest number of free GPUs of one node that NVLink joins."""
    largest_on: tuple[str, ...] = ()
    """The nodes with a free island of that size."""

    def __str__(self) -> str:
        """
        Return the totals as a sentence.

        >>> str(Totals(16, 12, 4, 0, 0, 4, ("gpu-02",)))
        '16 GPUs: 12 planned, 4 free, 0 unfit; the largest free island has 4 GPUs (gpu-02)'
        """
        reserved = f", {self.reserved} reserved for others" if self.reserved else ""
        island = (
            f"; the largest free island has {count_of(self.largest_free_island, 'GPU')} "
            f"({join_names(self.largest_on)})"
            if self.largest_on
            else ""
        )
        return (
            f"{count_of(self.gpus, 'GPU')}: {self.planned} planned, {self.free} free{reserved}, "
            f"{self.unfit} unfit{island}"
        )


def count_gpus(
    plan: FleetPlan, nodes: Iterable[Node], reserved: Mapping[str, Collection[int]]
) -> Totals:
    """Return the totals of a plan. `reserved` has the reserved GPUs of each node."""
    used: dict[str, set[int]] = defaultdict(set)
    for stage in plan.stages:
        used[stage.node].update(stage.gpus)
    gpus = planned = free = taken = unfit = 0
    sizes: dict[str, int] = {}
    for node in nodes:
        fit = {gpu.index for gpu in node.gpus}
        others = fit & set(reserved.get(node.name, ()))
        left = fit - others - used[node.name]
        gpus += len(fit) + len(node.unfit)
        planned += len(used[node.name])
        free += len(left)
        taken += len(others)
        unfit += len(node.unfit)
        sizes[node.name] = max(map(len, islands(left, node.nvlink)), default=0)
    largest = max(sizes.values(), default=0)
    on = tuple(sorted(name for name, size in sizes.items() if size == largest > 0))
    return Totals(gpus, planned, free, taken, unfit, largest, on)


@dataclass(frozen=True)
class Block:
    """Nodes with equal contents, in the order of their names."""

    nodes: tuple[Node, ...]
    stages: tuple[Stage, ...]
    """Stages of the first node."""
    replicas: tuple[tuple[int, ...], ...]
    """
    For each stage in `stages`: the numbers of the replicas that have this place on the block's
    nodes.
    """

    @property
    def names(self) -> str:
        """The names of the nodes: `gpu-[01-08]`."""
        return node_ranges(node.name for node in self.nodes)


def equal_nodes(plan: FleetPlan, nodes: Iterable[Node]) -> list[Block]:
    """Return all nodes in blocks, in the order of each block's first node."""
    on: dict[str, list[Stage]] = defaultdict(list)
    for stage in plan.stages:
        on[stage.node].append(stage)
    alike: dict[object, list[Node]] = defaultdict(list)
    for node in sorted(nodes, key=lambda node: node.name):
        on[node.name].sort(key=_part)
        kinds = tuple((gpu.index, gpu.name, gpu.memory_mib) for gpu in node.gpus)
        links = tuple(sorted(node.nvlink.items()))
        key = (kinds, links, tuple(sorted(node.unfit.items())), *map(_part, on[node.name]))
        alike[key].append(node)
    return [
        Block(
            tuple(block),
            tuple(on[block[0].name]),
            tuple(
                tuple(sorted({stage.replica for stage in same}))
                for same in zip(*(on[node.name] for node in block), strict=True)
            ),
        )
        for block in alike.values()
    ]


def replica_names(model: str, numbers: Collection[int]) -> str:
    """
    Return the names of replicas in short form.

    >>> replica_names("llama", [0, 1, 2, 4]), replica_names("llama", [3])
    ('llama-[0-2,4]', 'llama-3')
    """
    return f"{model}-[{ranges(numbers)}]" if len(numbers) > 1 else f"{model}-{ranges(numbers)}"


def gpus_text(stage: Stage) -> str:
    """Return a stage's GPUs on its node, or its GPU with the share: `0-3`, `0 (0.2)`."""
    share = "" if stage.gpu_share is None else f" ({stage.gpu_share:g})"
    return f"{ranges(stage.gpus)}{share}"


def _part(stage: Stage) -> tuple[Any, ...]:
    """
    Return a key for a node's part of a replica. The key does not contain the replica's number.
    """
    return (
        stage.gpus,
        stage.model,
        stage.ports,
        stage.tensor_parallel,
        stage.pipeline_parallel,
        stage.data_parallel,
        stage.expert_parallel,
        stage.node_rank,
        len(stage.nodes),
        stage.gpu_share or 1,
    )
