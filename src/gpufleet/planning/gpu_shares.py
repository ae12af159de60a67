"""
Place several models on one GPU: compute the memory utilization for a share, and choose its GPU.
Pure.

`gpu_share` is the fraction of one GPU's memory that a replica's process may allocate there. A GPU
with shares has no replica that uses whole GPUs. The GPU has at most one replica of each model, so
that a model's replicas are spread over GPUs. The shares of a GPU add up to at most `MOST_OF_A_GPU`.
Shares are counted in thousandths.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpufleet.catalog.gpu_models import cuda_total_gib
from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.node.topology import Gpu
from gpufleet.planning.gpu_placement import NodeCapacity, Part, group_rank
from gpufleet.planning.parallelism import Division
from gpufleet.settings.serving_settings import MOST_OF_A_GPU, Argument, Served
from gpufleet.sizing.dummy_run import GIB
from gpufleet.sizing.startup_memory import MOST_CONTEXT, V2_PROFILES_GRAPHS

LAYER = "gpu_share"
UTILIZATION = "gpu-memory-utilization"

GRAPHS_GIB = 1.0
"""
Memory for CUDA graphs, for vLLM releases that may allocate the graphs outside vLLM's budget.

Sizing compares this value with the size of the model's graphs.
"""


# The flag for vLLM


def utilization(
    share: float, total_gib: float, vllm: tuple[int, ...], *, enforce_eager: bool
) -> float:
    """
    Return the value of `--gpu-memory-utilization` for a share of a GPU.

    `total_gib` is the GPU's memory that CUDA reports. vLLM's budget is the returned fraction of
    this memory, even if other servers share the GPU. The CUDA context is not part of vLLM's budget.
    In older releases, the CUDA graphs are not part of it either. The memory for both is therefore
    subtracted from the share.

    >>> utilization(0.2, 79.19, (0, 32, 0), enforce_eager=False)
    0.192
    >>> utilization(0.2, 79.19, (0, 28, 0), enforce_eager=False)
    0.179
    """
    graphs = 0.0 if enforce_eager or vllm >= V2_PROFILES_GRAPHS else GRAPHS_GIB
    found = share - (MOST_CONTEXT / GIB + graphs) / total_gib
    # Rounded down, to not exceed the share. Sizing refuses a share that is too small.
    return max(1, math.floor(found * 1000 + 1e-6)) / 1000


def derive(
    served: Served, flags: Mapping[str, Argument], gpus: Iterable[Gpu], vllm: tuple[int, ...]
) -> tuple[float, str] | None:
    """
    Return the value of `--gpu-memory-utilization` with its reason.

    The result is None if `gpu_share` is not set, or if `gpus` is empty.

    `gpus` are the GPUs of all nodes that declare the model. Raises `FleetError` if the GPUs have
    different amounts of memory.
    """
    if served.gpu_share is None:
        return None
    totals: dict[float, set[str]] = defaultdict(set)
    for gpu in gpus:
        totals[cuda_total_gib(gpu.name, gpu.memory_mib << 20)].add(gpu.name)
    if len(totals) > 1:
        kinds = [f"{join_names(names)} ({total:g} GiB)" for total, names in sorted(totals.items())]
        raise FleetError(
            f"gpu_share: {served.gpu_share:g} is a fraction of one GPU's memory, but the nodes "
            f"that declare the model have GPUs with different memory: {join_names(kinds)}. "
            "Declare the model only on nodes with one kind of GPU. For the other nodes, write a "
            "second entry in `serving` with its own `gpu_share`"
        )
    eager = flags.get("enforce-eager") is True
    for total in totals:
        return (
            utilization(served.gpu_share, total, vllm, enforce_eager=eager),
            f"{served.gpu_share:g} of {total:g} GiB, without the memory that vLLM uses outside "
            "its budget",
        )
    return None


def start_seconds(served: Iterable[Served]) -> int:
    """
    Return the seconds within which all servers that start together must answer.

    The times of servers with a share of a GPU are added, because these servers start one after
    another.
    """
    alone, shared = 0, 0
    for each in served:
        if each.gpu_share is None:
            alone = max(alone, each.start_seconds)
        else:
            shared += each.start_seconds
    return max(alone, shared)


# Where a share is placed


def thousandths(share: float) -> int:
    """
    Return a share in thousandths of a GPU.

    >>> thousandths(0.1), thousandths(0.3)
    (100, 300)
    """
    return math.ceil(share * 1000 - 1e-6)


MOST = thousandths(MOST_OF_A_GPU)


def larger_shares(share: float) -> Iterator[float]:
    """
    Yield the shares in hundredths above `share`, up to `MOST_OF_A_GPU`.

    >>> [*larger_shares(0.925)]
    [0.93, 0.94, 0.95]
    """
    for hundredths in range(thousandths(share) // 10 + 1, MOST // 10 + 1):
        yield hundredths / 100


class SharePicker:
    """
    Picks the GPU of one model's next replica.

    The picker prefers nodes of the most preferred group, then nodes with the fewest replicas of the
    model. On these nodes, the picker chooses the GPU with shares that has the least free room. If
    no GPU with shares has enough room, the picker chooses a free GPU of the node with the most free
    GPUs.
    """

    def __init__(
        self,
        model: str,
        share: int,
        rooms: Iterable[tuple[NodeCapacity, Division]],
        on: Counter[str],
        *,
        displace: bool = False,
        prefer: Sequence[str] = (),
    ) -> None:
        """
        Create a picker for nodes, each with the division of a replica on it.

        `on` has the number of the model's replicas on each node, and the caller updates it.
        """
        self._model = model
        self._share = share
        self._rooms = tuple(rooms)
        self._on = on
        self._displace = displace
        self._prefer = prefer
        # By node: the state for which the answer was computed, and the answer. Unchanged nodes are
        # not computed again.
        self._known: dict[int, tuple[tuple[int, int], tuple[int, ...] | None]] = {}

    def next(self) -> tuple[Division, list[Part]] | None:
        """
        Return the next replica's part, or None if there is no room. The caller assigns the GPU.
        """
        best = min(filter(None, map(self._best, range(len(self._rooms)))), default=None)
        if best is None:
            return None
        *_, at, gpu = best
        room, division = self._rooms[at]
        return division, [(room, (gpu,))]

    def _best(self, at: int) -> tuple[int, ...] | None:
        """Return a node's best GPU with its sort key, or None if there is no room."""
        room = self._rooms[at][0]
        seen = room.changes, self._on[room.name]
        known = self._known.get(at)
        if known is None or known[0] != seen:
            known = self._known[at] = seen, min(self._places(at), default=None)
        return known[1]

    def _places(self, at: int) -> Iterator[tuple[int, ...]]:
        room, division = self._rooms[at]
        rank, on = group_rank(room, self._prefer), self._on[room.name]
        fresh = room.layout.group(room.open, division, pcie=False)
        for gpu in room.layout.gpus:
            displaced = room.displaced_by_share(gpu, self._share, self._model, MOST)
            if displaced is None or (displaced and not self._displace):
                continue
            used = room.share_used(gpu)
            if not (used or displaced or gpu in fresh):
                continue
            free = 0 if used else room.open.bit_count()
            cost = (*room.cost_of(displaced), room.shares_of(displaced))
            yield (*cost, rank, on, not used, -free, -used, room.order, at, gpu)


def shares_text(room: NodeCapacity) -> str:
    """Describe the shares of a node's GPUs: `GPU 0: chat 0.6, embed 0.2; GPU 1: free`."""
    return "; ".join(
        f"GPU {gpu}: {', '.join(_names(room.shares_on(gpu))) or _whole(room, gpu)}"
        for gpu in room.layout.gpus
    )


def _names(shares: Mapping[tuple[str, int], int]) -> Iterator[str]:
    for (model, _), share in sorted(shares.items(), key=lambda each: (-each[1], each[0])):
        yield f"{model} {share / 1000:g}"


def _whole(room: NodeCapacity, gpu: int) -> str:
    return "free" if room.free >> gpu & 1 else "a whole replica"
