"""
Compute a KV cache's tokens, and whether one request of maximum length fits, by release.

vLLM sorts a model's layers into groups. Each group has its own block table, and all groups share
one pool of blocks. A block of the pool is as large as all pages of one group's layers together. The
number of blocks is the number that fits on the smallest rank. A request uses blocks for every
group. The docstring of each rule states what changed between releases. Source:
vllm/v1/core/kv_cache_utils.py (0.33: kv_cache_planning.py) of 0.8.5 to 0.33.0. Pure.
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
    """The values that a release computes for its KV cache at startup."""

    bytes_per_token_per_gpu: int
    """
    Bytes that one more token of a long context needs on the stage that needs the most. Windows,
    chunks and states do not count, because they no longer grow, unless the release stores them as
    full attention. The value is divided by the decode context parallel size and rounded up.
    """
    bytes_for_max_model_len_per_gpu: int
    """Bytes of the pool that one request of `max_model_len` needs, on the largest stage."""
    needed_bytes: int
    """
    Bytes that the release requires at start for one request of `max_model_len`. Up to 0.18, they
    may differ from `bytes_for_max_model_len_per_gpu`.
    """
    tokens: int
    """The size of the cache in tokens, as the release logs it for the rank with the fewest."""
    blocks: int
    """Number of blocks in the pool, including vLLM's null block."""
    block_size: int
    """Number of tokens in the smallest block of all groups."""
    max_concurrency: float
    """Number of requests of `max_model_len` that fit at once, as the release logs it."""
    starts: bool
    why: str
    """A sentence that states why the release does not start; empty if it starts."""
    estimated_max_model_len: int
    """
    The length that vLLM's refusal suggests, for the first rank with too little memory. If vLLM
    starts, the requested length.
    """


def cache(layout: Layout, available_bytes: int | Sequence[int]) -> CacheReport:
    """
    Return the report on a KV cache in `available_bytes` of memory.

    `available_bytes` is one number for all GPUs, or a sequence with the number of the smallest GPU
    of each stage. Raises `FleetError` for an unknown KV dtype, and ValueError if the number of
    values differs from the number of stages.
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
    Return the longest `max_model_len` with which the release starts, or 0 if none fits.

    The result is at most `layout.max_model_len`. A release that refuses to start suggests this
    value, and `--max-model-len auto` uses it.
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
    """For each stage, the number of layers with each page, before the layers are grouped."""
    groups: tuple[tuple[Group, ...], ...]
    """
    The groups of each stage. Up to 0.10 a stage groups only its own layers. Since 0.11 all stages
    have the groups of the whole model.
    """

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
        Return the bytes of one block, for releases before 0.27, if groups have several page sizes.

        Up to 0.22, the block has pages of each size in the first group. The number of pages of each
        size is the highest number that any group has of one size. From 0.23 to 0.26, the block has
        of each size the highest number of pages that any group has of that size. Since 0.27, it has
        the pages of the largest group, so this function is not used.
        """
        slots = page_slots([group.on(stage) for group in self.groups[stage]])
        if self.layout.vllm < (0, 23):
            sizes = {page.bytes for page in self.groups[stage][0].on(stage)}
            return sum(sizes) * max(slots.values(), default=0)
        return sum(size * count for size, count in slots.items())

    def _stage_layers(self, group: Group, stage: int) -> Counter[Page]:
        """Return the layers that a release counts for a stage. Up to 0.16, it counts all layers."""
        return group.counts if self.layout.vllm < (0, 17) else group.on(stage)

    def request_blocks(self, stage: int, length: int) -> int:
        """Return the number of blocks that a request of `length` tokens needs in all groups."""
        return sum(self._group_blocks(group, length) for group in self.groups[stage])

    def _group_blocks(self, group: Group, length: int) -> int:
        return max(blocks(self.layout, page, length) for page in group.counts)

    def needed_bytes(self, stage: int, length: int) -> int:
        """
        Return the bytes that the release requires for one request of `length` tokens.

        Up to 0.13, the release adds the bytes of the layers before grouping. From 0.14 to 0.16, it
        requires the bytes of the whole model on every stage. From 0.14 to 0.18, it counts only the
        blocks of the first group.
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
        Return, for each stage, the bytes that the release compares with the required bytes.

        From 0.14 to 0.16, the bytes of the stage with the least memory apply to every stage. Since
        0.29, the null block of the pool is subtracted.
        """
        vllm = self.layout.vllm
        if (0, 14) <= vllm < (0, 17):
            return (min(available),) * len(available)
        if vllm >= (0, 29):
            return tuple(memory - self.block_bytes(stage) for stage, memory in enumerate(available))
        return available

    def longest_length(self, checked: tuple[int, ...], stages: Sequence[int]) -> int:
        """
        Return the longest length, up to the requested one, that fits into the memory of these
        stages.
        """
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
        Return the reason for not starting and the length that vLLM suggests, or None if it starts.
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
                    f"{where}, but only {memory / GIB:.2f} GiB are available: "
                    + (
                        f"set --max-model-len {fits} or less" if fits else "not even one token fits"
                    ),
                    self.longest_length(checked, [stage]),
                )
        return None

    def concurrency(self, stage: int, count: int) -> float:
        """Return the number of requests of maximum length that `count` blocks hold."""
        length = self.layout.max_model_len
        if self.layout.vllm < (0, 9, 1):
            # All tokens divided by the length, without rounding a request up to whole blocks.
            return count * block_size(self.layout) / length
        groups = self.groups[stage]
        if groups[0].packed and self.layout.vllm < (0, 27):
            # The bytes of a request, counted in blocks as large as those of the first group.
            asked = sum(
                self._group_blocks(group, length) * _total_bytes(group.on(stage))
                for group in groups
            )
            return count / max(1, -(-asked // (_total_bytes(groups[0].on(stage)) or 1)))
        return count / self.request_blocks(stage, length)

    def tokens(self, stage: int, count: int, concurrency: float) -> int:
        """
        Return the number of tokens that the release logs for `count` blocks.

        Up to 0.20.1, the release divides the blocks evenly among the groups. Since 0.20.2, it
        multiplies the concurrency by the maximum length, so the memory that windows do not use
        counts as well.
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
        # vLLM uses --block-size even for a model that has only states and stores no tokens.
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
        # Each worker groups its own layers, and the smallest number of blocks is used.
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
