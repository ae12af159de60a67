"""
Compute a KV cache's tokens, and whether one request of maximum length fits, by release.

vLLM sorts a model's layers into groups, each with its own block table, and all groups share one
pool of blocks. A block of the pool is as large as the pages of one group's layers. The number of
blocks is the number that fits on the smallest rank. A request uses blocks of every group. The text
of each rule has its changes between releases. Source: vllm/v1/core/kv_cache_utils.py (0.33:
kv_cache_planning.py) of 0.8.5 to 0.33.0. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from gpufleet.sizing.kv_bytes import (
    Kind,
    Layout,
    Page,
    block_size,
    blocks,
    pages,
    row_bytes,
)
from gpufleet.sizing.kv_groups import Group, GroupingError, group_layers, page_slots

GIB = 1 << 30


@dataclass(frozen=True)
class CacheReport:
    """A release's report about its KV cache at startup."""

    bytes_per_token_per_gpu: int
    """
    Bytes that one more token of a long context needs on the largest stage. Windows, chunks and
    states that the release keeps as such have stopped growing. Divided by decode context
    parallelism and rounded up.
    """
    bytes_for_max_model_len_per_gpu: int
    """Bytes of the pool that one request of `max_model_len` needs, on the largest stage."""
    needed_bytes: int
    """
    Bytes that the release requires at start; up to 0.18 they may differ from the previous field.
    """
    tokens: int
    """Tokens that the release logs, on the rank with the fewest."""
    blocks: int
    """Blocks of the pool, including its null block."""
    block_size: int
    """Tokens of the smallest group's block."""
    max_concurrency: float
    """Requests of `max_model_len` at once, as logged by the release."""
    starts: bool
    why: str
    """Why the release does not start, as a sentence; empty if it starts."""
    estimated_max_model_len: int
    """
    The length that vLLM's refusal suggests, for the first rank with too little memory. If vLLM
    starts, the requested length.
    """


def cache(layout: Layout, available_bytes: int | Sequence[int]) -> CacheReport:
    """
    Return the KV cache that `available_bytes` hold.

    `available_bytes` is one number for every GPU, or the smallest GPU's for each stage. Raises
    `FleetError` for an unknown KV dtype, ValueError if the number of values differs from the number
    of stages.
    """
    available = _per_stage(layout, available_bytes)
    smallest = block_size(layout)
    if not any(layout.stages):
        return CacheReport(0, 0, 0, 0, 1, smallest, 0.0, True, "", layout.max_model_len)
    try:
        plan = _plan(layout)
    except GroupingError as refused:
        return CacheReport(0, 0, 0, 0, 0, smallest, 0.0, False, str(refused), 0)
    length = layout.max_model_len
    report = CacheReport(
        bytes_per_token_per_gpu=max(map(plan.token_bytes, range(layout.pipeline))),
        bytes_for_max_model_len_per_gpu=max(
            plan.block_bytes(stage) * plan.request_blocks(stage, length)
            for stage in range(layout.pipeline)
        ),
        needed_bytes=max(plan.needed_bytes(stage, length) for stage in range(layout.pipeline)),
        tokens=0,
        blocks=0,
        block_size=plan.block_size,
        max_concurrency=0.0,
        starts=True,
        why="",
        estimated_max_model_len=length,
    )
    if refusal := plan.refusal(available):
        why, estimate = refusal
        report = replace(report, starts=False, why=why, estimated_max_model_len=estimate)
    counts = [
        max(0, available[stage]) // plan.block_bytes(stage) for stage in range(layout.pipeline)
    ]
    if layout.vllm >= (0, 11):
        counts = [min(counts)] * layout.pipeline
    said = []
    for stage, count in enumerate(counts):
        concurrency = plan.concurrency(stage, count)
        said.append((plan.tokens(stage, count, concurrency), concurrency))
    return replace(
        report,
        blocks=min(counts),
        tokens=min(tokens for tokens, _ in said),
        max_concurrency=min(concurrency for _, concurrency in said),
    )


def largest_max_model_len(layout: Layout, available_bytes: int | Sequence[int]) -> int:
    """
    Return the longest `max_model_len` that starts, up to `layout.max_model_len`, or 0.

    The release's refusal suggests this value, and `--max-model-len auto` uses it.
    """
    available = _per_stage(layout, available_bytes)
    if not any(layout.stages):
        return layout.max_model_len
    try:
        plan = _plan(layout)
        return plan.longest_length(plan.compared_bytes(available), range(layout.pipeline))
    except GroupingError:
        return 0


def _per_stage(layout: Layout, available: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(available, int):
        return (available,) * layout.pipeline
    if len(available) != layout.pipeline:
        raise ValueError(
            f"the memory of {len(available)} stages is given, but the layout has {layout.pipeline}"
        )
    return tuple(available)


@dataclass(frozen=True)
class _Plan:
    """A model's groups, and the release's computations with them."""

    layout: Layout
    raw: tuple[Counter[Page], ...]
    """The number of layers with each page, by stage, before grouping."""
    groups: tuple[tuple[Group, ...], ...]
    """The groups of each stage: its own until 0.10, the whole model's since."""

    @property
    def block_size(self) -> int:
        """Return the tokens of the smallest group's block."""
        return min(page.block for group in self.groups[0] for page in group.counts)

    def token_bytes(self, stage: int) -> int:
        """Return the bytes that one more token of a long context needs on this stage."""
        grows = sum(
            page.grows * count
            for group in self.groups[stage]
            for page, count in group.on(stage).items()
        )
        return -(-grows // self.layout.decode_context_parallel)

    def block_bytes(self, stage: int) -> int:
        """Return the bytes of one block of the pool on this stage."""
        return self._block_bytes[stage]

    @cached_property
    def _block_bytes(self) -> tuple[int, ...]:
        return tuple(map(self._block_bytes_of, range(self.layout.pipeline)))

    def _block_bytes_of(self, stage: int) -> int:
        groups = self.groups[stage]
        if groups[0].packed and self.layout.vllm < (0, 27):
            return self._packed_block_bytes(stage)
        whole = groups[0].packed or (len(groups) == 1 and groups[0].uniform)
        if self.layout.vllm >= (0, 29) or whole:
            row = row_bytes(self.layout)
            most = max(_total_bytes(self._stage_layers(group, stage)) for group in groups)
            return -(-most // row) * row
        return max(group.on(stage).total() for group in groups) * groups[0].page.bytes

    def _packed_block_bytes(self, stage: int) -> int:
        """
        Return the bytes of one block if groups have pages of several sizes.

        Until 0.22 the block has, of each size in the first group, as many pages as any group has
        tuples; since then, of each size as many as any group has. Since 0.27 it has the pages of
        the largest group.
        """
        slots = page_slots([group.on(stage) for group in self.groups[stage]])
        if self.layout.vllm < (0, 23):
            sizes = {page.bytes for page in self.groups[stage][0].on(stage)}
            return sum(sizes) * max(slots.values(), default=0)
        return sum(size * count for size, count in slots.items())

    def _stage_layers(self, group: Group, stage: int) -> Counter[Page]:
        """Return the layers with which a stage computes: until 0.16 the whole model's."""
        return group.counts if self.layout.vllm < (0, 17) else group.on(stage)

    def request_blocks(self, stage: int, length: int) -> int:
        """Return the number of blocks that a request of `length` tokens needs, over all groups."""
        return sum(self._group_blocks(group, length) for group in self.groups[stage])

    def _group_blocks(self, group: Group, length: int) -> int:
        return max(blocks(self.layout, page, length) for page in group.counts)

    def needed_bytes(self, stage: int, length: int) -> int:
        """
        Return the bytes that the release requires for one request of `length` tokens.

        Until 0.13 these are the layers' needs before grouping. 0.14 to 0.16 require the whole
        model's need on every stage, and releases until 0.18 only the blocks of the first group.
        """
        vllm, groups = self.layout.vllm, self.groups[stage]
        if vllm < (0, 14):
            return self._request_bytes(self.raw[stage], length)
        if vllm >= (0, 29):
            return self.block_bytes(stage) * self.request_blocks(stage, length)
        if groups[0].packed:
            slots = page_slots([group.on(stage) for group in groups])
            sizes = {page.bytes for page in groups[0].on(stage)}
            one = sum(sizes) * max(slots.values(), default=0)
            return one * self.request_blocks(stage, length)
        if len(groups) == 1 and groups[0].uniform:
            return self._request_bytes(self._stage_layers(groups[0], stage), length)
        most = max(self._stage_layers(group, stage).total() for group in groups)
        asked = groups[:1] if vllm < (0, 19) else groups
        return most * groups[0].page.bytes * sum(self._group_blocks(g, length) for g in asked)

    def _request_bytes(self, counts: Counter[Page], length: int) -> int:
        return sum(
            count * blocks(self.layout, page, length) * page.bytes for page, count in counts.items()
        )

    def compared_bytes(self, available: tuple[int, ...]) -> tuple[int, ...]:
        """
        Return the bytes that the release compares with a stage's need.

        0.14 to 0.16 use the smallest stage's bytes; since 0.29 the pool's null block is subtracted.
        """
        vllm = self.layout.vllm
        if (0, 14) <= vllm < (0, 17):
            return (min(available),) * len(available)
        if vllm >= (0, 29):
            return tuple(memory - self.block_bytes(stage) for stage, memory in enumerate(available))
        return available

    def longest_length(self, checked: tuple[int, ...], stages: Sequence[int]) -> int:
        """Return the longest length, up to the requested one, whose need fits on these stages."""
        low, high = 0, self.layout.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if all(0 < checked[stage] >= self.needed_bytes(stage, middle) for stage in stages):
                low = middle
            else:
                high = middle - 1
        return low

    def refusal(self, available: tuple[int, ...]) -> tuple[str, int] | None:
        """
        Return why the release does not start, and the length that it suggests; None if it starts.
        """
        length, checked = self.layout.max_model_len, self.compared_bytes(available)
        for stage, memory in enumerate(checked):
            if memory <= 0:
                return "no memory is left for the KV cache", 0
            needed = self.needed_bytes(stage, length)
            if needed > memory:
                where = f" on stage {stage}" if len(available) > 1 else ""
                fits = self.longest_length(checked, range(len(checked)))
                return (
                    f"one request of {length} tokens needs {needed / GIB:.2f} GiB of KV cache"
                    f"{where}, and {memory / GIB:.2f} GiB are available: "
                    + (f"set --max-model-len {fits} or less" if fits else "no token fits"),
                    self.longest_length(checked, [stage]),
                )
        return None

    def concurrency(self, stage: int, count: int) -> float:
        """Return the number of requests of maximum length that `count` blocks hold."""
        length = self.layout.max_model_len
        if self.layout.vllm < (0, 9, 1):
            # Tokens over the length, without rounding a request up to blocks.
            return count * block_size(self.layout) / length
        groups = self.groups[stage]
        if groups[0].packed and self.layout.vllm < (0, 27):
            # A request's bytes in blocks of the first group's size.
            asked = sum(
                self._group_blocks(group, length) * _total_bytes(group.on(stage))
                for group in groups
            )
            return count / max(1, -(-asked // (_total_bytes(groups[0].on(stage)) or 1)))
        return count / self.request_blocks(stage, length)

    def tokens(self, stage: int, count: int, concurrency: float) -> int:
        """
        Return the tokens that the release logs for `count` blocks.

        Until 0.20.1 the blocks are shared evenly by the groups; since 0.20.2 the tokens are the
        concurrency times the maximum length, which counts memory that windows leave free.
        """
        layout = self.layout
        if layout.vllm >= (0, 20, 2):
            return int(concurrency * layout.max_model_len)
        groups = self.groups[stage]
        if layout.vllm < (0, 9, 1):
            return count * block_size(layout)
        if layout.vllm >= (0, 11):
            return count // len(groups) * self.block_size * layout.decode_context_parallel
        if len(groups) > 1:
            return count // len(groups) * self.block_size
        # --block-size, even of states alone, which do not come in tokens.
        return count * block_size(layout) * layout.decode_context_parallel


@lru_cache(maxsize=256)
def _plan(layout: Layout) -> _Plan:
    raw = tuple(pages(layout, stage) for stage in layout.stages)
    if not all(raw):
        raise GroupingError(
            "a pipeline stage has no layer with a KV cache: set a lower --pipeline-parallel-size"
        )
    if layout.decode_context_parallel > 1 and any(
        page.kind in (Kind.WINDOW, Kind.CHUNK) for stage in raw for page in stage
    ):
        raise GroupingError(
            "decode context parallelism does not work with sliding windows or chunks: set "
            "--decode-context-parallel-size 1"
        )
    if layout.vllm < (0, 11):
        # Each worker groups its own layers, and the smallest number of blocks counts.
        groups = tuple(
            group_layers(layout, [(number, page) for page in stage])
            for number, stage in enumerate(raw)
        )
    else:
        whole = group_layers(
            layout, [(number, page) for number, stage in enumerate(raw) for page in stage]
        )
        groups = (whole,) * len(raw)
    return _Plan(layout, tuple(map(Counter, raw)), groups)


def _total_bytes(counts: Counter[Page]) -> int:
    return sum(page.bytes * count for page, count in counts.items())
